"""PowerSGD: ranks send two thin factors whose product approximates the gradient."""

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
    """PowerSGD: compresses gradients to matrices of low rank, with error feedback and a warm start.

    Each rank adds its error E to its gradient G, M = G + E. With the factor Q of the last step it then computes

        P = mean of M Q,  made orthonormal        one exchange of rank * rows numbers
        Q = mean of M^T P                         one exchange of rank * columns numbers
        mean gradient = P Q^T                     rebuilt by each rank: the whole gradient, or the rank's rows
        E = M - P (M^T P)^T                       the part of M that this rank has not sent

    Sums, products and errors are fp32. A rank keeps one fp32 number per element of the gradient, and Q.

    The paper instead subtracts the mean gradient from M. The paper's E thus also contains the difference between the
    rank's gradient and the mean. These differences cancel over the ranks, so the mean of E is the same in both.

    A gradient of more than two dims is treated as a matrix: its first dims form the rows, the others the columns, split
    where the factors are smallest. Vectors, and gradients whose factors save too little, are sent uncompressed.

    Attributes:
        rank: rank of the matrices, that is, number of columns of P and of Q.
        least_saving: a gradient is compressed only if its factors need at least this many times fewer bytes.
        bucket_bytes: maximum fp32 size of the gradients whose factors share an exchange. Each gradient is kept in
            memory until the factors P of its bucket have arrived.

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
        """Text that identifies error-feedback state: the method's name and its rank, which determines shapes."""
        return json.dumps([self.name, {"rank": self.rank}])

    def pays(self, shape: Sequence[int], sent_bytes: int) -> bool:
        """Return whether the factors of a gradient need at least `least_saving` times fewer bytes than the gradient.

        Args:
            shape: shape of the whole gradient.
            sent_bytes: bytes that an uncompressed reduction sends: each element to the rank that sums it and, if the
                gradient is replicated, back.
        """
        if len(shape) < 2:
            return False
        return self.rank * sum(matrix_shape(shape)) * factor_bytes() * self.least_saving <= sent_bytes


def factor_bytes() -> int:
    """Return the total bytes sent for each number of a factor, which is sent twice: to be summed, and as the mean."""
    return 2 * FACTOR_DTYPE.itemsize


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of the matrix into which a tensor of two or more dims is reshaped.

    The tensor's first dims form the rows, its other dims the columns. The split minimises rows + columns.
    """
    splits = [(math.prod(shape[:place]), math.prod(shape[place:])) for place in range(1, len(shape))]
    return min(splits, key=sum)


def state_of_matrix(rows: int, columns: int, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return (shape, dtype) of each tensor that a rank keeps for a matrix: "error", and "right", the factor Q^T."""
    return {"error": ((rows, columns), FACTOR_DTYPE), "right": ((rank, columns), FACTOR_DTYPE)}


@dataclass(frozen=True)
class Batch:
    """Matrices of equal size in a bucket, which are processed together.

    Attributes:
        rows, columns: size of each matrix.
        members: indices of the matrices in the bucket.
        left_at, right_at: offsets of the batch's factors in the bucket's P and Q, in elements.
    """

    rows: int
    columns: int
    members: tuple[int, ...]
    left_at: int
    right_at: int


@dataclass(frozen=True)
class FactorLayout:
    """Layout of the low-rank factors of a bucket's matrices, batch by batch.

    Factors are stored transposed, as [rank, rows] and [rank, columns].

    Attributes:
        rows, columns: numbers of rows, and of columns, one for each matrix.
        rank: rank of the factors.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    rank: int

    def batches(self) -> list[Batch]:
        """Return batches of matrices of equal size, in the order in which the sizes first occur."""
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
        """Yield for each batch its part of `flat`, the bucket's factors P, as [matrices, rank, rows]."""
        for batch in self.batches():
            count = len(batch.members)
            part = flat[batch.left_at : batch.left_at + count * self.rank * batch.rows]
            yield part.view(count, self.rank, batch.rows)

    def right(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield for each batch its part of `flat`, the bucket's factors Q, as [matrices, rank, columns]."""
        for batch in self.batches():
            count = len(batch.members)
            part = flat[batch.right_at : batch.right_at + count * self.rank * batch.columns]
            yield part.view(count, self.rank, batch.columns)


def orthonormalize_work(layout: FactorLayout) -> tuple[int, int]:
    """Return the number of kernel launches that make the columns of P orthonormal, and the bytes that they move.

    Counted by hand from codegen/kernels/orthonormal.py. Kernels on tensors with one number per row count as launches,
    but not as bytes.
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
