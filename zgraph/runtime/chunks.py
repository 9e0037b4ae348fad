"""How tensors are split over ranks: chunk sizes, padding and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zgraph.runtime.groups import group_size

MIB = 2**20


def chunk_rows(rows: int, world: int) -> int:
    """Return the number of rows per rank, rounded up, for `rows` rows split over `world` ranks as by `torch.chunk`."""
    return -(-rows // world)


def local_rows(rows: int, world: int, rank: int) -> int:
    """Return the rows of one rank's chunk without padding; the last ranks may have fewer rows than others, or none."""
    chunk = chunk_rows(rows, world)
    return max(0, min(chunk, rows - rank * chunk))


@dataclass(frozen=True)
class Chunk:
    """Padded size of each rank's part of a tensor that one or more process groups split in turn.

    Attributes:
        rows: number of rows of the whole tensor. The first group splits the rows; each further group splits the
            elements of the remaining part.
        row_numel: number of elements per row; 1 for a replicated gradient.
        group_names: names of the groups that split the tensor, in order.
        unit: (elements, values): the compression method encodes this many elements as this many values of the sent
            dtype, such as 128 elements as 66 bytes. The part is padded to full units.
        filled_to: each rank's number of sent values is padded to a multiple of this number.
    """

    rows: int
    row_numel: int
    group_names: tuple[str, ...]
    unit: tuple[int, int] = (1, 1)
    filled_to: int = 1

    @property
    def is_even(self) -> bool:
        """Whether all ranks of the first group hold the same number of rows, so that no rows are padded."""
        return self.rows % group_size(self.group_names[0]) == 0

    def numel(self) -> int:
        """Return the number of values that one rank sends, padding included."""
        first, *others = self.group_names
        numel = chunk_rows(self.rows, group_size(first)) * self.row_numel
        for group_name in others:
            numel = chunk_rows(numel, group_size(group_name))
        return chunk_rows(chunk_rows(numel, self.unit[0]) * self.unit[1], self.filled_to) * self.filled_to


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append rows of zeros to a tensor until it has `rows` rows; the result is contiguous."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def payload_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size in bytes of a tensor with this shape and dtype."""
    return math.prod(shape) * dtype.itemsize
