"""Norm and scaling of many gradients on local shards: DTensor sees one tensor in all, not one for each gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zgraph.torch_compat import foreach_norms, foreach_scale, local_of, partial_norms


def total_norm(grads: Sequence[Tensor], norm_type: float, foreach: bool | None) -> DTensor | None:
    """What `torch.nn.utils.get_total_norm` computes of sharded gradients, the same bits in the same exchange.

    Its stack of norms, of which each rank has a part, is put together from local norms.

    Returns:
        [] on the gradients' mesh, replicated; None where torch's own is to be asked: gradients of several meshes,
        devices or dtypes, such as no rank has whole, and norms that are no sums of powers.
    """
    first = grads[0] if grads else None
    if not isinstance(first, DTensor) or not (math.isfinite(norm_type) and norm_type > 0):
        return None
    mesh, dtype = first.device_mesh, first.dtype
    if first.device.type not in ("cpu", "cuda"):
        return None
    shards: list[Tensor] = []
    whole: list[list[bool]] = [[] for _ in range(mesh.ndim)]  # by axis of the mesh, whether each rank has all of it
    for grad in grads:
        if not isinstance(grad, DTensor) or grad.dtype != dtype or grad.device_mesh != mesh:
            return None
        for axis, placement in enumerate(grad.placements):
            if placement.is_partial():
                return None
            whole[axis].append(placement.is_replicate())
        shards.append(local_of(grad))
    if foreach is False:
        norms = torch.stack([torch.linalg.vector_norm(shard, norm_type) for shard in shards])
    else:
        norms = torch.stack(foreach_norms(shards, norm_type))
    split = [not all(axis) for axis in whole]
    for axis, is_whole in enumerate(whole):
        if split[axis] and any(is_whole):  # of these each rank contributes an equal part
            part = norms / math.pow(mesh.size(axis), 1 / norm_type)
            norms = torch.where(torch.tensor(is_whole, device=norms.device), part, norms)
    return torch.linalg.vector_norm(partial_norms(norms, mesh, split, norm_type), norm_type)


def scale_to_norm(grads: Sequence[Tensor], max_norm: float, norm: Tensor, foreach: bool | None) -> None:
    """`torch.nn.utils.clip_grads_with_norm_` of gradients that are sharded; the norm is replicated."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shards = [local_of(grad) if isinstance(grad, DTensor) else grad for grad in grads]
    if foreach is False:
        for shard in shards:
            shard.mul_(coefficient)
    else:
        foreach_scale(shards, coefficient)
