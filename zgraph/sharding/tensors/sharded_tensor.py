"""Sharded parameters and gradients that behave in a training loop like those of the plain model.

A view of a DTensor along a sharded axis is a copy, gathered from all ranks. DTensor silently loses writes to the copy,
and refuses in-place operators that need other placements or plain tensors. Here such a write, as in
`embedding.weight.grad[:old] = 0`, is made to the whole tensor, of which each rank keeps its part.

A number read from a DTensor describes this rank's part only: `p.grad.norm().item()`, `if torch.isnan(p.grad).any()`.
Here the number describes the whole tensor, on every rank. All ranks must make such writes and reads: if only some ranks
do, every rank gets an error.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.steps import Model
from zgraph.sharding.tensors.calls import drawn, of_whole, on_dtensors
from zgraph.sharding.tensors.meet import meet, meet_for_rows
from zgraph.sharding.tensors.tracked import (
    Tracked,
    become_like,
    is_split,
    may_be_empty,
    model_of,
    plain_among,
    split_axes,
)
from zgraph.sharding.tensors.traits import Traits, needs_elements, traits_of
from zgraph.sharding.tensors.views import renew, with_views
from zgraph.sharding.tensors.whole import gathered
from zgraph.sharding.tensors.writes import write
from zgraph.torch_compat.dtensor import allow_lists_of, dtensor_like, local_of
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.operators import OpOverload, written_tensors

aten = torch.ops.aten
_READ = aten._local_scalar_dense.default
_UNSCALES = aten._amp_foreach_non_finite_check_and_unscale_.default
_COPIES = zlib.crc32(b"copy.deepcopy")
ASSIGNED = (
    "zgraph: something was assigned to the .data of a sharded tensor, which would be lost: torch keeps the values of a "
    "DTensor elsewhere. Write into it, outside forward: with torch.no_grad(): parameter.copy_(value)."
)
COLLECTED = (
    "zgraph: {func} of a sharded tensor would mix different rows of it. Gradients are averaged over the ranks already, "
    "and weights are equal on all of them: delete the line. To communicate other tensors, pass parameter.full_tensor() "
    "or parameter.to_local()."
)
_OWN = frozenset({"viewed", "of_model", "of_parameter", "origin", "writes", "seen", "digest"})


class Sharded(Tracked):
    """A DTensor whose operators return, as `Sharded` tensors, the same on every rank as for the whole tensor."""

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values()) if kwargs else args
        if torch.is_grad_enabled():
            _refuse_plain_gradients(func, given)
        traits = traits_of(func)
        sharded = _sharded_among(given)
        if traits.communicates and any(is_split(one) for one in sharded):
            raise ZgraphError(COLLECTED.format(func=func))
        if func is _UNSCALES:
            # torch takes the flag's maximum over the axes along which the first gradient is split.
            args = (sorted(args[0], key=split_axes, reverse=True), *args[1:])
        result = _run(func, traits, args, kwargs, sharded)
        model = None if func.is_view else model_of(sharded[0])
        if model is not None and model.changes.are_noted:
            if traits.writes:
                model.changes.of_write(traits.number, func, given, written_tensors(func, args, kwargs))
            else:
                results = result if isinstance(result, list | tuple) else (result,)
                model.changes.of_read(traits.number, func, given, _sharded_among(results))
        return result

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Call DTensor's `redistribute` once all ranks have arrived here; `full_tensor()` calls this method, too."""
        if not all(placement.is_replicate() for placement in self.placements):
            meet(self, "full_tensor() or redistribute()")
        made = super().redistribute(*args, **kwargs)
        if type(made) is DTensor:
            as_sharded(made, self)
        return made

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor's values, read-only because writes would be lost."""
        meet(self, "numpy()")
        array = gathered(self).requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise ZgraphError("zgraph: a sharded tensor has no memory to share; write parameter.full_tensor() first.")

    def __format__(self, format_spec: str) -> str:
        """Format a 0-d tensor as a number, like a plain tensor: f"{norm:.3f}"."""
        return format(self.item(), format_spec) if self.ndim == 0 else super().__format__(format_spec)

    def tolist(self) -> Any:
        """Return the whole tensor's values."""
        meet(self, "tolist()")
        return gathered(self).tolist()

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return cast(Any, Tensor.data).__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        own = local_of(self)
        if is_fake(own):
            cast(Any, Tensor.data).__set__(self, value)  # a captured step sees the assignment, and writes the values
        elif not (isinstance(value, DTensor) and local_of(value).is_set_to(own)):  # p.data += 1 has written already
            raise ZgraphError(ASSIGNED)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        """Make a `Sharded` from inner tensors, when torch.compile traces a graph or wraps a graph's results."""
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        as_sharded(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor, which can be loaded without zgraph."""
        saved = self.__copy__()
        saved.__class__ = DTensor
        return DTensor.__reduce_ex__(saved, protocol)

    def __copy__(self) -> DTensor:
        made = dtensor_like(local_of(self), self)
        made.requires_grad_(self.requires_grad)
        vars(made).update({name: value for name, value in vars(self).items() if name not in _OWN})
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        if self.viewed is not None:
            return self.detach().clone()
        made = cast(Sharded, super().__deepcopy__(memo))
        if self.of_model is not None and (model := self.of_model()) is not None:
            model.changes.of_read(_COPIES, "copy.deepcopy", (self,), (made,))
        return made


DTENSORS = frozenset({DTensor, Sharded})
allow_lists_of(Sharded)


def as_sharded(tensor: DTensor, like: DTensor | None = None) -> None:
    """Turn a DTensor into a Sharded one in place, and give it the model and origin of `like`."""
    tensor.__class__ = Sharded
    if isinstance(like, Sharded):
        become_like(tensor, like)


def put_in_model(parameter: Sharded, model: Model, name: str) -> None:
    """Record a parameter's model and name; the model's ranks must all run the same lines of the training loop."""
    parameter.of_model, parameter.of_parameter = weakref.ref(model), name
    parameter.origin = zlib.crc32(name.encode())


def sharded_like(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor from a `local` part, with the layout, the model and the parameter of `like`."""
    made = dtensor_like(local, like)
    if type(made) is Sharded:
        as_sharded(made, like)
    return made


def note_change(tensors: Iterable[Tensor], name: str, numbers: Sequence[float]) -> None:
    """Record that local parts of tensors were changed, as if operator `name` had changed the whole by `numbers`."""
    for tensor in tensors:
        model = model_of(tensor) if isinstance(tensor, Sharded) else None
        if model is not None and model.changes.are_noted:
            model.changes.of_write(zlib.crc32(name.encode()), name, numbers, [tensor])


def _sharded_among(args: Sequence[Any]) -> list[Sharded]:
    found: list[Sharded] = []
    for arg in args:
        kind = type(arg)
        if kind is Sharded:
            found.append(arg)
        elif kind is list or kind is tuple:
            found += [one for one in arg if type(one) is Sharded]
    return found


def _run(
    func: OpOverload,
    traits: Traits,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharded: Sequence[Sharded],
) -> Any:
    for one in sharded:
        if one.viewed is not None:
            renew(one)
    if func is aten.detach.default:  # of each gradient in each backward pass: a third of DTensor's time
        return with_views(sharded_like(local_of(args[0]).detach(), args[0]), func, args, kwargs, sharded[0])
    if traits.writes:
        return write(func, traits, args, kwargs, sharded)
    if func is _READ and not all(placement.is_replicate() for placement in args[0].placements):
        meet(args[0], "reading a number (item(), float(), bool(), `if`)")
        return func(gathered(args[0]))
    if traits.is_random and (result := drawn(func, args, kwargs, sharded)) is not None:
        return result
    if traits.dimension is not None:
        meet_for_rows(args[0], args[traits.dimension] if len(args) > traits.dimension else 0, func)
    if needs_elements(func, args) and any(map(may_be_empty, sharded)):
        return with_views(of_whole(func, args, kwargs, sharded[0]), func, args, kwargs, sharded[0])
    try:
        result = on_dtensors(func, args, kwargs, sharded)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, ZgraphError | torch.OutOfMemoryError):
            raise
        result = of_whole(func, args, kwargs, sharded[0])
    return with_views(result, func, args, kwargs, sharded[0])


def _refuse_plain_gradients(func: OpOverload, args: Sequence[Any]) -> None:
    """Refuse to combine a sharded tensor with a plain one that needs a gradient: that gradient would be sharded.

    Raises:
        ZgraphError: a plain tensor among the arguments requires a gradient.
    """
    if any(plain.requires_grad for plain in plain_among(args)):
        raise ZgraphError(
            f"zgraph: {func} of a sharded tensor and of a plain one that requires a gradient, as in loss + "
            "parameter.norm(): outside forward a parameter is a DTensor. Write parameter.full_tensor(), whose "
            "gradient is averaged over the ranks."
        )
