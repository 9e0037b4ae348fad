"""Operators of low-rank reductions; their kernels are in `zgraph.codegen.low_rank_kernels`.

    left, delta, ... = low_rank_left([grad, ...], [handle, ...], ...)       M Q, and M = gradient + error
    basis, right = low_rank_right(mean of left, [delta, ...], ...)          P orthonormal, and M^T P
    mean, ... = low_rank_means(basis, mean of right, ...)                   P Q^T, or this rank's rows of it

Between these operators, `left` and `right` are reduced over the ranks like replicated gradients. Letters are those of
`zgraph.compression.low_rank.LowRank`. The error and Q are state attached to the parameters' handles: the first
operator reads both, the second replaces the error, and the third replaces Q.
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
    """Return the layout of the factors for these arguments of an operator."""
    return FactorLayout(tuple(rows), tuple(columns), rank)


@torch.library.register_fake("zgraph::low_rank_left")
def _(
    grads: Sequence[Tensor], handles: Sequence[Tensor], rows: Sequence[int], columns: Sequence[int], rank: int
) -> list[Tensor]:
    """Add the kept errors E to gradients G, and multiply each M = G + E by its right factor Q.

    The operator is `zgraph::low_rank_left`.

    Args:
        grads: any shape of rows * columns elements, any floating-point dtype.
        handles: handles of the gradients' parameters.
        rows, columns: number of rows, and of columns, of each gradient as a matrix.
        rank: rank of the factors.

    Returns:
        left [rank * sum(rows)] fp32, the products M Q in the order of `FactorLayout`; then for each batch one tensor
        [matrices, rows, columns] fp32, its matrices M.
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
    """Orthonormalize the left factors P, and compute this rank's right factors M^T P (`zgraph::low_rank_right`).

    The difference between M and the product of its factors is kept as error for the next reduction.

    Args:
        left: first result of `low_rank_left`, averaged or summed over the ranks.
        deltas: the other results of `low_rank_left`; overwritten by the errors.
        handles, rows, columns, rank: as in `low_rank_left`.

    Returns:
        basis, the orthonormal left factors, shaped like `left`; and right [rank * sum(columns)] fp32.
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
    """Compute mean gradients from their factors; keep the right factors for the next step (`zgraph::low_rank_means`).

    Args:
        basis: first result of `low_rank_right`.
        right: second result of `low_rank_right`, averaged or summed over the ranks.
        handles, rows, columns, rank: as in `low_rank_left`.
        first_rows, kept_rows: for each matrix, the first row and the number of rows to compute on this rank; rows after
            the end of the matrix are zeros.
        dtype: dtype of the results.
        window: window position of the backward, see `zgraph.runtime.window_state`.

    Returns:
        [kept_rows, columns] for each matrix.
    """
    return [basis.new_empty((kept, width), dtype=dtype) for kept, width in zip(kept_rows, columns, strict=True)]
