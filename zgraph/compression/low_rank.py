"""PowerSGD: send two thin factors, whose product approximates the gradient, instead of the gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zgraph.errors import check_bytes, check_least
from zgraph.runtime.chunks import MIB

FACTOR_DTYPE = torch.float32  # dtype of factors and errors, for gradients of any dtype


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Compression of gradients to matrices of low rank: PowerSGD with error feedback and a warm start.

    Each rank adds its kept error to its gradient, M = G + E. With the factor Q of the last step it then computes

        P = mean of M Q,  made orthonormal        one exchange of rank * rows numbers
        Q = mean of M^T P                         one exchange of rank * columns numbers
        mean gradient = P Q^T                     rebuilt by each rank: the whole gradient, or the rank's rows
        E = M - P (M^T P)^T                       the part of M that this rank has not sent

    Sums, products and errors are fp32. The mean of all ranks' errors is the mean of the unsent parts, as in the paper.
    The paper subtracts the mean gradient from M instead. Its error thus also contains the rank's difference from the
    mean; these differences cancel in the sum. A rank keeps one fp32 number per element of the gradient, and Q.

    A gradient of more than two dims is treated as a matrix, too: its first dims form the rows, the others the columns,
    so that the factors are smallest. Vectors, and gradients whose factors save too little, are sent uncompressed.

    Attributes:
        rank: rank of the matrices, that is, columns of P and of Q.
        least_saving: a gradient is sent uncompressed unless its factors need this many times fewer bytes.
        bucket_bytes: largest fp32 size of the gradients whose factors share an exchange. Each gradient is held until
            the factors P of its bucket have come back.

    Source: Vogels, Karimireddy, Jaggi 2019, "PowerSGD", arXiv 1905.13727, algorithms 1 and 2.
    """

    name: ClassVar[str] = "LowRank"  # the name in checkpoints
    rank: int = 4
    least_saving: float = 2.0
    bucket_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        check_least("zgraph.passes.LowRank", 1, "1 or more, such as 4", rank=self.rank)
        if not (math.isfinite(self.least_saving) and self.least_saving >= 1):
            raise ValueError(
                f"zgraph.passes.LowRank: least_saving={self.least_saving}; factors that need more bytes than the "
                "gradient are useless, write 1 or more."
            )
        check_bytes("zgraph.passes.LowRank", bucket_bytes=self.bucket_bytes)

    @property
    def kept_as(self) -> str:
        """Name and fields on which the kept state depends, as text in the form of `method_text.to_text`."""
        return json.dumps([self.name, {"rank": self.rank}])

    def pays(self, shape: Sequence[int], sent_bytes: int) -> bool:
        """Whether the factors of a gradient need `least_saving` times fewer bytes than the gradient.

        Args:
            shape: shape of the whole gradient.
            sent_bytes: bytes that an uncompressed reduction sends: each element to the rank that sums it and, if the
                gradient is replicated, back.
        """
        if len(shape) < 2:
            return False
        return self.rank * sum(matrix_shape(shape)) * factor_bytes() * self.least_saving <= sent_bytes


def factor_bytes() -> int:
    """Bytes on the wire for each number of a factor: the number is sent to be summed, and its mean comes back."""
    return 2 * FACTOR_DTYPE.itemsize


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the matrix into which a tensor of two or more dims is reshaped for compression.

    The tensor's first dims form the rows, its other dims the columns. The split minimises rows + columns.
    """
    splits = [(math.prod(shape[:place]), math.prod(shape[place:])) for place in range(1, len(shape))]
    return min(splits, key=sum)


def state_of_matrix(rows: int, columns: int, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype), by name, of the tensors that a rank keeps for a matrix; "right" is Q^T, equal on all ranks."""
    return {"error": ((rows, columns), FACTOR_DTYPE), "right": ((rank, columns), FACTOR_DTYPE)}


@dataclass(frozen=True)
class Batch:
    """Matrices of one size, processed together.

    Attributes:
        rows, columns: size of each matrix.
        members: indices of the matrices in the bucket.
        left_at, right_at: offsets, in elements, of the batch's factors in the bucket's P and Q.
    """

    rows: int
    columns: int
    members: tuple[int, ...]
    left_at: int
    right_at: int


@dataclass(frozen=True)
class FactorLayout:
    """Layout of the factors of a bucket's matrices: transposed, [rank, rows] and [rank, columns], batch by batch.

    Attributes:
        rows, columns: number of rows, and of columns, of each matrix.
        rank: rank of the factors.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rank: int

    def batches(self) -> list[Batch]:
        """The matrices in batches of equal matrix size, in the order in which the sizes first occur."""
        alike: dict[tuple[int, int], list[int]] = {}
        for member, size in enumerate(zip(self.rows, self.columns, strict=True)):
            alike.setdefault(size, []).append(member)
        found: list[Batch] = []
        left_at = right_at = 0
        for (rows, columns), members in alike.items():
            found.append(Batch(rows, columns, tuple(members), left_at, right_at))
            left_at += len(members) * self.rank * rows
            right_at += len(members) * self.rank * columns
        return found

    @property
    def left_numel(self) -> int:
        return self.rank * sum(self.rows)

    @property
    def right_numel(self) -> int:
        return self.rank * sum(self.columns)

    def left(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield for each batch a view of its factors in `flat`, the bucket's P: [matrices, rank, rows]."""
        for batch in self.batches():
            count = len(batch.members)
            part = flat[batch.left_at : batch.left_at + count * self.rank * batch.rows]
            yield part.view(count, self.rank, batch.rows)

    def right(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield for each batch a view of its factors in `flat`, the bucket's Q: [matrices, rank, columns]."""
        for batch in self.batches():
            count = len(batch.members)
            part = flat[batch.right_at : batch.right_at + count * self.rank * batch.columns]
            yield part.view(count, self.rank, batch.columns)


def orthonormalize_work(layout: FactorLayout) -> tuple[int, int]:
    """Number of kernel launches that make the columns of P orthonormal, and bytes that the launches move.

    The columns are made orthonormal one after the other. Counted by hand from codegen/kernels/orthonormal.py, batch by
    batch, if rows of P^T are long enough to be summed in blocks. Kernels on tensors with one number per row count as
    launches, but not as bytes.
    """
    launches = moved = 0
    for batch in layout.batches():
        numbers = len(batch.members) * batch.rows  # elements of one row of P^T, over the whole batch
        for before in range(layout.rank):
            projections = 2 if before else 0  # number of times the earlier rows' components are subtracted
            launches += _OWN_LAUNCHES + projections * _PROJECTION_LAUNCHES
            moved += (_OWN_PASSES + projections * (5 + 6 * before)) * numbers * FACTOR_DTYPE.itemsize
    return launches, moved


# Kernels for each row's scaling, its length before and after, and its division; and their reads and writes of the row.
# Then the kernels that subtract its components along earlier rows: they access the row 5 times, each earlier row 6.
_OWN_LAUNCHES, _OWN_PASSES, _PROJECTION_LAUNCHES = 22, 15, 8
