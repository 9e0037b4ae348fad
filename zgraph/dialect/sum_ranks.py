"""The sum over ranks, in rank order: what every lowering must reproduce."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.dialect.wire_dtypes import accumulate_dtype


def divisor_beside(total: Tensor, divisor: int) -> Tensor:
    """The number of ranks as a tensor by which a sum is divided as IEEE says, on every device.

    On CUDA torch multiplies by the reciprocal of a number, and Inductor by that of a constant: another result for 3, 5,
    6, 7 ... ranks.
    """
    return torch.full((), divisor, dtype=total.dtype, device=total.device)


def sum_pieces(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """What `zgraph::sum_ranks` computes, by torch's own operators: one rank's piece after the other."""
    wide = accumulate_dtype(received.dtype)
    first, *others = received.unflatten(0, (world, -1))
    total = first + others.pop(0) if others and received.dtype == wide else first.to(wide, copy=True)
    for piece in others:
        total += piece
    if divisor > 1:
        total /= divisor_beside(total, divisor)
    return total.to(dtype)


@torch.library.custom_op("zgraph::sum_ranks", mutates_args=())
def sum_ranks(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Sum equal pieces in rank order and divide once: the order of summation that every lowering must reproduce.

    The one place that divides what ranks have sent as numbers, also where a backend has summed it: then a world of 1.

    Args:
        received: [world * n, ...] pieces of rank 0, 1, ... one after the other.
        world: number of ranks N.
        divisor: of the sum: how many ranks a mean is over; 1 where it is none, or where a further sum follows.
        dtype: of the result.

    Returns:
        [n, ...] in `dtype`; summed in fp32 (fp64 for fp64 input), divided once.
    """
    return sum_pieces(received, world, divisor, dtype)


@sum_ranks.register_fake
def _(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    return received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)
