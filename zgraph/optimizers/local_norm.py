"""Norms and scaling of gradients on local shards, with one DTensor operation for all gradients together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.runtime.collective_error import collective_error
from zgraph.sharding.tensors.sharded_tensor import DTENSORS
from zgraph.torch_compat.collectives import all_reduce_op, wait
from zgraph.torch_compat.dtensor import layouts_of, locals_of, partial_norms, replicated_scalar
from zgraph.torch_compat.operators import foreach_norms, foreach_scale


@dataclass(frozen=True)
class ShardedGradients:
    """This rank's local shards of gradients with the same mesh and dtype.

    Attributes:
        shards: local shards of the gradients.
        mesh: mesh of all gradients.
        is_replicated: for each mesh axis, one bool per gradient: whether the gradient is replicated along the axis.
    """

    shards: list[Tensor]
    mesh: DeviceMesh
    is_replicated: list[Sequence[bool]]

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> ShardedGradients | None:
        """Return the local shards of gradients; None if meshes or dtypes differ, or if a placement is partial."""
        if not grads or not set(map(type, grads)) <= DTENSORS:
            return None
        sharded: Sequence[Any] = grads
        layouts = list(map(id, layouts_of(sharded)))
        by_layout: dict[int, DTensor] = dict(zip(layouts, sharded, strict=True))  # a model has few layouts
        first, *others = by_layout.values()
        mesh, dtype = first.device_mesh, first.dtype
        if any(grad.dtype != dtype or grad.device_mesh != mesh for grad in others):
            return None
        if any(placement.is_partial() for grad in by_layout.values() for placement in grad.placements):
            return None
        is_replicated: list[Sequence[bool]] = []
        for axis in range(mesh.ndim):
            replicated = {layout: grad.placements[axis].is_replicate() for layout, grad in by_layout.items()}
            is_replicated.append([replicated[layout] for layout in layouts])
        return cls(locals_of(sharded), mesh, is_replicated)

    def norm(self, norm_type: float, foreach: bool | None) -> DTensor:
        """Compute the norm of all gradients, with the same bits and collectives as `torch.nn.utils.get_total_norm`.

        Args:
            norm_type: order of the norm, positive and finite.
            foreach: as for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm, [], replicated on the gradients' mesh.

        Raises:
            CollectiveError: a collective failed.
        """
        if foreach is False:
            each = [torch.linalg.vector_norm(shard, norm_type) for shard in self.shards]
        else:
            each = foreach_norms(self.shards, norm_type)
        # Norms of offloaded parameters are on the host, from which a GPU mesh sends nothing.
        norms = torch.stack([_on(self.mesh.device_type, norm) for norm in each])
        split = [not all(axis) for axis in self.is_replicated]
        for axis, replicated in enumerate(self.is_replicated):
            if split[axis] and any(replicated):  # each rank contributes an equal part of these
                part = norms / math.pow(self.mesh.size(axis), 1 / norm_type)
                norms = torch.where(torch.tensor(replicated, device=norms.device), part, norms)
        match [axis for axis, is_split in enumerate(split) if is_split]:
            case []:
                reduced = norms
            case [axis]:
                reduced = self._reduced(norms, norm_type, axis)
            case _:  # DTensor may join axes, which changes the order of the sum
                return torch.linalg.vector_norm(partial_norms(norms, self.mesh, split, norm_type), norm_type)
        return replicated_scalar(torch.linalg.vector_norm(reduced, norm_type), self.mesh)

    def _reduced(self, norms: Tensor, norm_type: float, axis: int) -> Tensor:
        """Combine the norms of gradient parts along a mesh axis to the norms of whole gradients, by an all_reduce."""
        if self.mesh.size(axis) == 1:
            return norms
        group = self.mesh.get_group(axis)
        try:
            powers = wait(all_reduce_op()(norms**norm_type, "sum", group.group_name))
        except RuntimeError as error:
            raise collective_error("all_reduce", ["the gradients' norm"], group.group_name, error) from error
        return powers ** (1.0 / norm_type)

    def scale(self, max_norm: float, norm: Tensor, foreach: bool | None) -> None:
        """Scale the gradients like `torch.nn.utils.clip_grads_with_norm_`.

        Args:
            max_norm: norm to which the gradients are clipped.
            norm: norm of all gradients, equal on all ranks.
            foreach: as for `torch.nn.utils.clip_grad_norm_`.
        """
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if foreach is False:
            for shard in self.shards:
                shard.mul_(coefficient.to(shard.device))
            return
        for device in dict.fromkeys(shard.device for shard in self.shards):
            foreach_scale([shard for shard in self.shards if shard.device == device], coefficient.to(device))


def _on(device_type: str, norm: Tensor) -> Tensor:
    return norm if norm.device.type == device_type else norm.to(device_type)
