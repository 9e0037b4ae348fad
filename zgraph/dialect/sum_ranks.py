"""The sum over ranks, in rank order; every compiled form of a reduction must give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.dialect.wire_dtypes import accumulate_dtype


def divisor_like(total: Tensor, divisor: int) -> Tensor:
    """Return the divisor as a 0-d tensor like `total`, so that every device rounds divisions correctly (IEEE).

    Given a Python number instead, torch on CUDA would multiply by its reciprocal, as Inductor does for constants.
    Unless the divisor is a power of two, the bits would differ.
    """
    return torch.full((), divisor, dtype=total.dtype, device=total.device)


def sum_pieces(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Compute `zgraph::sum_ranks` with torch's operators, one rank's piece after another."""
    wide = accumulate_dtype(received.dtype)
    first, *others = received.unflatten(0, (world, -1))
    total = first + others.pop(0) if others and received.dtype == wide else first.to(wide, copy=True)
    for piece in others:
        total += piece
    if divisor > 1:
        total /= divisor_like(total, divisor)
    return total.to(dtype)


def divide_in_place(total: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Divide a single piece in place, as `sum_ranks` does; `total` must have dtype `dtype` and no other reader."""
    return total.div_(divisor_like(total, divisor)) if divisor > 1 else total


@torch.library.custom_op("zgraph::sum_ranks", mutates_args=())
def sum_ranks(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Sum pieces of equal length in rank order, then divide; compiled forms must keep the order of summation.

    All uncompressed gradients are divided here, even if a backend has computed the sum (`world` is 1 then).

    Args:
        received: [world * n, ...] pieces of ranks 0, 1, ... one after the other.
        world: number of pieces.
        divisor: divisor of the sum; 1 for no division, or if another sum follows.
        dtype: dtype of the result.

    Returns:
        [n, ...] in `dtype`; summed in fp32 (fp64 for fp64 input).
    """
    return sum_pieces(received, world, divisor, dtype)


@sum_ranks.register_fake
def _(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    return received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)
