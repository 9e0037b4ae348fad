"""Layout of a parameter on the mesh: the rows of each rank, and the process groups for gathers and reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.distributed.tensor import Placement, Replicate, Shard

from zgraph.runtime.chunks import Chunk, chunk_rows, local_rows
from zgraph.runtime.groups import group_rank, group_size, reduction_group
from zgraph.runtime.window_state import ALONE


@dataclass(frozen=True)
class ShardLayout:
    """Layout of one parameter and its gradient over ranks.

    A sharded parameter is split along dim 0 as by `Shard(0)`: the last ranks may have fewer rows than others, or none.
    Data is padded before it is sent, so that all ranks send equally many rows.

    Attributes:
        shape: shape of the unsharded parameter.
        zero_stage: 0 for a replicated parameter, 1 to 3 for a sharded one; the stages differ in what each rank keeps
            from one forward under `no_sync` to the next.
        replica_group: name of the process group whose ranks have equal shards (hybrid sharding); "" if there is none.
        gather_group: name of the process group over which the parameter is sharded. At stage 0, each rank of this group
            has the whole parameter, and averages one part of the gradient.
    """

    shape: tuple[int, ...]
    zero_stage: int
    replica_group: str
    gather_group: str

    # --- ranks ---

    @property
    def reduce_group(self) -> str:
        """Name of the process group on which gradients are reduced; it has the same ranks as `gather_group`."""
        return reduction_group(self.gather_group)

    @property
    def world(self) -> int:
        """Number of ranks in `gather_group`."""
        return group_size(self.gather_group)

    @property
    def rank(self) -> int:
        """This rank's number in `gather_group`."""
        return group_rank(self.gather_group)

    @property
    def num_replicas(self) -> int:
        return group_size(self.replica_group)

    @property
    def replica(self) -> int:
        """This rank's number in `replica_group`."""
        return group_rank(self.replica_group)

    def divisor(self, reduction: str) -> int:
        """Return the number by which a summed gradient is divided.

        Args:
            reduction: "mean" (divide by the number of all ranks), "sum" (1), or a number as text.
        """
        if reduction == "mean":
            return self.world * self.num_replicas
        return 1 if reduction == "sum" else int(reduction)

    # --- between steps ---

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps only its shard of the parameter between steps."""
        return self.zero_stage > 0

    def placements(self, ndim: int) -> tuple[Placement, ...]:
        """Return the parameter's DTensor placements on a mesh with `ndim` axes; only the last axis shards."""
        return (*[Replicate()] * (ndim - 1), Shard(0) if self.is_sharded else Replicate())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Number of rows in each rank's chunk, padding included."""
        return chunk_rows(self.shape[0], self.world) if self.is_sharded else self.shape[0]

    @property
    def padded_rows(self) -> int:
        """Number of rows that a gather returns: the chunks of all ranks, padding included."""
        return self.chunk_rows * (self.world if self.is_sharded else 1)

    @property
    def local_rows(self) -> int:
        """Number of rows of this rank's shard, without padding."""
        return self.rows_of(self.rank) if self.is_sharded else self.shape[0]

    def rows_of(self, rank: int) -> int:
        """Return the number of rows of a rank's shard, without padding."""
        return local_rows(self.shape[0], self.world, rank)

    @property
    def first_row(self) -> int:
        """Index of this rank's first row in the unsharded parameter; the number of all rows if this rank has none."""
        return min(self.rank * self.chunk_rows, self.shape[0]) if self.is_sharded else 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part of the parameter, and of its gradient."""
        return (self.local_rows, *self.shape[1:]) if self.is_sharded else self.shape

    # --- sent data ---

    @property
    def is_gathered(self) -> bool:
        """Whether the parameter must be gathered by a collective before it is read."""
        return self.is_sharded and self.world > 1

    @property
    def is_reduced(self) -> bool:
        """Whether the gradient must be reduced by a collective."""
        return self.world * self.num_replicas > 1

    @property
    def gathers_mean(self) -> bool:
        """Whether the reduction of the gradient ends with an all_gather.

        Each rank then averages one part of the gradient, and gathers the other parts.
        """
        return self.num_replicas > 1 or (not self.is_sharded and self.world > 1)

    @property
    def param_chunk(self) -> Chunk:
        """Chunk of the parameter that each rank sends in a gather."""
        return Chunk(self.shape[0], math.prod(self.shape[1:]), (self.gather_group,))

    @property
    def grad_chunk(self) -> Chunk:
        """Chunk of the gradient that each rank sums over `reduce_group`.

        For a sharded parameter it has the rank's rows, for a replicated one an equal share of the elements.
        """
        rows, row_numel = (self.shape[0], math.prod(self.shape[1:])) if self.is_sharded else (self.numel, 1)
        return Chunk(rows, row_numel, (self.reduce_group,))

    @property
    def replica_chunk(self) -> Chunk:
        """Part of `grad_chunk` that each rank sums over `replica_group`."""
        return replace(self.grad_chunk, group_names=(self.reduce_group, self.replica_group))

    # --- windows, see `zgraph.no_sync` ---

    def keeps_gathered(self, window: str) -> bool:
        """Return whether the gathered parameter is kept for the other forwards of the accumulation window.

        Args:
            window: position of the forward in its window: ALONE, OPEN or CLOSING.
        """
        return self.zero_stage in (1, 2) and window != ALONE

    def gradients_wait(self, window: str) -> bool:
        """Return whether gradients are summed locally and reduced only by the last backward of the accumulation window.

        Args:
            window: position of the forward in its window: ALONE, OPEN or CLOSING.
        """
        return self.zero_stage in (0, 1) and window != ALONE
