"""Gram-Schmidt over a few long rows, in an order of operations that depends only on their length."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # elements that are summed first
LEAST = 1e-5  # a remainder shorter than this share of its row is only rounding error of the subtractions


def orthonormalize(rows: Tensor) -> None:
    """Make rows orthonormal in place, from first to last.

    A row that is, up to rounding, a linear combination of earlier rows becomes zeros. A row that is not finite becomes
    NaN, and so do all later rows.

    Args:
        rows: [..., count, length] fp32.

    Source: Gram-Schmidt with one re-orthogonalization, Giraud et al. 2005, "Rounding error analysis of the classical
    Gram-Schmidt orthogonalization process"; each row is scaled by its largest magnitude first, so that no square
    leaves the range of fp32.
    """
    for place in range(rows.shape[-2]):
        row, before = rows[..., place, :], rows[..., :place, :]
        largest = row.abs().amax(-1, keepdim=True)
        row /= torch.where(largest == 0, 1.0, largest)
        length = sum_in_blocks(row * row).sqrt()
        for _ in range(2 if place else 0):
            shares = sum_in_blocks(before * row.unsqueeze(-2))
            row -= (before * shares.unsqueeze(-1)).sum(-2)
        left = sum_in_blocks(row * row).sqrt()
        row /= left.unsqueeze(-1)
        row.masked_fill_((left <= LEAST * length).unsqueeze(-1), 0.0)


def sum_in_blocks(values: Tensor) -> Tensor:
    """Sum over the last dim in blocks of fixed size, so that the bits do not depend on the number of threads."""
    length = values.shape[-1]
    whole = length // BLOCK * BLOCK
    total = values[..., whole:].sum(-1)
    if whole:
        total = total + values[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1).sum(-1)
    return total
