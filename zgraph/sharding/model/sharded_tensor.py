"""Sharded parameters and gradients whose rows can be written to: `embedding.weight.grad[:old] = 0`.

A view of a DTensor along a sharded axis is a copy, gathered from all ranks. DTensor silently loses what is written to
it, and refuses in-place operators that need other placements or take plain tensors. Here such a write is made to the
whole tensor, of which each rank keeps its part. All ranks must make it, as they must all read such a view.
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
from zgraph.sharding.meshes.same_batch import checksum
from zgraph.torch_compat.dtensor import dtensor_like, local_of, put_local
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.memory import traced_storage_key
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import OpOverload, is_mutable

_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Sharded(DTensor):
    """A DTensor that knows what it is a view of. What operators make of one is one, too.

    Attributes:
        viewed: of a view, the tensor that it shows a part of, and the operators that lead there.
    """

    viewed: tuple[DTensor, tuple[Callable[[Tensor], Any], ...]]

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if is_mutable(func) and isinstance(args[0], Sharded) else None
        if target is not None and (_is_copy(target) or any(tensor.ndim for tensor in _plain_among(args, kwargs))):
            return _write_to_whole(target, func, args, kwargs)
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
        saved = dtensor_like(local_of(self), self) if hasattr(self, "viewed") else self
        with _as_dtensors([saved]):
            return DTensor.__reduce_ex__(saved, protocol)


def as_sharded(tensor: DTensor) -> None:
    """Make a DTensor one whose rows can be written to; the same object, whatever refers to it."""
    tensor.__class__ = Sharded


DTENSORS = frozenset({DTensor, Sharded})


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
    parts = result if isinstance(result, list | tuple) else (result,)
    for place, part in enumerate(parts):
        if type(part) is not DTensor:
            continue
        as_sharded(part)
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
    _check_equal(_plain_among(args, kwargs), sharded.device_mesh, func)
    leaves, tree = tree_flatten((args[1:], dict(kwargs)))
    leaves = [_gathered(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
    others, named = tree_unflatten(leaves, tree)
    whole = view = _gathered(sharded)
    for step in steps:
        view = step(view)
    func(view, *others, **named)
    replicated = [Replicate()] * sharded.device_mesh.ndim
    written = DTensor.from_local(whole, sharded.device_mesh, replicated, run_check=False)
    local_of(sharded).copy_(local_of(written.redistribute(placements=sharded.placements)))
    if _is_copy(target):
        put_local(target, view)
    return target


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


def _gathered(tensor: DTensor) -> Tensor:
    return DTensor.full_tensor(cast(DTensor, tensor.detach()))
