"""Meetings of all ranks before calls that communicate: if only some ranks make a call, every rank gets an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from zgraph.runtime.exchanges.changes import origin_of
from zgraph.runtime.exchanges.steps import Model
from zgraph.sharding.tensors.tracked import model_of
from zgraph.torch_compat.memory import DispatchMode
from zgraph.torch_compat.operators import OpOverload, communicates


def meet(tensor: DTensor, call: str) -> None:
    """Wait until all ranks of a tensor's model make this call."""
    model = model_of(tensor)
    if model is not None:
        _meet_in(model, tensor, call)


def _meet_in(model: Model, tensor: DTensor, call: str) -> None:
    of = f" of {getattr(tensor, 'of_parameter', '')}, its gradient, or a result"
    last = f", after {model.changes.last}" if model.changes.last else ""
    model.meet(call, number=origin_of(tensor), detail=of + last)


def meet_for_rows(tensor: DTensor, dim: int, func: OpOverload) -> None:
    """Wait until all ranks take rows of a tensor, if the rows lie along a sharded dim."""
    dim %= max(tensor.ndim, 1)  # torch itself refuses 0-d tensors
    if any(getattr(placement, "dim", None) == dim for placement in tensor.placements):
        meet(tensor, f"taking rows ({func})")


class Meeting(DispatchMode):
    """Makes all ranks meet before a DTensor operator's first collective, in case only some ranks call the operator."""

    def __init__(self, model: Model, tensor: DTensor, func: OpOverload) -> None:
        super().__init__()
        self.model, self.tensor, self.func, self.have_met = model, tensor, func, False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; this mode then sees its operators on local parts
        if not self.have_met and communicates(func):
            self.have_met = True
            _meet_in(self.model, self.tensor, f"{self.func}")
        return func(*args, **kwargs or {})
