"""Adam and AdamW with bf16 moments in plain PyTorch; the C++ and Triton kernels give bitwise equal results.

Values are fp32; every operation rounds separately, in the order in which it is written. Scalars shared by all elements
are computed the same way in fp64. Powers are computed by repeated squaring, because library functions differ between
machines. Parameters are updated with the moments before these are rounded. Moments are rounded stochastically:

    round(x) = the upper half of (bits of x + r),    r uniform in 0 ... 2^16 - 1

This is unbiased: the result is one of the two neighbours of x in bf16, each with a probability proportional to the
distance of x from the other neighbour. The random bits are a 32-bit hash of the element's position and the update's
number: the lower half is for the first moment, the upper half for the second.

Source: stochastic rounding for training in low precision, Gupta et al. 2015, arXiv 1502.02551, section 3; of optimizer
states in bf16, Zamirai et al. 2020, arXiv 2010.06192. Adam: Kingma and Ba 2015, arXiv 1412.6980; AdamW: Loshchilov and
Hutter 2019, arXiv 1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import NO_NUMBER, hash_32

_MASK = 0xFFFFFFFF
POWER_BITS = 32  # bits of an exponent


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """Options of `aten::_fused_adamw_`, and `decoupled`: True for AdamW, False for Adam."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    decoupled: bool
    maximize: bool

    def factors(self, step: float, grad_scale: float | None) -> Factors:
        """Return the scalars for update number `step` of one parameter."""
        return Factors(
            grad_scale=1.0 if grad_scale is None else grad_scale,
            sign=-1.0 if self.maximize else 1.0,
            coupled=0.0 if self.decoupled else self.weight_decay,
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            gain1=1 - self.beta1,
            beta2=self.beta2,
            gain2=1 - self.beta2,
            bias2=math.sqrt(1 - power(self.beta2, int(step))),
            eps=self.eps,
            step_size=-self.lr / (1 - power(self.beta1, int(step))),
        )


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Scalars of an update, as doubles; kernels round each to fp32."""

    grad_scale: float
    sign: float
    coupled: float
    decay: float
    gain1: float
    beta2: float
    gain2: float
    bias2: float
    eps: float
    step_size: float

    def values(self) -> tuple[float, ...]:
        """Return all scalars, in the order of `struct Factors` in adam.cpp."""
        return astuple(self)


def power(base: float, exponent: int) -> float:
    """Return base ** exponent by repeated squaring, with each product rounded to a double."""
    result = 1.0
    for bit in range(POWER_BITS):
        if exponent >> bit & 1:
            result *= base
        base *= base
    return result


def update_key(step: float, salt: int) -> int:
    """Return 32 bits that differ between updates and between parameters."""
    return hash_32((int(step) * 0x9E3779B1 + salt * 0xC2B2AE3D + 1) & _MASK)


def update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    salts: Sequence[int],
    firsts: Sequence[int],
    options: AdamOptions,
    grad_scale: float | None = None,
) -> None:
    """Update parameters and moments in place; if there is a loss scale, divide gradients by it in place."""
    members = zip(parameters, grads, exp_avgs, exp_avg_sqs, steps, salts, firsts, strict=True)
    for parameter, grad, exp_avg, exp_avg_sq, step, salt, first in members:
        by = options.factors(step, grad_scale)
        if grad_scale is not None:
            grad.div_(by.grad_scale)
        used = grad * by.sign + parameter * by.coupled if by.coupled else grad * by.sign
        decayed = parameter * by.decay
        average, square = exp_avg.float(), exp_avg_sq.float()
        average = average + (used - average) * by.gain1
        square = square * by.beta2 + used * used * by.gain2
        parameter.copy_(decayed + average * by.step_size / (root(square) / by.bias2 + by.eps))
        random = draw(parameter.shape, update_key(step, salt), first)
        exp_avg.copy_(round_stochastically(average, random & 0xFFFF))
        exp_avg_sq.copy_(round_stochastically(square, random >> 16))


def root(values: Tensor) -> Tensor:
    """Return correctly rounded square roots; torch's fp32 roots may be off by one bit."""
    return values.double().sqrt().float()


def draw(shape: Sequence[int], key: int, first: int) -> Tensor:
    """Return 32 random bits, as int64, for each element: a hash of `key` and the index in the unsharded parameter."""
    places = torch.arange(first, first + math.prod(shape), dtype=torch.int64) & _MASK
    return hash_32(places ^ key).view(tuple(shape))


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `values` to bf16, each by 16 random bits given as int64; NaN and inf are preserved."""
    bits = values.contiguous().view(torch.int32) + random.to(torch.int32)
    rounded = (bits >> 16).to(torch.int16)
    return rounded.masked_fill(values.isnan(), NO_NUMBER).view(torch.bfloat16)
