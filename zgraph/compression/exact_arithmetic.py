"""fp32 arithmetic with the same bits on every processor and in all compression kernels."""

from __future__ import annotations

import torch
from torch import Tensor

RECIPROCAL = 0x7EF311C3  # this minus the bits of x is within 12 % of 1 / x
NEWTON_STEPS = 3  # each squares the relative error


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def round_product(values: Tensor, by: Tensor | float) -> Tensor:
    """Return `values * by`, rounded once to the nearest integer, ties to even, as fp32; -0.0 becomes 0.0."""
    wide = by.double() if isinstance(by, Tensor) else by
    return torch.round(values.double() * wide).to(torch.float32) + 0.0


def reciprocal(values: Tensor) -> Tensor:
    """Compute 1 / x within a few units in the last place, for positive x that is neither tiny nor huge.

    Newton's method improves r to r (2 - x r), where 2 - x r is rounded once. It gives the same bits on all processors,
    and costs a fraction of a division on a GPU.
    """
    found = (RECIPROCAL - values.view(torch.int32)).view(torch.float32)
    for _ in range(NEWTON_STEPS):
        found = found * (2.0 - values.double() * found.double()).to(torch.float32)
    return found
