"""How an error is kept in 8 bits: a code for each element, and a bf16 scale for each group."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.compression import SCALE_DTYPE

# Below this a group counts as zeros: the reciprocal of its largest magnitude might overflow.
TINY = 1e-30


def encode_error(error: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of errors in fp32.

    Args:
        error: [..., groups, group].

    Returns:
        [..., groups, group] int8; [..., groups] bf16.
    """
    largest = error.abs().amax(-1, keepdim=True)
    scale = torch.where(largest >= TINY, largest * torch.tensor(1 / 127, dtype=torch.float32), 0.0).to(SCALE_DTYPE)
    wide = scale.to(torch.float32)
    inverse = torch.where(wide > 0, 1.0 / torch.where(wide > 0, wide, 1.0), 0.0)
    codes = torch.floor(error * inverse + 0.5).clamp(-127, 127)
    return torch.where(codes.isfinite(), codes, 0.0).to(torch.int8), scale.squeeze(-1)  # a NaN has no int8


def decode_error(codes: Tensor, scale: Tensor) -> Tensor:
    """What `encode_error` has made, in fp32: [..., groups, group]."""
    return codes.to(torch.float32) * scale.unsqueeze(-1).to(torch.float32)
