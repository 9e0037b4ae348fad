"""Optimizer steps on sharded parameters: all ranks must step together, and only on reduced gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.changes import Changes, checksum
from zgraph.runtime.exchanges.collectives import end_together
from zgraph.runtime.exchanges.identity import About, Exchanges, Options
from zgraph.runtime.window_state import Accumulation, ParameterState
from zgraph.torch_compat.dtensor import dtensor_like, gradients_of, local_of
from zgraph.torch_compat.groups import resolve_group
from zgraph.torch_compat.modules import hook_steps


@dataclass(frozen=True, eq=False)
class Model:
    """The parameters sharded by one call of `zgraph.shard`.

    Attributes:
        exchanges: counter of the model's exchanges.
        group_names: names of the process groups of the mesh's axes.
        states: state of each parameter.
        divisor: number by which the sum of all ranks' gradients is divided.
    """

    exchanges: Exchanges
    group_names: tuple[str, ...]
    states: tuple[ParameterState, ...]
    divisor: int = 1

    @property
    def changes(self) -> Changes:
        """Record of the training loop's changes to weights and gradients since the last step."""
        return self.exchanges.changes

    def end_step(
        self,
        options: Options = (),
        stepping: Mapping[int, Tensor] = MappingProxyType({}),
        state: Iterable[tuple[Tensor, int]] = (),
        number: int = 0,
        detail: str = "",
    ) -> None:
        """Wait until all ranks end the step, and compare their exchange counts, optimizer options and changes.

        Args:
            options: (name, value) of the optimizer's numeric options.
            stepping: parameters that the optimizer steps, by id.
            state: tensors of the optimizer's state, each with the origin of its parameter.
            number: hash of the step's other inputs.
            detail: description of these inputs, for error messages.

        Raises:
            AgreementError: counts, options or changes differ between ranks.
        """
        found = [(state.name, state.parameter) for state in self.states if state.is_among(stepping)]
        grads = gradients_of([parameter for _, parameter in found])
        for place, grad in enumerate(grads):
            if grad is not None and not isinstance(grad, DTensor):
                grads[place] = _put_sharded_gradient(found[place][1], grad)
        origins = [origin_of_parameter(parameter) for _, parameter in found]
        after = f" after {self.changes.last} of weights or gradients" if self.changes.last else ""
        parameters = zip((parameter for _, parameter in found), origins, strict=True)
        changes, text = self.changes.taken([*parameters, *zip(grads, origins, strict=True), *state]), detail
        if changes:
            without = [name for (name, _), grad in zip(found, grads, strict=True) if grad is None]
            text += (f" without gradients of {', '.join(without[:4])}" if without else "") + after
        self._wait(self.exchanges.end_of_step(options, number, changes, text))

    def meet(self, call: str, options: Options = (), number: int = 0, detail: str = "") -> None:
        """Wait until all ranks have made the same call with the same optimizer options.

        Args:
            call: name of the call.
            options: (name, value) of the optimizer's numeric options.
            number: hash of the call's arguments, which must be equal on all ranks.
            detail: description of the arguments, for error messages.

        Raises:
            AgreementError: a rank has made another call.
        """
        self._wait(self.exchanges.meeting(call, options, number, detail))

    def reduced(self, loss: Tensor) -> Tensor:
        """Return the loss reduced over all ranks like gradients: the sum divided by `divisor`.

        Raises:
            AgreementError: a rank has made another call.
        """
        self.meet("averaging what a closure returns")
        found = loss.detach().clone()
        for group_name in self.group_names:
            torch.distributed.all_reduce(found, group=resolve_group(group_name))
        return found / self.divisor

    def _wait(self, about: About) -> None:
        for place, group_name in enumerate(self.group_names):
            end_together(group_name, about._replace(key=hash((about.key, place))))  # another key in each group


def _put_sharded_gradient(parameter: Tensor, grad: Tensor) -> DTensor:
    """Replace a parameter's unsharded gradient, equal on all ranks, by this rank's shard of it; return the shard."""
    parameter.grad = made = _sharded(cast(DTensor, parameter), grad)
    return made


