"""Sharded parameters and gradients whose rows can be written to: `embedding.weight.grad[:old] = 0`.

A view of a DTensor along a sharded axis is a copy, gathered from all ranks. DTensor silently loses what is written to
it, and refuses in-place operators that need other placements or take plain tensors. Here such a write is made to the
whole tensor, of which each rank keeps its part.

A number that is read of a DTensor is that of this rank's part: `p.grad.norm().item()`, `if torch.isnan(p.grad).any()`.
Here it is that of the whole tensor, on every rank. All ranks must make such a write and such a read: one that makes it
alone gets an error, and so do the others.

Random numbers are drawn for the whole tensor, too. Where DTensor does not manage generators, which is on CPUs, it draws
each shard from the rank's own: equal seeds repeat rows on every rank, and different ones let replicas drift apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from zgraph.errors import AgreementError, ZgraphError
from zgraph.runtime.exchanges.steps import Model
from zgraph.sharding.meshes.same_batch import checksum
from zgraph.torch_compat.dtensor import allow_lists_of, dtensor_like, local_of, put_local
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.memory import traced_storage_key
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import OpOverload, is_mutable, is_tagged_random

_READ = torch.ops.aten._local_scalar_dense.default
# Where operators are given the dimension that they take a part of; DTensor gathers for them if it is sharded.
_DIMENSIONS = {
    torch.ops.aten.select.int: 1,
    torch.ops.aten.slice.Tensor: 1,
    torch.ops.aten.split.Tensor: 2,
    torch.ops.aten.split_with_sizes.default: 2,
}
_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Sharded(DTensor):
    """A DTensor that knows what it is a view of. What operators make of one is one, too.

    Attributes:
        viewed: of a view, the tensor that it shows a part of, and the operators that lead there.
        of_model: whose ranks write to it together, or read a number of it; None where nothing tells.
    """

    viewed: tuple[DTensor, tuple[Callable[[Tensor], Any], ...]]
    of_model: Model | None

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.set_.source_Tensor:  # `parameter.data = value`, as Dynamo traces it
            func = torch.ops.aten.copy_.default
        if func is _READ and any(placement.is_partial() for placement in args[0].placements):
            _meet(args[0], "reading a number of sharded tensors (item(), float(), bool(), `if`)")
            return func(_gathered(args[0]))
        target = args[0] if is_mutable(func) and isinstance(args[0], Sharded) else None
        if is_tagged_random(func) and (drawn := _drawn(target, func, args, kwargs)) is not None:
            return drawn
        if target is not None and (_is_copy(target) or any(tensor.ndim for tensor in _plain_among(args, kwargs))):
            return _write_to_whole(target, func, args, kwargs)
        if (place := _DIMENSIONS.get(func)) is not None:
            _meet_for_rows(args[0], args[place] if len(args) > place else 0, func)
        try:
            with _as_dtensors([*_sharded_among(args), *_sharded_among(kwargs.values())]):
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            # DTensor finds placements before it runs anything, so nothing has been written yet.
            if target is None:
                raise
            return _write_to_whole(target, func, args, kwargs)
        return result if is_mutable(func) else _as_sharded(result, func, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        """What torch.compile traces with, and wraps what a graph returns in: of the class that the graph is given."""
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        as_sharded(made)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is saved is a DTensor, which can be loaded without zgraph."""
        saved = dtensor_like(local_of(self), self)
        saved.requires_grad_(self.requires_grad)
        vars(saved).update({name: value for name, value in vars(self).items() if name not in ("viewed", "of_model")})
        with _as_dtensors([saved]):
            return DTensor.__reduce_ex__(saved, protocol)


def as_sharded(tensor: DTensor, like: DTensor | None = None) -> None:
    """Make a DTensor one whose rows can be written to; the same object, whatever refers to it."""
    tensor.__class__ = Sharded
    if (model := getattr(like, "of_model", None)) is not None:
        cast(Sharded, tensor).of_model = model


def sharded_like(local: Tensor, like: DTensor) -> DTensor:
    """`dtensor_like`, of the same model."""
    made = dtensor_like(local, like)
    if type(made) is Sharded:
        as_sharded(made, like)
    return made


DTENSORS = frozenset({DTensor, Sharded})
allow_lists_of(Sharded)


@contextlib.contextmanager
def _as_dtensors(tensors: Sequence[Tensor]) -> Generator[None]:
    """Let operators meet plain DTensors, whose dispatch in C++ asks for that very class."""
    for tensor in tensors:
        tensor.__class__ = DTensor
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.__class__ = Sharded


def _sharded_among(args: Iterable[Any]) -> Iterator[Sharded]:
    for arg in args:
        if type(arg) is Sharded:
            yield arg
        elif type(arg) in (list, tuple):
            yield from _sharded_among(arg)


def _plain_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [
        leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
    ]


