"""State of `zgraph.AdamW8bit`: both moments of Adam in 8 bits an element, and the last 8 bits of 24-bit weights.

A row of a parameter with a multiple of 32 elements is cut into groups of 32. For each group, the state has a record of
32-bit words, in little-endian order:

    words    content
    8        first moment: 32 signed codes
    8        second moment: 32 unsigned codes
    8        bf16 weights only: 32 signed remainders
    1        the scales of the two moments, as bf16: lower half and upper half

So 2.125 bytes per element, or 3.125 with remainders. The scale s of a moment is the largest magnitude of its group,
rounded up. With a code c and its number of steps, n = 127 or 255,

    first moment  = s * (c / n) * |c / n|,        sqrt(second moment) = s * (c / n)^2.

Both have the same relative resolution as a code without square root near s, and a much finer one below: the smallest
nonzero magnitude is s / 16129 and s / 65025. The code of a positive second moment is at least 1, because Adam divides
by it.

A bf16 weight and its remainder r are the 24 most significant bits of an fp32 number: (weight << 8) + r as integers, so
the weight is that number rounded to nearest. The remainder of a weight that is zero, denormal or not finite counts as
zero.

Parameters with other rows (vectors such as biases, narrow matrices) have two or three words per element: both moments
in fp32, and for bf16 weights the last 16 bits of the fp32 number.

Codes of the second moment and 24-bit weights are rounded stochastically: a moment that decays by 0.999 would keep its
code if it were rounded to nearest, and a small update would be lost. First moments are rounded to nearest, because most
updates change them by more than a step, and random errors of theirs would go straight into the weights.

Sources: groups of 32, codes of a nonlinear function of both moments, and weights with a remainder: FlashOptim, arXiv
2602.23349; 8-bit moments: Dettmers et al. 2022, arXiv 2110.02861. Here the functions are square roots, scales are bf16
instead of fp16, which has no number below 6e-8, and second moments and weights are rounded stochastically.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # elements
WORDS = 17  # of a group; without remainders
WORDS_WITH_REMAINDERS = 25
FIRST_STEPS, SECOND_STEPS = 127, 255
DITHER_BITS = 12  # the lowest random bits, which round a second moment; the highest 8 round a weight
TINY_BITS = 0x0D800000  # 2^-100: moments of a group without a larger magnitude become zero
INF_BITS = 0x7F800000
NO_NUMBER = 0x7FC0  # a bf16 NaN


@dataclass(frozen=True)
class Unpacked:
    """A parameter's weights and moments: fp32, in the shape of the parameter."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def has_codes(shape: Sequence[int]) -> bool:
    """Return whether moments of a (local) parameter of this shape are stored as codes."""
    return len(shape) > 1 and math.prod(shape[1:]) % GROUP == 0 and 0 not in shape[1:]


def packed_shape(shape: Sequence[int], dtype: torch.dtype, *, codes: bool) -> tuple[int, ...]:
    """Return the shape of the int32 state of a parameter: [rows, words per row], or [..., words per element]."""
    is_half = dtype == torch.bfloat16
    if not codes:
        return (*shape, 3 if is_half else 2)
    return shape[0], math.prod(shape[1:]) // GROUP * (WORDS_WITH_REMAINDERS if is_half else WORDS)


def is_coded(weight: Tensor, packed: Tensor) -> bool:
    """Return whether a parameter's state consists of codes."""
    return weight.ndim > 1 and packed.ndim == 2


def unpack(weight: Tensor, packed: Tensor) -> Unpacked:
    """Return copies of the weights and moments that a parameter and its state stand for.

    Args:
        weight: fp32 or bf16.
        packed: state of this parameter, int32, contiguous.
    """
    is_half = weight.dtype == torch.bfloat16
    if not is_coded(weight, packed):
        exp_avg, exp_avg_sq = (packed[..., place].clone().view(torch.float32) for place in (0, 1))
        return Unpacked(_joined(weight, packed[..., 2], 16) if is_half else weight.clone(), exp_avg, exp_avg_sq)
    records = packed.reshape(-1, _words(weight)).contiguous().view(torch.uint8)
    first, second = records[:, :GROUP].view(torch.int8), records[:, GROUP : 2 * GROUP]
    scales = records[:, -4:].contiguous().view(torch.bfloat16).float()
    share = first.float() * (1 / torch.tensor(FIRST_STEPS))
    exp_avg = share * share.abs() * scales[:, :1]
    share = second.float() * (1 / torch.tensor(SECOND_STEPS))
    root = share * share * scales[:, 1:]
    whole = weight.clone()
    if is_half:
        whole = _joined(weight, records[:, 2 * GROUP : 3 * GROUP].view(torch.int8).reshape(weight.shape), 8)
    return Unpacked(whole, exp_avg.view(weight.shape), (root * root).view(weight.shape))


