"""Outputs of a captured step: after each call, each is assigned to `.grad`, optimizer state or another target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, Protocol, cast

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.optimizers.gradients import GradScaler
from zgraph.sharding.tensors.sharded_tensor import sharded_like
from zgraph.step.capture.lifted import Lifted, local
from zgraph.torch_compat.fake_values import is_fake

MOST_ENTRIES = 1000  # of a container, that are looked into for tensors


@dataclass
class Left:
    """Targets for the output values of one call of the graph.

    Attributes:
        lifted: the model and its optimizers.
        leaves: leaves of the function's return value, by index.
        flags: for the index of each optimizer that may skip its step, a flag that is nonzero if it has.
        told: flags that GradScalers pass on to models, by scaler and optimizer.
    """

    lifted: Lifted
    leaves: dict[int, Any] = field(default_factory=dict[int, Any])
    flags: dict[int, Any] = field(default_factory=dict[int, Any])
    told: dict[tuple[GradScaler, optim.Optimizer], list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def parameter(self, position: int) -> Tensor:
        return self.lifted.parameters[position].tensor

    def set_state(self, number: int, position: int, key: str, value: Any) -> None:
        """Set a new entry in the state of optimizer `number`, unless this optimizer has skipped the step."""
        # Reading a flag waits for the device: only the first step, which creates state, needs it.
        if not self.flags.get(number):
            self.lifted.optimizers[number].optimizer.state[self.parameter(position)][key] = value


class Output(Protocol):
    """An output of the graph: its kind and its target."""

    def put(self, value: Any, left: Left) -> None:
        """Assign this output's value, computed by one call, to its target."""
        ...


@dataclass(frozen=True)
class Returned:
    """A leaf of the function's return value, by index; `like` is a DTensor with its layout, None for a plain tensor."""

    place: int
    like: DTensor | None

    def put(self, value: Any, left: Left) -> None:
        left.leaves[self.place] = _wrapped(value, self.like)


@dataclass(frozen=True)
class NewState:
    """A tensor that optimizer `number` has added under `key` to its state for the parameter at index `position`."""

    number: int
    position: int
    key: str
    like: DTensor | None

    def put(self, value: Any, left: Left) -> None:
        left.set_state(self.number, self.position, self.key, _wrapped(value, self.like))


@dataclass(frozen=True)
class Gradient:
    """The `.grad`, at the end of the step, of the parameter at index `position`."""

    position: int

    def put(self, value: Any, left: Left) -> None:
        parameter = left.parameter(self.position)
        # torch keeps gradients on the device of their parameters, which may be the host.
        parameter.grad = _wrapped(value.to(local(parameter).device), parameter)


@dataclass(frozen=True)
class Bound:
    """A tensor that the step has assigned to an attribute or a dict entry."""

    holder: dict[Any, Any]
    key: Any
    like: DTensor | None

    def put(self, value: Any, left: Left) -> None:
        self.holder[self.key] = _wrapped(value, self.like)


@dataclass(frozen=True)
class ToldFlag:
    """A GradScaler's flag for one optimizer, which `scaler` passes on to models: nonzero if a gradient had an inf."""

    scaler: GradScaler
    optimizer: optim.Optimizer

    def put(self, value: Any, left: Left) -> None:
        left.told[self.scaler, self.optimizer].append(value)


@dataclass(frozen=True)
class SkipFlag:
    """A flag that is nonzero if optimizer `number` has skipped its step."""

    number: int

    def put(self, value: Any, left: Left) -> None:
        left.flags[self.number] = value


@dataclass(frozen=True)
class OwnNumber:
    """A rank-local number by which the step changes shards, see `return_own_numbers`; the ranks compare it."""

    def put(self, value: Any, left: Left) -> None:
        pass


def put_all(outputs: Sequence[Output], values: Sequence[Any], lifted: Lifted) -> Left:
    """Assign a call's output values to their targets; skip flags first, because a skipped step adds no state."""
    left = Left(lifted)
    pairs = list(zip(outputs, values, strict=True))
    for output, value in sorted(pairs, key=lambda pair: not isinstance(pair[0], SkipFlag)):
        output.put(value, left)
    for (scaler, optimizer), flags in left.told.items():
        scaler.tell_models([(optimizer, flags)])
    return left


def values_of(kind: type, outputs: Sequence[Output], values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs (output, value) for the outputs of class `kind`; `values` has one element for each output."""
    return [(output, value) for output, value in zip(outputs, values, strict=True) if isinstance(output, kind)]


def _wrapped(value: Tensor, like: Tensor | None) -> Tensor:
    return sharded_like(value, like) if isinstance(like, DTensor) else value


def holds_traced(value: object, depth: int = 4) -> bool:
    """Return whether a Python object holds fake tensors of the trace.

    Searches containers, attributes, closures and generators, `depth` levels deep, and strings that show a fake tensor.
    """
    if isinstance(value, Tensor):
        return is_fake(local(value))
    if isinstance(value, str):
        return "FakeTensor(" in value
    if depth == 0 or value is None or isinstance(value, type | ModuleType | nn.Module | optim.Optimizer | int | float):
        return False
    inside: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        inside += [one for entry in islice(cast("Mapping[Any, Any]", value).items(), MOST_ENTRIES) for one in entry]
    elif isinstance(value, Collection) and not hasattr(value, "__array__"):  # arrays of numpy hold no tensors
        inside += islice(cast("Collection[Any]", value), MOST_ENTRIES)
    elif isinstance(value, FunctionType):
        inside += [cell.cell_contents for cell in value.__closure__ or ()]
    elif isinstance(value, GeneratorType):
        inside += [*value.gi_frame.f_locals.values()] if value.gi_frame is not None else []
    return any(holds_traced(one, depth - 1) for one in inside)
