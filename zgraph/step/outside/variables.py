"""Find the values that a function reads from outside: variables, and the attributes and entries that its code names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from zgraph.torch_compat.autograd import begin_scaling, scaler_tensors
from zgraph.torch_compat.dynamo import without_compile

DEPTH = 4  # limit for names such as self.config.loss.weight


def variables_of(function: Callable[..., Any], *, but: nn.Module | None = None) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the variables that a function may read from outside.

    These are the variables in its closure, the globals that its code names, and `self` of a method. Attributes and
    entries of these are included if the code names them: `config.alpha`, `self.args["alpha"]`. A module's attributes
    are all included, since its forward may read them. Variables that only called functions read are not included.

    Args:
        function: a function or a method.
        but: a module whose attributes are left out.

    Raises:
        ValueError: `function` is neither a function nor a method.
    """
    plain: Any = inspect.unwrap(function)
    owner = getattr(plain, "__self__", None)
    plain = getattr(plain, "__func__", plain)
    if not inspect.isfunction(plain):
        raise ValueError(
            f"zgraph.training_step: it decorates functions, but was given a {type(function).__name__}; write a `def` "
            "that holds the lines of the loop."
        )
    code = plain.__code__
    reader = _Reader(code.co_names, frozenset(key for key in code.co_consts if isinstance(key, str | int)), but)
    if owner is not None:
        yield from reader.read(code.co_varnames[0], owner)
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            yield from reader.read(name, cell.cell_contents)
    for name in code.co_names:
        if name in plain.__globals__:
            yield from reader.read(name, plain.__globals__[name])


@dataclass(frozen=True)
class _Reader:
    """Reads the contents of objects that code names.

    Attributes:
        names: attributes that the code names.
        keys: constants of the code, which may be keys of entries that the code reads.
        but: a module whose attributes are left out.
    """

    names: tuple[str, ...]
    keys: frozenset[str | int]
    but: nn.Module | None

    def read(self, path: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
        yield path, value
        if isinstance(value, nn.Module):
            if without_compile(value) is not self.but:
                for name, part in value.named_modules(prefix=path):
                    yield from ((f"{name}.{key}", entry) for key, entry in vars(part).items())
        elif depth and not isinstance(value, Tensor | optim.Optimizer):
            for name, member in self._members(path, value):
                yield from self.read(name, member, depth - 1)

    def _members(self, path: str, value: Any) -> list[tuple[str, Any]]:
        if isinstance(value, Mapping):
            return [(f"{path}[{key!r}]", value[key]) for key in value if key in self.keys]
        if isinstance(value, list | tuple):
            return [(f"{path}[{position}]", entry) for position, entry in enumerate(value) if position in self.keys]
        held = getattr(value, "__dict__", {})
        return [(f"{path}.{name}", held[name]) for name in self.names if name in held]


@dataclass(frozen=True)
class Outside:
    """Values that a function reads from outside, at one call.

    Attributes:
        variables: names and values from `variables_of`.
        scalers: enabled GradScalers among the variables, each once.
        tensors: by name, variables that are tensors, and tensors in lists, tuples, dicts, modules and GradScalers.
    """

    variables: list[tuple[str, Any]]
    scalers: list[torch.amp.GradScaler]
    tensors: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        model: nn.Module,
        own: Container[int],
        device: torch.device,
        hooks: Sequence[Callable[..., Any]] = (),
    ) -> Outside:
        """Read the variables that a function, and hooks on parameters, read from outside.

        Args:
            function: the user's function.
            model: the step's model, whose attributes are left out.
            own: ids of the tensors that belong to the model, which are left out, too.
            device: device for the scales of GradScalers that have not been used yet.
            hooks: hooks on parameters, which may read more variables.
        """
        variables = list(variables_of(function, but=model))
        for number, hook in enumerate(hooks):
            variables += [(f"hook{number}.{name}", value) for name, value in _variables_of_hook(hook, model)]
        scalers = {id(one): one for _, one in variables if isinstance(one, torch.amp.GradScaler) and one.is_enabled()}
        for scaler in scalers.values():
            begin_scaling(scaler, device)
        found: dict[int, tuple[str, Tensor]] = {}
        for name, value in variables:
            for path, tensor in _tensors_in(name, value, depth=2):
                if id(tensor) not in own:
                    found.setdefault(id(tensor), (path, tensor))
        return cls(variables, list(scalers.values()), dict(found.values()))


def _variables_of_hook(hook: Callable[..., Any], model: nn.Module) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, partial):
        yield from ((f"arguments[{place}]", value) for place, value in enumerate(hook.args))
        yield from hook.keywords.items()
        yield from _variables_of_hook(hook.func, model)
        return
    called = hook if inspect.isroutine(hook) else getattr(hook, "__call__", hook)  # noqa: B004  # for a callable object
    if inspect.isfunction(getattr(called, "__func__", called)):
        yield from variables_of(called, but=model)


def _tensors_in(path: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, torch.amp.GradScaler):
        yield from ((f"{path}.{name}", tensor) for name, tensor in scaler_tensors(value).items())
    elif depth and isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _tensors_in(f"{path}[{place}]", entry, depth - 1)
    elif depth and isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _tensors_in(f"{path}[{key!r}]", entry, depth - 1)
