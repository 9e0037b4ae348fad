"""A check that all ranks of a tensor-parallel or context group get the same batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.changes import checksum
from zgraph.torch_compat.collectives import all_gather
from zgraph.torch_compat.fake_values import is_fake, without_fake_mode
from zgraph.torch_compat.groups import is_fake_world

OF_PARTS = " If each is meant to hold a part of one batch, write zgraph.shard(..., check_batch=False)."


class SameBatch:
    """A check that compares checksums of the first batch over an axis of a mesh. All ranks of the axis run it.

    Args:
        mesh: the axis.
        kind: kind of the axis, for the error.
        advice: sentence of the error that follows how to choose the batch.
    """

    def __init__(self, mesh: DeviceMesh, kind: str = "tensor-parallel", advice: str = OF_PARTS) -> None:
        self.mesh, self.kind, self.advice = mesh, kind, advice
        self.is_due = mesh.size() > 1

    def check(self, inputs: Iterable[object]) -> None:
        """Compare the inputs of the first call; later calls return immediately.

        Raises:
            ZgraphError: the inputs differ; raised on all ranks of the group.
        """
        if not self.is_due:
            return
        given = [one for one in inputs if isinstance(one, Tensor) and not isinstance(one, DTensor)]
        if any(is_fake(one) or one.is_meta for one in given) or is_fake_world():
            return
        self.is_due = False
        group = self.mesh.get_group()
        with torch.no_grad(), without_fake_mode():
            own = torch.tensor([checksum(given)], dtype=torch.int64, device=self.mesh.device_type)
            every = own.new_empty(self.mesh.size())
            all_gather(every, own, group)
            sums = every.tolist()
        if len(set(sums)) > 1:
            members = dist.get_process_group_ranks(group)
            of_ranks = ", ".join(f"rank {rank}: {found:08x}" for rank, found in zip(members, sums, strict=True))
            raise ZgraphError(
                f"zgraph: the ranks of one {self.kind} group {members} were given different batches (checksums "
                f"{of_ranks}), and compute each batch together. Choose the batch by the data-parallel rank: "
                'DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank()).'
                f"{self.advice}"
            )