def pack_into(weight: Tensor, packed: Tensor, found: Unpacked, random: Tensor | None = None) -> None:
    """Store weights and moments in a parameter and its state.

    Args:
        weight: fp32 or bf16, contiguous; overwritten.
        packed: state of this parameter, int32, contiguous; overwritten.
        found: the values.
        random: 32 random bits per element, int64, for stochastic rounding; None: round everything to nearest.
    """
    is_half = weight.dtype == torch.bfloat16
    coded = is_coded(weight, packed)
    if random is None:
        random = torch.tensor(0x80 << 24 | 0x800, device=weight.device).expand(weight.shape)
    remainders = None
    if is_half:
        upper, remainders = _split(found.weight, random >> 24, 8) if coded else _split(found.weight, 0 * random, 16)
        weight.copy_(upper)
    else:
        weight.copy_(found.weight)
    if not coded:
        words = [found.exp_avg.contiguous().view(torch.int32), found.exp_avg_sq.contiguous().view(torch.int32)]
        packed.copy_(torch.stack([*words, *([] if remainders is None else [remainders.int()])], -1))
        return
    exp_avg, exp_avg_sq, random = (one.reshape(-1, GROUP) for one in (found.exp_avg, found.exp_avg_sq, random))
    first, first_scale = _codes(exp_avg.abs(), FIRST_STEPS, 0.5)
    root, dither = square_root(exp_avg_sq), (random & (1 << DITHER_BITS) - 1).float() * 2.0**-DITHER_BITS
    second, second_scale = _codes(root, SECOND_STEPS, dither)
    second = torch.where((root > 0) & (second < 1), 1.0, second)
    first = torch.where(exp_avg < 0, -first.int(), first.int())
    parts = [first.to(torch.int8).view(torch.uint8), second.int().to(torch.uint8)]
    if remainders is not None:
        parts.append(remainders.to(torch.int8).view(torch.uint8).reshape(-1, GROUP))
    scales = torch.stack([first_scale, second_scale], 1).to(torch.int16).view(torch.uint8)
    packed.copy_(torch.cat([*parts, scales], 1).view(torch.int32).view(packed.shape))


def square_root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots; torch's fp32 roots may be off by one bit."""
    return values.double().sqrt().float()


def _words(weight: Tensor) -> int:
    return WORDS_WITH_REMAINDERS if weight.dtype == torch.bfloat16 else WORDS


def _codes(magnitudes: Tensor, steps: int, dither: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return codes as fp32 [groups, GROUP], and the bits of their bf16 scales as int64 [groups]."""
    bits = magnitudes.contiguous().view(torch.int32).long().bitwise_and(0x7FFFFFFF).amax(1)
    scale_bits = torch.where(bits < TINY_BITS, 0, torch.where(bits < INF_BITS, (bits + 0xFFFF) >> 16, NO_NUMBER))
    scale = scale_bits.to(torch.int16).view(torch.bfloat16).float()
    inverse = torch.where(scale == 0, 0.0, 1 / scale)[:, None]
    codes = square_root(magnitudes * inverse) * steps + dither
    return torch.where(codes < steps, codes, steps).floor(), scale_bits


def _split(values: Tensor, random: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round fp32 values to 16 + `bits` bits; return them as bf16 and a signed remainder of `bits` bits."""
    kept = (values.contiguous().view(torch.int32).long().bitwise_and(0xFFFFFFFF) + random) >> (16 - bits)
    upper = (kept + (1 << bits >> 1)) >> bits
    remainder = torch.where(_has_remainder(upper), kept - (upper << bits), 0)
    is_number = ~values.isnan()
    upper = torch.where(is_number, upper, NO_NUMBER).to(torch.int16).view(torch.bfloat16)
    return upper, torch.where(is_number, remainder, 0)


def _has_remainder(upper: Tensor) -> Tensor:
    """Return for each bf16, given as an integer, whether it is a normal number: not zero, denormal, infinite or NaN."""
    return ((upper + 0x80) & 0x7F80) > 0x80


def _joined(weight: Tensor, remainder: Tensor, bits: int) -> Tensor:
    """Return the fp32 values that `_split` has rounded."""
    upper = weight.contiguous().view(torch.int16).int()
    remainder = torch.where(_has_remainder(upper), remainder.int(), 0)
    return ((upper << 16) + (remainder << (16 - bits))).view(torch.float32)
