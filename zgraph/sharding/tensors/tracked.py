"""Sharded tensors that know their model, their parameter, and the tensor that they are views of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.runtime.exchanges.steps import Model
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import is_fake


class Tracked(DTensor):
    """A DTensor that knows its model, its parameter, and the tensor that it is a view of.

    Attributes:
        viewed: origin of the view; None if this tensor is not a view.
        of_model: model whose ranks must all write to this tensor, and read its numbers, alike; None: unknown.
        of_parameter: name of this parameter, of this gradient's parameter, or of a result's first parameter.
        origin: number that identifies the parameter, or the operators and inputs of a result; equal on all ranks.
        writes: number of writes since the first copy of the tensor's rows was gathered; None before that.
        seen: for a gathered copy, the number of writes whose values the copy includes.
        digest: digest of the numbers that the tensor was computed from: see `zgraph.runtime.exchanges.changes`.
    """

    viewed: View | None = None
    of_model: weakref.ref[Model] | None = None  # weak: a stored gradient must not keep the model alive
    of_parameter = ""
    origin = 0
    writes: int | None = None
    seen = 0
    digest = 0


class View(NamedTuple):
    """Origin of a view: the viewed tensor, and the operators that make the view from the whole viewed tensor."""

    whole: Tracked
    steps: tuple[Callable[[Tensor], Any], ...]
    number: int = 0  # hash of the operators and their arguments; 0 for the whole tensor


def become_like(tensor: DTensor, like: Tracked) -> Tracked:
    """Give a DTensor, in place, the class, model, parameter name and origin of `like`."""
    tensor.__class__ = type(like)
    made = cast(Tracked, tensor)
    if like.of_model is not None:
        made.of_model, made.of_parameter, made.origin = like.of_model, like.of_parameter, like.origin
    return made


def is_split(tensor: DTensor) -> bool:
    """Return whether ranks have different parts of a tensor."""
    return split_axes(tensor) > 0


def split_axes(tensor: Any) -> int:
    """Return the number of mesh axes along which ranks have different parts of a tensor."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return sum(not one.is_replicate() and tensor.device_mesh.size(axis) > 1 for axis, one in enumerate(placements))


def is_partial(tensor: DTensor) -> bool:
    """Return whether the ranks' values still have to be summed or otherwise reduced."""
    return any(placement.is_partial() for placement in tensor.placements)


def may_be_empty(tensor: DTensor) -> bool:
    """Return whether any rank may have an empty shard; all ranks get the same answer."""
    split: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            split[dim] = split.get(dim, 1) * tensor.device_mesh.size(axis)
    return any(-(-tensor.shape[dim] // parts) * (parts - 1) >= tensor.shape[dim] for dim, parts in split.items())


def plain_among(args: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the plain tensors among arguments and in their lists."""
    for arg in args:
        if type(arg) in (list, tuple):
            yield from plain_among(arg)
        elif isinstance(arg, Tensor) and not isinstance(arg, DTensor):
            yield arg


def model_of(tensor: DTensor) -> Model | None:
    """Return the model whose ranks must all make the same calls with a tensor; None in a trace, or if unknown."""
    if isinstance(tensor, Tracked) and tensor.of_model is not None and not is_fake(local_of(tensor)):
        return tensor.of_model()
    return None
