"""AdamW on packed state in plain PyTorch; the C++ and Triton kernels give bitwise equal results.

Values are fp32; every operation rounds separately, in the order in which it is written. Scalars shared by all elements
are computed the same way in fp64. Powers are computed by repeated squaring, because library functions differ between
machines. Weights are updated with the moments before these are rounded.

The random bits that round an element are a 32-bit hash of its new weight, its new first moment and the
update's number. So they depend on no position: results are the same on any number of ranks.

AdamW: Loshchilov and Hutter 2019, arXiv 1711.05101. Stochastic rounding of optimizer state: Zamirai et al. 2020, arXiv
2010.06192. Layout of the state: `zgraph.compression.packed_state`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from zgraph.codegen.kernels.reference import hash_32
from zgraph.compression.packed_state import Unpacked, pack_into, square_root, unpack

_MASK = 0xFFFFFFFF
POWER_BITS = 32  # bits of an exponent
MIXER = 0x9E3779B1  # odd; multiplies the bits of a moment


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """Options of `aten::_fused_adamw_`."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    eps: float
    maximize: bool

    def factors(self, step: float, grad_scale: float | None) -> Factors:
        """Return the scalars for update number `step` of one parameter."""
        return Factors(
            grad_scale=1.0 if grad_scale is None else grad_scale,
            sign=-1.0 if self.maximize else 1.0,
            decay=1 - self.lr * self.weight_decay,
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


def update_key(step: float) -> int:
    """Return 32 bits that differ between updates."""
    return hash_32((int(step) * MIXER + 1) & _MASK)


def update(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[float],
    options: AdamOptions,
    grad_scale: float | None = None,
) -> None:
    """Update parameters and states in place; if there is a loss scale, divide gradients by it in place."""
    for parameter, grad, state, step in zip(parameters, grads, states, steps, strict=True):
        by = options.factors(step, grad_scale)
        used = grad.float()
        if grad_scale is not None:
            used = used / by.grad_scale
            grad.copy_(used)
        used = used * by.sign
        before = unpack(parameter, state)
        average = before.exp_avg + (used - before.exp_avg) * by.gain1
        square = before.exp_avg_sq * by.beta2 + used * used * by.gain2
        value = before.weight * by.decay + average * by.step_size / (square_root(square) / by.bias2 + by.eps)
        pack_into(parameter, state, Unpacked(value, average, square), draw(value, average, update_key(step)))


def draw(value: Tensor, average: Tensor, key: int) -> Tensor:
    """Return 32 random bits, as int64, for each element."""
    bits, more = (one.contiguous().view(torch.int32).long() & _MASK for one in (value, average))
    return hash_32(((bits + more * MIXER) & _MASK) ^ key)
