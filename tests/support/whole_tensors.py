"""The whole of a sharded tensor, gathered by an operation that gloo runs safely."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def kind_of(value: object) -> str:
    """Name of a type; zgraph's own DTensors count as DTensors."""
    return "DTensor" if isinstance(value, DTensor) else type(value).__name__


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, on every rank and outside of autograd; anything else as it is.

    `full_tensor` gathers with ALLGATHER_COALESCED, which can break the heap (zgraph/torch_compat/collectives.py):
    rarely, but the suite gathers hundreds of thousands of tensors. Those not plainly sharded are left to it.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        return tensor.full_tensor()
    rows = list(tensor.shape)  # of what is split along an axis of the mesh, by dimension
    splits: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            splits.append((axis, placement.dim, rows[placement.dim]))
            longest = -(-rows[placement.dim] // mesh.size(axis))
            first = min(rows[placement.dim], longest * mesh.get_local_rank(axis))
            rows[placement.dim] = min(longest, rows[placement.dim] - first)
    part = tensor.to_local().detach()
    for axis, dim, length in reversed(splits):
        ranks = mesh.size(axis)
        padded = part.new_zeros([-(-length // ranks) if at == dim else size for at, size in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=mesh.get_group(axis))
        part = torch.cat(parts, dim).narrow(dim, 0, length)
    return part
