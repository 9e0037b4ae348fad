"""Matrices that are each computed by one rank, their owner, although every rank holds some rows of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zgraph.runtime.chunks import chunk_rows, local_rows

MOST_PADDING = 1.125  # sent elements for each element of a bucket's matrices
MOST_MATRICES = 4  # for each rank, in a bucket that has more padding, or no work for some rank
ORTHOGONAL_DTYPE = torch.bfloat16  # in which torch's Newton-Schulz iteration computes, and in which rows travel


@dataclass(frozen=True)
class OwnedMatrices:
    """Layout of the buffers in which ranks exchange rows with the owners of matrices.

    A buffer has one part for each rank, and all parts are equally long. On the way to the owners, part r of a rank's
    buffer has its rows of the matrices that rank r owns; on the way back, the owner's part r has rank r's rows of them.
    Rows are padded, so that all ranks send equally many: buffers have the same size on all ranks.

    Attributes:
        rows, columns: shape of each matrix.
        owners: for each matrix, the rank that computes it.
        world: number of ranks.
        is_sharded: whether each rank holds a chunk of the rows, as by `Shard(0)`; else each holds whole matrices, and a
            part has those of one owner.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    owners: tuple[int, ...]
    world: int
    is_sharded: bool = True

    @classmethod
    def of(
        cls, rows: Sequence[int], columns: Sequence[int], owners: Sequence[int], world: int, *, is_sharded: bool = True
    ) -> OwnedMatrices:
        return cls(tuple(rows), tuple(columns), tuple(owners), world, is_sharded)

    def owned_by(self, rank: int) -> list[int]:
        """Return the indices of the matrices that a rank computes."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def work(self, number: int, steps: int) -> tuple[int, int]:
        """Return the flops that orthogonalize a matrix in `steps` iterations, and the elements that they access.

        An iteration reads the matrix three times and writes it once; the same for the two square matrices.
        """
        rows, columns = self.rows[number], self.columns[number]
        short = min(rows, columns)
        return newton_schulz_flops(rows, columns, steps), 4 * steps * (rows * columns + short * short)

    def chunk_rows(self, number: int) -> int:
        """Return the number of rows of a matrix in one part, padding included."""
        return chunk_rows(self.rows[number], self.world) if self.is_sharded else self.rows[number]

    def local_rows(self, number: int, rank: int) -> int:
        """Return the number of rows of a matrix that a rank holds."""
        return local_rows(self.rows[number], self.world, rank) if self.is_sharded else self.rows[number]

    def chunk_numel(self, number: int) -> int:
        return self.chunk_rows(number) * self.columns[number]

    @cached_property
    def part_numel(self) -> int:
        """Number of elements of each part."""
        return max(sum(map(self.chunk_numel, self.owned_by(rank))) for rank in range(self.world))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """For each matrix, the position of its chunk in a part."""
        filled = [0] * self.world
        found: list[int] = []
        for number, owner in enumerate(self.owners):
            found.append(filled[owner])
            filled[owner] += self.chunk_numel(number)
        return tuple(found)

    def chunks_in(self, parts: Tensor, number: int) -> Tensor:
        """Return a view of one matrix's chunks in an owner's buffer: [world * part] -> [world, chunk]."""
        begin = self.offsets[number]
        return parts.view(self.world, -1)[:, begin : begin + self.chunk_numel(number)]

    def own_begin(self, number: int) -> int:
        """Return where a rank's rows of one matrix begin in the buffer that it exchanges with the owners."""
        return self.owners[number] * self.part_numel + self.offsets[number]

    @property
    def padding(self) -> float:
        """Sent elements for each element of the matrices, at least 1."""
        chunks = self.world if self.is_sharded else 1
        return self.world * self.part_numel / sum(chunks * self.chunk_numel(one) for one in range(len(self.rows)))


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Return the flops of `steps` quintic iterations on a matrix: X X^T, its square, and a product of it with X."""
    short, long = sorted((rows, columns))
    return steps * 2 * short * short * (2 * long + short)


def assign_owners(flops: Sequence[int], sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Choose the owner of each matrix: the largest first, each to the rank that has the least to compute so far.

    Deterministic, as all ranks must make the same choice.

    Args:
        flops: work of each matrix.
        sizes: elements of each matrix; of ranks with equal work, the one with the fewest elements gets the next.
        loads: work that each rank has already.
    """
    found = [0] * len(flops)
    work, held = list(loads), [0] * len(loads)
    for number in sorted(range(len(flops)), key=lambda number: (-flops[number], number)):
        owner = min(range(len(loads)), key=lambda rank: (work[rank], held[rank], rank))
        found[number] = owner
        work[owner] += flops[number]
        held[owner] += sizes[number]
    return found


@dataclass(frozen=True)
class Bucket:
    """Matrices that travel together: their indices, and the layout of their exchange."""

    members: tuple[int, ...]
    layout: OwnedMatrices


def plan_buckets(
    shapes: Sequence[tuple[int, int]], world: int, *, is_sharded: bool, least_numel: int, steps: int
) -> list[Bucket]:
    """Cut a sequence of matrices into buckets, and choose an owner for each matrix.

    A bucket ends once it has `least_numel` elements and, for every rank, work in parts of nearly equal size or
    `MOST_MATRICES`. Ranks' loads are balanced over all buckets.

    Args:
        shapes: [rows, columns] of each matrix, in the order in which their gradients arrive.
        world: number of ranks.
        is_sharded: see `OwnedMatrices`.
        least_numel: least elements of a bucket.
        steps: iterations for each matrix.
    """
    found: list[Bucket] = []
    loads, members = [0] * world, list[int]()
    for number in range(len(shapes)):
        members.append(number)
        rows, columns = zip(*(shapes[one] for one in members), strict=True)
        flops = [newton_schulz_flops(*shapes[one], steps) for one in members]
        sizes = [math.prod(shapes[one]) for one in members]
        layout = OwnedMatrices.of(rows, columns, assign_owners(flops, sizes, loads), world, is_sharded=is_sharded)
        is_good = len(set(layout.owners)) == world and layout.padding <= MOST_PADDING
        is_full = sum(sizes) >= least_numel and (is_good or len(members) >= MOST_MATRICES * world)
        if is_full or number == len(shapes) - 1:
            found.append(Bucket(tuple(members), layout))
            for owner, work in zip(layout.owners, flops, strict=True):
                loads[owner] += work
            members = []
    return found
