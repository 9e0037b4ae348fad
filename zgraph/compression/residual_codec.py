"""8-bit encoding of error-feedback state: an int8 code for each element, and a bf16 scale for each group."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.compression.exact_arithmetic import fp32, reciprocal, round_product
from zgraph.compression.methods import SCALE_DTYPE

# Below this a group counts as zeros: the reciprocal of its largest magnitude might overflow.
TINY = 1e-30


def encode_error(error: Tensor, share: float = 0.0) -> tuple[Tensor, Tensor]:
    """Encode (1 - share) * error as int8 codes and a scale for each group, computed in fp32.

    Codes stay within 127, because rounding to bf16 changes a scale by at most 1/512 of its value.

    Args:
        error: [..., groups, group].
        share: weight of the old error. The factor 1 - share is part of the scales, not of the codes.

    Returns:
        Codes [..., groups, group] int8, and scales [..., groups] bf16.
    """
    largest = error.abs().amax(-1, keepdim=True)
    scale = torch.where(largest >= TINY, largest * fp32((1 - share) / 127), 0.0).to(SCALE_DTYPE)
    wide = scale.to(torch.float32)
    inverse = torch.where(wide > 0, reciprocal(wide) * fp32(1 - share), 0.0)
    codes = round_product(error, inverse)
    return torch.where(codes.isfinite(), codes, 0.0).to(torch.int8), scale.squeeze(-1)  # NaN has no int8 value


def decode_error(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode the codes and scales of `encode_error` to [..., groups, group] fp32."""
    return codes.to(torch.float32) * scale.unsqueeze(-1).to(torch.float32)
