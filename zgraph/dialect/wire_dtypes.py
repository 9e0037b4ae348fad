"""Which dtype gradients, their sums and their means have on the way."""

from __future__ import annotations

import torch


def accumulate_dtype(wire: torch.dtype) -> torch.dtype:
    """Sums over ranks run in fp32, or in fp64 when that is what travels."""
    return torch.float64 if wire == torch.float64 else torch.float32


def wire_dtype_of(grad: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype a gradient travels in: the one asked for, but never wider than it is.

    The sum is fp32 on arrival, so widening before the wire would send zeros and change no bit of the result.
    """
    if asked is None or asked.itemsize > grad.itemsize:
        return grad
    return asked


def mean_dtype_of(
    grad: torch.dtype, dtype: torch.dtype, wire_dtype: torch.dtype | None, asked: torch.dtype | None
) -> torch.dtype:
    """The dtype in which ranks gather a mean of which each has made a part.

    The one asked for, else the one in which gradients are asked to travel, else the gradient's own; never wider than
    the result, since widening changes no bit.

    Args:
        grad: of the whole gradient, before it travels.
        dtype: of the result.
        wire_dtype, asked: options of `zgraph.shard`.
    """
    found = asked or wire_dtype or grad
    return found if found.itemsize < dtype.itemsize else dtype
