"""Norm and scaling of many gradients on local shards: DTensor sees one tensor in all, not one for each gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.runtime.collective_error import collective_error
from zgraph.torch_compat.dtensor import layouts_of, locals_of, partial_norms, replicated_scalar
from zgraph.torch_compat.operators import foreach_norms, foreach_scale


@dataclass(frozen=True)
class ShardedGradients:
    """This rank's shards of gradients that lie on one mesh, have one dtype, and are sums of nothing."""

    shards: list[Tensor]
    mesh: DeviceMesh
    whole: list[Sequence[bool]]  # by axis of the mesh, whether each rank has all of the gradient, by gradient

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> ShardedGradients | None:
        """None where there are others among them."""
        if set(map(type, grads)) != {DTensor}:
            return None
        sharded: Sequence[Any] = grads
        layouts = list(map(id, layouts_of(sharded)))
        by_layout: dict[int, DTensor] = dict(zip(layouts, sharded, strict=True))  # a few for all of a model
        first, *others = by_layout.values()
        mesh, dtype = first.device_mesh, first.dtype
        if any(grad.dtype != dtype or grad.device_mesh != mesh for grad in others):
            return None
        if any(placement.is_partial() for grad in by_layout.values() for placement in grad.placements):
            return None
        whole: list[Sequence[bool]] = []
        for axis in range(mesh.ndim):
            replicated = {layout: grad.placements[axis].is_replicate() for layout, grad in by_layout.items()}
            is_mixed = len(set(replicated.values())) > 1
            whole.append([replicated[layout] for layout in layouts] if is_mixed else [*replicated.values()])
        return cls(locals_of(sharded), mesh, whole)

    def norm(self, norm_type: float, foreach: bool | None) -> DTensor:
        """What `torch.nn.utils.get_total_norm` computes, the same bits in the same exchange.

        Its stack of norms, of which each rank has a part, is put together from local norms.

        Args:
            norm_type: above zero and finite, a sum of powers.
            foreach: as for `torch.nn.utils.clip_grad_norm_`.

        Returns:
            [] on the gradients' mesh, replicated.

        Raises:
            CollectiveError: the exchange failed.
        """
        if foreach is False:
            norms = torch.stack([torch.linalg.vector_norm(shard, norm_type) for shard in self.shards])
        else:
            norms = torch.stack(foreach_norms(self.shards, norm_type))
        split = [not all(axis) for axis in self.whole]
        for axis, is_whole in enumerate(self.whole):
            if split[axis] and any(is_whole):  # of these each rank contributes an equal part
                part = norms / math.pow(self.mesh.size(axis), 1 / norm_type)
                norms = torch.where(torch.tensor(is_whole, device=norms.device), part, norms)
        match [axis for axis, is_split in enumerate(split) if is_split]:
            case []:
                whole = norms
            case [axis]:
                whole = self._reduced(norms, norm_type, axis)
            case _:  # DTensor may join axes, which changes the order of the sum
                return torch.linalg.vector_norm(partial_norms(norms, self.mesh, split, norm_type), norm_type)
        return replicated_scalar(torch.linalg.vector_norm(whole, norm_type), self.mesh)

    def _reduced(self, norms: Tensor, norm_type: float, axis: int) -> Tensor:
        """The norms of whole gradients, of those of the parts that ranks have along an axis of the mesh."""
        if self.mesh.size(axis) == 1:
            return norms
        group, powers = self.mesh.get_group(axis), norms**norm_type
        try:
            dist.all_reduce(powers, group=group)
        except RuntimeError as error:
            raise collective_error("all_reduce", ["the gradients' norm"], group.group_name, error) from error
        return powers ** (1.0 / norm_type)

    def scale(self, max_norm: float, norm: Tensor, foreach: bool | None) -> None:
        """`torch.nn.utils.clip_grads_with_norm_`, of a replicated norm."""
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if foreach is False:
            for shard in self.shards:
                shard.mul_(coefficient)
        else:
            foreach_scale(self.shards, coefficient)
