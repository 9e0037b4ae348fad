"""Whole tensors: gathered from all ranks, compared between ranks, and distributed. The ranks have met before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from zgraph.errors import AgreementError, ZgraphError
from zgraph.runtime.exchanges.changes import checksum
from zgraph.sharding.tensors.tracked import Tracked, become_like, is_partial
from zgraph.torch_compat.dtensor import dtensor_like, local_of
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten
from zgraph.torch_compat.operators import OpOverload

_READ_WHOLE = "A loss reads parameter.full_tensor(), whose gradient is averaged over the ranks."


def all_gathered(
    args: Sequence[Any], kwargs: Mapping[str, Any], known: Mapping[int, Tensor] = MappingProxyType({})
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with whole tensors for DTensors: from `known` (by id) if listed there, else gathered."""
    leaves, tree = tree_flatten((args, dict(kwargs)))
    whole = [
        known[id(leaf)] if id(leaf) in known else gathered(leaf) if isinstance(leaf, DTensor) else leaf
        for leaf in leaves
    ]
    return tree_unflatten(whole, tree)


def gathered(tensor: DTensor) -> Tensor:
    """Return the whole tensor, with the strides of `tensor`."""
    alias = cast(DTensor, tensor.detach())
    alias.__class__ = DTensor  # ranks have met
    local, device_type = local_of(alias), alias.device_mesh.device_type
    if local.device.type != device_type:  # kept in host memory, from which NCCL cannot send
        whole = dtensor_like(local.to(device_type), alias).full_tensor().to(local.device)
    else:
        whole = alias.full_tensor()
    if whole.stride() != alias.stride() and 0 not in alias.stride():  # channels last: views and random numbers show it
        whole = torch.empty_strided(alias.shape, alias.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)
    return whole


def check_equal(tensors: Sequence[Tensor], mesh: DeviceMesh, func: OpOverload) -> None:
    """Check that plain `tensors`, which `func` reads, are equal on all ranks of a mesh."""
    what = f"{func} reads or writes a sharded tensor by the values of a plain tensor"
    if any(is_fake(tensor) and tensor.ndim for tensor in tensors):
        raise ZgraphError(
            f"zgraph.training_step: {what}, which may differ from rank to rank. If it does not, make it a DTensor "
            "before the step, mask = distribute_tensor(mask, p.device_mesh, p.placements), and write p.grad.mul_(mask)."
            f" {_READ_WHOLE}"
        )
    values = [tensor for tensor in tensors if not is_fake(tensor)]
    if not values:
        return
    number = checksum(values)
    largest = torch.tensor([number, -number], device=mesh.device_type)
    for axis in range(mesh.ndim):  # one by one: DTensor warns if two are reduced together
        placements = [Partial("max") if one == axis else Replicate() for one in range(mesh.ndim)]
        largest = gathered(DTensor.from_local(largest, mesh, placements, run_check=False))
    if largest.sum():
        raise AgreementError(
            f"zgraph: {what} that differs between ranks, so that each would have another result. Average or broadcast "
            f"it first (torch.distributed.broadcast(values, 0)). {_READ_WHOLE}"
        )


def of_first(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return on every rank of a mesh the tensor `whole` of the first rank."""
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            mine = whole if mesh.get_local_rank(axis) == 0 else torch.zeros_like(whole)
            placements = [Partial() if one == axis else Replicate() for one in range(mesh.ndim)]
            whole = gathered(DTensor.from_local(mine, mesh, placements, run_check=False))
    return whole


def laid_out(whole: Tensor, like: Tracked) -> Tracked:
    """Give `whole`, held by all ranks, the placements of `like`; replicate it if shapes differ or `like` is partial."""
    everywhere = [Replicate()] * like.device_mesh.ndim
    made = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    if whole.shape == like.shape and not is_partial(like):
        made = made.redistribute(placements=like.placements)
    return become_like(made, like)