def shard_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """Replace plain tensors, in the optimizer state of sharded parameters, by this rank's shards.

    Such tensors come from a state dict of the unsharded model's optimizer, and are equal on all ranks. LBFGS and
    optimizers from outside torch, which may keep whole tensors by themselves, are left alone.
    """
    is_flat = isinstance(optimizer, torch.optim.LBFGS)  # it keeps vectors of all parameters together
    if is_flat or not _is_of_torch(optimizer):
        return
    for parameter, entries in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for key, value in entries.items():
                is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
                if is_plain and value.ndim and value.shape == parameter.shape:
                    entries[key] = _sharded(parameter, value)


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def _sharded(like: DTensor, whole: Tensor) -> DTensor:
    """Shard a plain tensor, which is equal on all ranks, like a parameter; return this rank's shard."""
    placed = distribute_tensor(
        whole.detach().to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    made = dtensor_like(local_of(placed).to(whole.device), like)
    made.digest = checksum([whole])  # pyright: ignore[reportAttributeAccessIssue]  # it is of the parameter's class
    return made


class Checked(Protocol):
    """Further parameters whose gradients may wait."""

    def check_step(self, stepping: Mapping[int, Tensor]) -> None:
        """Check, on all ranks alike, that no gradient of the stepped parameters waits."""
        ...


class Guarded(Protocol):
    """A set of parameters, such as one sharded model, whose optimizer steps are checked."""

    accumulation: Accumulation
    models: list[Model]

    @property
    def optional(self) -> Sequence[Checked]:
        """The parameters that ranks may skip, of which each rank knows only its own gradients."""
        ...


def guard_steps(scope: Guarded) -> None:
    """Register optimizer hooks that check each step: all ranks must step, and all gradients must be reduced."""
    watched = weakref.ref(scope)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        alive = watched()
        if alive is None:
            return None
        stepping = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        closure = _closure_of(args, kwargs)
        if not callable(closure):
            for one in alive.optional:
                one.check_step(stepping)
        models = [one for one in alive.models if any(state.is_among(stepping) for state in one.states)]
        if not models or not callable(closure):  # a closure may run the last backward of a window
            alive.accumulation.check_step(stepping)
        if models:
            shard_loaded_state(optimizer)
        for model in models:
            check_all_sharded(stepping.values())
            number, text = members_of(optimizer)
            model.end_step(numbers_of([optimizer]), stepping, state_of(optimizer), number, text)
            model.changes.are_noted = False
        if not models or not callable(closure):
            return None
        reads = isinstance(optimizer, torch.optim.LBFGS) or not _is_of_torch(optimizer)
        reads = reads and not isinstance(closure, _Closure)  # wrapped already, by an outer optimizer
        called = _Closure(closure, reads, models, stepping, alive.accumulation, tuple(alive.optional))
        return (args, {**kwargs, "closure": called}) if len(args) < 2 else ((args[0], called, *args[2:]), kwargs)

    def begin_anew(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        alive = watched()
        for model in () if alive is None else alive.models:
            model.changes.are_noted = True
        closure = _closure_of(args, kwargs)
        if isinstance(closure, _Closure) and not closure.has_run:
            closure.check()

    hook_steps(scope, before=check, after=begin_anew)


@dataclass
class _Closure:
    """The closure of `optimizer.step`; ranks compare the gradients that it computes.

    For optimizers that may read the loss (LBFGS and optimizers from outside torch), it returns the loss reduced over
    all ranks.

    Attributes:
        closure: the user's closure.
        reads: whether the optimizer may read the loss.
        models: models of the optimizer's parameters.
        stepping: the optimizer's parameters by id.
        accumulation: window that must be closed when the closure has run.
        optional: parameters whose gradients must be reduced when the closure has run.
        has_run: whether the optimizer has called it.
    """

    closure: Callable[[], object]
    reads: bool
    models: Sequence[Model]
    stepping: Mapping[int, Tensor]
    accumulation: Accumulation
    optional: Sequence[Checked] = ()
    has_run: bool = False

    def __call__(self) -> object:
        self.has_run = True
        for model in self.models:
            model.changes.are_noted = True
        try:
            loss = self.closure()
        finally:
            for model in self.models:
                model.changes.are_noted = False
        self.check()
        for model in self.models:
            model.end_step(stepping=self.stepping, detail=", after its closure")
        if self.reads and isinstance(loss, Tensor) and loss.numel() == 1 and not isinstance(loss, DTensor):
            return self.models[0].reduced(loss)
        return loss

    def check(self) -> None:
        """Check that all gradients are reduced."""
        for one in self.optional:
            one.check_step(self.stepping)
        self.accumulation.check_step(self.stepping)


def _closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get("closure") if len(args) < 2 else args[1]


def members_of(optimizer: torch.optim.Optimizer) -> tuple[int, str]:
    """Return a hash, and a text for error messages, of an optimizer's parameters, state size and step count."""
    members = [tuple(map(origin_of_parameter, group["params"])) for group in optimizer.param_groups]
    states = [one for one in optimizer.state.values() if isinstance(one, Mapping)]
    step = _number(states[0].get("step", 0)) if states else 0
    step = step if isinstance(step, int | float) else 0
    sizes, groups = [*map(len, states)], " and ".join(str(len(group)) for group in members)
    return hash((*members, *sizes, step)), f" of {groups} parameters, with {sum(sizes)} entries of state at step {step}"


def origin_of_parameter(parameter: Tensor) -> int:
    return getattr(parameter, "origin", 0)


def state_of(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, int]]:
    """Return the sharded tensors of an optimizer's state, each with the origin of its parameter."""
    entries = [(key, one) for key, one in optimizer.state.items() if isinstance(one, Mapping)]
    return [
        (value, origin_of_parameter(key))
        for key, values in entries
        for value in values.values()
        if isinstance(value, DTensor)
    ]


def numbers_of(optimizers: Iterable[torch.optim.Optimizer], *, of_tensors: bool = False) -> Options:
    """Return (name, value) of the optimizers' numeric options, group by group.

    Values of one-element CPU tensors are included. Tensors on a device are skipped, because reading them would block
    the host.

    Args:
        optimizers: optimizers whose options are read.
        of_tensors: whether to return only options that are tensors.
    """
    optimizers = tuple(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    # Options that users add to groups or to the optimizer, such as `lr_scale`, count, too; integers may be ranks.
    options = [entry for group in groups for entry in group.items() if entry[0] != "params"]
    own = (entry for optimizer in optimizers for entry in vars(optimizer).items())
    options += [(name, value) for name, value in own if isinstance(value, float) and name[0] != "_"]
    found = ((name, _number(value)) for name, value in options if not of_tensors or isinstance(value, Tensor))
    return tuple((name, value) for name, value in found if all(isinstance(one, int | float) for one in _entries(value)))


def _number(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    return value.item() if is_number else value


def _entries(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)


def check_all_sharded(stepping: Iterable[Tensor]) -> None:
    """Refuse an optimizer that trains sharded parameters together with plain tensors.

    zgraph reduces only the gradients of sharded parameters.

    Raises:
        ZgraphError: the trained parameters include both kinds.
    """
    trained = [one for one in stepping if one.requires_grad]
    plain = [one for one in trained if not isinstance(one, DTensor)]
    if plain and any(isinstance(one, DTensor) and one.device_mesh.size() > 1 for one in trained):
        raise ZgraphError(
            f"zgraph: the optimizer steps a parameter {list(plain[0].shape)} that is not sharded, together with "
            "sharded ones: zgraph does not average its gradient over the ranks. Call zgraph.shard on the module that "
            "holds it, too, before the optimizer is made; or give it an optimizer of its own, if ranks should differ "
            "in it or something else averages its gradient."
        )
