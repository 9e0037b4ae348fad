"""The operators of low-rank reductions; their kernels are in `zgraph.codegen.low_rank_kernels`.

    left, delta, ... = low_rank_left([grad, ...], [handle, ...], ...)       M Q, and M = gradient + error
    basis, right = low_rank_right(mean of left, [delta, ...], ...)          P orthonormal, and M^T P
    mean, ... = low_rank_means(basis, mean of right, ...)                   P Q^T, or this rank's rows of it

Between them the factors are reduced like replicated gradients. What the parameters keep behind their handles is read by
the first, and replaced by the second (the error) and the third (Q).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.compression.low_rank import FACTOR_DTYPE, FactorLayout

torch.library.define(
    "zgraph::low_rank_left", "(Tensor[] grads, Tensor[] handles, int[] rows, int[] columns, int rank) -> Tensor[]"
)
torch.library.define(
    "zgraph::low_rank_right",
    "(Tensor left, Tensor[] deltas, Tensor[] handles, int[] rows, int[] columns, int rank) -> Tensor[]",
)
torch.library.define(
    "zgraph::low_rank_means",
    "(Tensor basis, Tensor right, Tensor[] handles, int[] rows, int[] columns, int rank, int[] first_rows, "
    "int[] kept_rows, ScalarType dtype, str window) -> Tensor[]",
)


def layout_of(rows: Sequence[int], columns: Sequence[int], rank: int) -> FactorLayout:
    """The layout that operators with these arguments mean."""
    return FactorLayout(tuple(rows), tuple(columns), rank)


@torch.library.register_fake("zgraph::low_rank_left")
def _(
    grads: Sequence[Tensor], handles: Sequence[Tensor], rows: Sequence[int], columns: Sequence[int], rank: int
) -> list[Tensor]:
    """Gradients with their errors, and their products with the right factors of the last step.

    Args:
        grads: any shape of rows * columns elements, any floating-point dtype.
        handles: of their parameters.
        rows, columns: of the matrices that they are.
        rank: of the factors.

    Returns:
        left [rank * sum(rows)] fp32, see `FactorLayout`; then for each batch [matrices, rows, columns] fp32.
    """
    layout, like = layout_of(rows, columns, rank), grads[0]
    deltas = [
        like.new_empty((len(batch.members), batch.rows, batch.columns), dtype=FACTOR_DTYPE)
        for batch in layout.batches()
    ]
    return [like.new_empty((layout.left_numel,), dtype=FACTOR_DTYPE), *deltas]


@torch.library.register_fake("zgraph::low_rank_right")
def _(
    left: Tensor,
    deltas: Sequence[Tensor],
    handles: Sequence[Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> list[Tensor]:
    """Orthonormal left factors, this rank's right ones; the error becomes what their product lacks.

    Args:
        left: what the ranks' `low_rank_left` give together.
        deltas: what this rank's gave; they become the errors and are not to be read again.
        handles, rows, columns, rank: as there.

    Returns:
        basis, as `left`, and right [rank * sum(columns)] fp32.
    """
    return [left.new_empty(left.shape), left.new_empty((layout_of(rows, columns, rank).right_numel,))]


@torch.library.register_fake("zgraph::low_rank_means")
def _(
    basis: Tensor,
    right: Tensor,
    handles: Sequence[Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
    first_rows: Sequence[int],
    kept_rows: Sequence[int],
    dtype: torch.dtype,
    window: str,
) -> list[Tensor]:
    """Rows of the products, and the right factors kept for the next step.

    Args:
        basis: what `low_rank_right` returned.
        right: the mean, or sum, of what it returned on all ranks.
        handles, rows, columns, rank: as there.
        first_rows, kept_rows: of each matrix this rank's part; rows behind the last are zeros.
        dtype: of the results.
        window: where the backward stands in its window, see runtime/window.py.

    Returns:
        [kept_rows, columns] for each matrix.
    """
    return [basis.new_empty((kept, width), dtype=dtype) for kept, width in zip(kept_rows, columns, strict=True)]
