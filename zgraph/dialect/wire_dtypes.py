"""Dtypes in which gradients are sent and summed, and in which their means are sent back."""

from __future__ import annotations

import torch


def accumulate_dtype(wire: torch.dtype) -> torch.dtype:
    """Dtype of sums over ranks: fp32, or fp64 if that is sent."""
    return torch.float64 if wire == torch.float64 else torch.float32


def wire_dtype_of(grad: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Dtype in which a gradient is sent: the requested one, but never wider than the gradient.

    The sum is fp32 on arrival, so widening before sending would add only zeros and change no bit of the result.
    """
    if asked is None or asked.itemsize > grad.itemsize:
        return grad
    return asked


def mean_dtype_of(
    grad: torch.dtype, dtype: torch.dtype, wire_dtype: torch.dtype | None, asked: torch.dtype | None
) -> torch.dtype:
    """Dtype in which ranks gather a mean when each has computed a part of it.

    The requested one, else the one requested for gradients, else the gradient's own; never wider than the result, since
    widening changes no bit.

    Args:
        grad: dtype of the unsharded gradient, before it is sent.
        dtype: dtype of the result.
        wire_dtype, asked: options of `zgraph.shard`.
    """
    found = asked or wire_dtype or grad
    return found if found.itemsize < dtype.itemsize else dtype
