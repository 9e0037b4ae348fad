"""How tensors are split over ranks: rows and elements of each chunk, padding and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zgraph.runtime.groups import group_size

MIB = 2**20


def chunk_rows(rows: int, world: int) -> int:
    """Rows of each rank's padded chunk if `rows` are split over `world` ranks, as `torch.chunk` and `Shard(0)` do."""
    return -(-rows // world)


def local_rows(rows: int, world: int, rank: int) -> int:
    """Rows that `rank` holds without padding: a full chunk, fewer on the last rank with rows, 0 on ranks after it."""
    chunk = chunk_rows(rows, world)
    return max(0, min(chunk, rows - rank * chunk))


@dataclass(frozen=True)
class Chunk:
    """The padded part of a tensor that each rank holds after one process group, or several in turn, have split it.

    Attributes:
        rows, row_numel: shape of the unsplit tensor. The first group splits its rows; each further group splits the
            elements of the remaining part. A replicated gradient has rows of one element.
        group_names: names of the groups that split the tensor, outermost first.
        unit: number of elements that are encoded together, and number of values of the wire dtype that encode them,
            such as (128, 66) if bytes are sent. The part is padded to full units.
        filled_to: the sent payload is padded to a multiple of this many values.
    """

    rows: int
    row_numel: int
    group_names: tuple[str, ...]
    unit: tuple[int, int] = (1, 1)
    filled_to: int = 1

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold the same number of rows, so that nothing is padded."""
        return self.rows % group_size(self.group_names[0]) == 0

    def numel(self) -> int:
        """Number of values of the wire dtype that one rank sends."""
        first, *others = self.group_names
        numel = chunk_rows(self.rows, group_size(first)) * self.row_numel
        for group_name in others:
            numel = chunk_rows(numel, group_size(group_name))
        return chunk_rows(chunk_rows(numel, self.unit[0]) * self.unit[1], self.filled_to) * self.filled_to


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` as a contiguous tensor of `rows` rows, with rows of zeros appended."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def payload_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor of this shape and dtype."""
    return math.prod(shape) * dtype.itemsize
