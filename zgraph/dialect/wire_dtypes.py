"""Dtypes in which gradients are sent and summed, and in which the means of gradients are sent back."""

from __future__ import annotations

import torch


def accumulate_dtype(wire: torch.dtype) -> torch.dtype:
    """Dtype of sums over ranks: fp64 if fp64 is sent, else fp32."""
    return torch.float64 if wire == torch.float64 else torch.float32


def wire_dtype_of(grad: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Dtype in which a gradient is sent: the requested dtype, unless that is wider than the gradient's.

    Receivers sum in fp32, so widening a gradient before it is sent changes no bit of the result.
    """
    if asked is None or asked.itemsize > grad.itemsize:
        return grad
    return asked


def mean_dtype_of(
    grad: torch.dtype, dtype: torch.dtype, wire_dtype: torch.dtype | None, asked: torch.dtype | None
) -> torch.dtype:
    """Dtype in which ranks gather a mean gradient of which each rank has computed a part.

    Choose the first that is given: `asked`, `wire_dtype`, `grad`. If the choice is not narrower than `dtype`, return
    `dtype`, because widening changes no bit.

    Args:
        grad: dtype of the unsharded gradient, before it is sent.
        dtype: dtype of the result.
        wire_dtype: dtype that the user requests for sent gradients; None for no request.
        asked: dtype that the user requests for the mean; None for no request.
    """
    found = asked or wire_dtype or grad
    return found if found.itemsize < dtype.itemsize else dtype
