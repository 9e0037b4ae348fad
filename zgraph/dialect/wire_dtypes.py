"""Dtypes in which gradients are sent and summed, and in which mean gradients are gathered."""

from __future__ import annotations

import torch


def accumulate_dtype(wire: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over ranks: fp64 if fp64 is sent, else fp32."""
    return torch.float64 if wire == torch.float64 else torch.float32


def wire_dtype_of(grad: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a gradient is sent: `asked`, or the gradient's own dtype if this is narrower.

    Receivers sum in fp32, so widening a gradient before it is sent changes no bit of the result.
    """
    if asked is None or asked.itemsize > grad.itemsize:
        return grad
    return asked


def mean_dtype_of(
    grad: torch.dtype, dtype: torch.dtype, wire_dtype: torch.dtype | None, asked: torch.dtype | None
) -> torch.dtype:
    """Return the dtype in which ranks gather a mean gradient of which each rank has computed a part.

    The first of `asked`, `wire_dtype` and `grad` that is not None, if it is narrower than `dtype`. Otherwise `dtype`,
    because widening changes no bit.

    Args:
        grad: dtype of the unsharded gradient, before it is sent.
        dtype: dtype of the final gradient.
        wire_dtype: dtype that the user requests for sent gradients; None: no request.
        asked: dtype that the user requests for the mean; None: no request.
    """
    found = asked or wire_dtype or grad
    return found if found.itemsize < dtype.itemsize else dtype
