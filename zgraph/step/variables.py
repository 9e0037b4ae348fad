"""What a function reads from outside: its variables, and the attributes and entries of them that its code names."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

from zgraph.torch_compat.dynamo import without_compile

DEPTH = 4  # of names such as self.config.loss.weight


def variables_of(function: Callable[..., Any], *, but: nn.Module | None = None) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function may read from outside, as far as it is set.

    These are its closure, the globals that it names, the object that it is a method of, and in all of them attributes
    and entries whose names stand in its code: `config.alpha`, `self.args["alpha"]`. Of a module everything is read, for
    its forward may read it. What is read by functions that this one calls is not seen.

    Args:
        function: a function or a method.
        but: a module whose attributes are left out.

    Raises:
        ValueError: `function` is something else.
    """
    plain: Any = inspect.unwrap(function)
    owner = getattr(plain, "__self__", None)
    plain = getattr(plain, "__func__", plain)
    if not inspect.isfunction(plain):
        raise ValueError(
            f"zgraph.training_step: it decorates a function, and was given a {type(function).__name__}; write a `def` "
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
    """Reads objects as far as code names what they hold.

    Attributes:
        names: attributes that the code names.
        keys: constants of the code, by which it may read entries.
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
