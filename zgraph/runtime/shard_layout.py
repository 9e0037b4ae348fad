"""Layout of a parameter on the mesh: the rows each rank keeps, and the process groups for gathers and reductions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.distributed.tensor import Placement, Replicate, Shard

from zgraph.runtime.chunks import Chunk, chunk_rows, local_rows
from zgraph.runtime.groups import group_rank, group_size, reduction_group
from zgraph.runtime.window_state import ALONE


@dataclass(frozen=True)
class ShardLayout:
    """Layout of one parameter and of its gradient.

    A sharded parameter is split on dim 0 as `torch.chunk` and `Shard(0)` split: the last ranks may hold fewer rows, or
    none. Sent data is padded, so that every rank sends equally long chunks. Graphs hold a layout as four plain
    arguments of the marker operators, see `zgraph.graph.operator_arguments`.

    Attributes:
        shape: shape of the unsharded parameter.
        zero_stage: 0 replicated, 1 to 3 sharded; stages 1 to 3 differ in what an accumulation window keeps.
        replica_group: name of the process group whose ranks hold equal shards (hybrid sharding); "" if there is none.
        gather_group: name of the process group over which the parameter is sharded. At stage 0 the group's ranks all
            hold the whole parameter, and share the work of averaging its gradient.
    """

    shape: tuple[int, ...]
    zero_stage: int
    replica_group: str
    gather_group: str

    # --- ranks ---

    @property
    def reduce_group(self) -> str:
        """Name of the group on which gradients are reduced; it has the same ranks as `gather_group`."""
        return reduction_group(self.gather_group)

    @property
    def world(self) -> int:
        """Number of ranks over which the parameter is gathered and its gradient reduced, not counting replicas."""
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
        """Index of the replica that this rank holds."""
        return group_rank(self.replica_group)

    def divisor(self, reduction: str) -> int:
        """Divisor of a summed gradient: all ranks for "mean", 1 for "sum", else the number that `reduction` spells."""
        if reduction == "mean":
            return self.world * self.num_replicas
        return 1 if reduction == "sum" else int(reduction)

    # --- between steps ---

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps only its rows between steps, not the whole parameter."""
        return self.zero_stage > 0

    def placements(self, ndim: int) -> tuple[Placement, ...]:
        """DTensor placements on a mesh of `ndim` axes: a sharded parameter is split over the last axis."""
        return (*[Replicate()] * (ndim - 1), Shard(0) if self.is_sharded else Replicate())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk_rows(self) -> int:
        """Rows of every rank's padded chunk."""
        return chunk_rows(self.shape[0], self.world) if self.is_sharded else self.shape[0]

    @property
    def padded_rows(self) -> int:
        """Rows of all padded chunks together, as a gather returns them."""
        return self.chunk_rows * (self.world if self.is_sharded else 1)

    @property
    def local_rows(self) -> int:
        """Rows that this rank keeps, without padding."""
        return self.rows_of(self.rank) if self.is_sharded else self.shape[0]

    def rows_of(self, rank: int) -> int:
        """Rows that a rank keeps of a sharded parameter."""
        return local_rows(self.shape[0], self.world, rank)

    @property
    def first_row(self) -> int:
        """Index of this rank's first row in the unsharded parameter; the total number of rows if this rank has none."""
        return min(self.rank * self.chunk_rows, self.shape[0]) if self.is_sharded else 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank keeps of the parameter, and of its gradient."""
        return (self.local_rows, *self.shape[1:]) if self.is_sharded else self.shape

    # --- sent data ---

    @property
    def is_gathered(self) -> bool:
        """Whether reading the parameter requires a collective."""
        return self.is_sharded and self.world > 1

    @property
    def is_reduced(self) -> bool:
        """Whether reducing the parameter's gradient requires a collective."""
        return self.world * self.num_replicas > 1

    @property
    def gathers_mean(self) -> bool:
        """Whether each rank computes a part of the mean gradient, after which all ranks gather these parts."""
        return self.num_replicas > 1 or (not self.is_sharded and self.world > 1)

    @property
    def param_chunk(self) -> Chunk:
        """The chunk of a sharded parameter that each rank sends."""
        return Chunk(self.shape[0], math.prod(self.shape[1:]), (self.gather_group,))

    @property
    def grad_chunk(self) -> Chunk:
        """The chunk of the gradient that each rank sums: its rows, or an equal part of a replicated gradient."""
        rows, row_numel = (self.shape[0], math.prod(self.shape[1:])) if self.is_sharded else (self.numel, 1)
        return Chunk(rows, row_numel, (self.reduce_group,))

    @property
    def replica_chunk(self) -> Chunk:
        """The part of `grad_chunk` that each rank then sums over the replicas."""
        return replace(self.grad_chunk, group_names=(self.reduce_group, self.replica_group))

    # --- windows, see `zgraph.no_sync` ---

    def keeps_gathered(self, window: str) -> bool:
        """Whether the gathered parameter is kept after a call, for the other forward passes of the window."""
        return self.zero_stage in (1, 2) and window != ALONE

    def gradients_wait(self, window: str) -> bool:
        """Whether each rank sums its gradients locally until the closing backward pass."""
        return self.zero_stage in (0, 1) and window != ALONE