def _as_sharded(result: Any, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    like = next(_sharded_among(args), None)
    parts = result if isinstance(result, list | tuple) else (result,)
    for place, part in enumerate(parts):
        if type(part) is not DTensor:
            continue
        as_sharded(part, like)
        if not func.is_view:
            continue
        whole, steps = getattr(args[0], "viewed", (args[0], ()))
        if func not in _SAME:
            index = None if part is result else place
            steps = (*steps, lambda tensor, index=index: _part_of(func(tensor, *args[1:], **kwargs), index))
        if steps:
            cast(Sharded, part).viewed = whole, steps
    return result


def _part_of(result: Any, index: int | None) -> Tensor:
    return result if index is None else result[index]


def _is_copy(view: Sharded) -> bool:
    """Whether a view is a gathered copy of what it shows."""
    whole = getattr(view, "viewed", (view,))[0]
    return traced_storage_key(local_of(view)) != traced_storage_key(local_of(whole))


@torch.no_grad()
def _write_to_whole(target: Sharded, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sharded:
    """Call an operator that writes to its first argument as on one rank, on all of the tensor that it is a view of.

    Raises:
        AgreementError: ranks pass different plain tensors.
        ZgraphError: a step that is captured passes one, which cannot be compared.
    """
    sharded, steps = getattr(target, "viewed", (target, ()))
    _meet(target, f"writing to parts of a sharded tensor ({func})")
    _check_equal(_plain_among(args, kwargs), sharded.device_mesh, func)
    others, named = _all_gathered(args[1:], kwargs)
    whole = view = _gathered(sharded)
    for step in steps:
        view = step(view)
    func(view, *others, **named)
    local_of(sharded).copy_(local_of(_laid_out(whole, sharded, is_tagged_random(func))))
    if _is_copy(target):
        put_local(target, view)
    return target


def _drawn(target: Sharded | None, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a random operator gives for all of a tensor; None where DTensor itself takes care."""
    like = next(_sharded_among(args), None)
    if like is None or like.device_mesh.device_type != "cpu" or (target is None and is_mutable(func)):
        return None
    if target is not None:
        return _write_to_whole(target, func, args, kwargs)
    with torch.no_grad():
        others, named = _all_gathered(args, kwargs)
        results, tree = tree_flatten(func(*others, **named))
        if any(result.shape != like.shape for result in results):
            return None
        return tree_unflatten([_laid_out(result, like, is_random=True) for result in results], tree)


def _laid_out(whole: Tensor, like: DTensor, is_random: bool) -> Sharded:
    """Each rank's part of a tensor that all have; of a random one replicas take what the first of them has drawn."""
    mesh = like.device_mesh
    everywhere = [Replicate() for _ in range(mesh.ndim)]
    for axis, placement in enumerate(like.placements):
        if is_random and placement.is_replicate() and mesh.size(axis) > 1:
            mine = whole if mesh.get_local_rank(axis) == 0 else torch.zeros_like(whole)
            summed = [*everywhere[:axis], Partial(), *everywhere[axis + 1 :]]
            whole = _gathered(DTensor.from_local(mine, mesh, summed, run_check=False))
    laid_out = DTensor.from_local(whole, mesh, everywhere, run_check=False).redistribute(placements=like.placements)
    as_sharded(laid_out, like)
    return cast(Sharded, laid_out)


def _meet_for_rows(tensor: DTensor, dim: int, func: OpOverload) -> None:
    dim %= tensor.ndim
    if any(getattr(placement, "dim", None) == dim for placement in tensor.placements):
        _meet(tensor, f"taking rows of a sharded tensor ({func})")


def _meet(tensor: DTensor, call: str) -> None:
    model: Model | None = getattr(tensor, "of_model", None)
    if model is not None and not is_fake(local_of(tensor)):
        model.meet(call)


def _check_equal(tensors: Sequence[Tensor], mesh: DeviceMesh, func: OpOverload) -> None:
    """Check that all ranks of a mesh have the same values in some plain tensors."""
    what = f"{func} writes to a sharded parameter or gradient, or to rows of one, by the values of a plain tensor"
    if any(is_fake(tensor) and tensor.ndim for tensor in tensors):
        raise ZgraphError(
            f"zgraph.training_step: {what}, which may differ from rank to rank. Make it a DTensor before the step, "
            "mask = distribute_tensor(mask, p.device_mesh, p.placements), and write p.grad.mul_(mask)."
        )
    values = [tensor for tensor in tensors if not is_fake(tensor)]
    if not values:
        return
    number = checksum(values)
    largest = torch.tensor([number, -number], device=mesh.device_type)
    for axis in range(mesh.ndim):
        placements = [Partial("max") if one == axis else Replicate() for one in range(mesh.ndim)]
        largest = _gathered(DTensor.from_local(largest, mesh, placements, run_check=False))
    if largest.sum():
        raise AgreementError(
            f"zgraph: {what} that differs between ranks, so that each would write something else. Average or broadcast "
            "it first (torch.distributed.broadcast(values, 0))."
        )


def _all_gathered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    leaves, tree = tree_flatten((args, dict(kwargs)))
    return tree_unflatten([_gathered(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves], tree)


def _gathered(tensor: DTensor) -> Tensor:
    return DTensor.full_tensor(cast(DTensor, tensor.detach()))
