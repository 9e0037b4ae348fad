"""The Triton kernels of Adam and AdamW with bf16 moments, bitwise equal to `zgraph.codegen.kernels.adam_reference`.

The step count, the loss scale and the overflow flag stay on the GPU, so that the host never waits. The first kernel
runs one program per parameter and computes the scalars of its update, in fp64. The second kernel makes one pass over
all elements, and reads and writes 20 bytes for each.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.triton.blocks import ENTRY, from_bf16, hash_32

POWER_BITS = tl.constexpr(adam_reference.POWER_BITS)
# 4-byte numbers per parameter: the fields of `Factors`, the key of random bits, whether the update is skipped.
FACTORS = tl.constexpr(16)
KEY = tl.constexpr(10)
SKIPPED = tl.constexpr(11)


@triton.jit
def number(entry, place: tl.constexpr):
    """Load the double whose bits are stored at index `place` of a table entry."""
    return tl.load(entry + place).to(tl.float64, bitcast=True)


@triton.jit
def value_at(entry, place: tl.constexpr, DTYPE: tl.constexpr):
    """Load the number whose address is stored at index `place` of a table entry."""
    return tl.load(tl.load(entry + place).to(tl.pointer_type(getattr(tl, DTYPE))))


@triton.jit
def power(base, exponent):
    """Return base ** exponent by repeated squaring, in the same order as `adam_reference.power`."""
    result = base * 0.0 + 1.0
    for bit in tl.static_range(POWER_BITS):
        result = tl.where(((exponent >> bit) & 1) == 1, result * base, result)
        base = base * base
    return result


@triton.jit
def store_factor(factors, place: tl.constexpr, value):
    tl.store(factors + place, value.to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def adam_factors(
    table, factors,
    LR: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Compute the scalars of each parameter's update, with one program per parameter.

    Args:
        table: [1 + parameters, ENTRY] int64. First row: lr, beta1, beta2, weight_decay and eps as doubles, and the
            addresses of the loss scale and of found_inf. Then a row for each parameter: the addresses of parameter,
            gradient, both moments and step count; the number of elements; the index of the first element in the
            unsharded parameter; the salt.
        factors: [parameters, FACTORS] int32, overwritten.
        LR: "number" if the table has the learning rate itself, or its dtype if the table has its address.
        SCALED: whether there is a loss scale.
        SKIPS: whether there is a found_inf.
        DECOUPLED, MAXIMIZE: as in `AdamOptions`.
    """
    member = tl.program_id(0).to(tl.int64)
    entry = table + (member + 1) * ENTRY
    factors += member * FACTORS
    lr = number(table, 0) if LR == "number" else value_at(table, 0, LR).to(tl.float64)
    beta1, beta2, weight_decay = number(table, 1), number(table, 2), number(table, 3)
    step = value_at(entry, 4, "float32").to(tl.int64)
    one = beta1 * 0.0 + 1.0
    store_factor(factors, 0, value_at(table, 5, "float32") if SCALED else one)
    store_factor(factors, 1, -one if MAXIMIZE else one)
    store_factor(factors, 2, one * 0.0 if DECOUPLED else weight_decay)
    store_factor(factors, 3, one - lr * weight_decay if DECOUPLED else one)
    store_factor(factors, 4, one - beta1)
    store_factor(factors, 5, beta2)
    store_factor(factors, 6, one - beta2)
    store_factor(factors, 7, tl.sqrt(one - power(beta2, step)))
    store_factor(factors, 8, number(table, 4))
    store_factor(factors, 9, -lr / (one - power(beta1, step)))
    key = hash_32(step.to(tl.uint32) * 0x9E3779B1 + tl.load(entry + 7).to(tl.uint32) * 0xC2B2AE3D + 1)
    tl.store(factors + KEY, key.to(tl.int32, bitcast=True))
    if SKIPS:
        tl.store(factors + SKIPPED, (value_at(table, 6, "float32") == 1).to(tl.int32))


@triton.jit
def factor(factors, place: tl.constexpr):
    return tl.load(factors + place).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x, random):
    """Round fp32 `x` stochastically to bf16, by 16 `random` bits; bf16 is returned as int16, and NaN stays NaN."""
    bits = (x.to(tl.uint32, bitcast=True) + random) >> 16
    return tl.where(x != x, 0x7FC0, bits).to(tl.int16)


@triton.jit
def adam(
    table, programs, factors,
    SCALED: tl.constexpr, SKIPS: tl.constexpr, COUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a parameter.

    Args:
        table: as for `adam_factors`.
        programs: [programs, 2] int32: index of each program's parameter, and index of its block in the parameter.
        factors: [parameters, FACTORS] int32, the result of `adam_factors`.
        SCALED: whether gradients are divided by a loss scale, in place.
        SKIPS: whether nothing is written if gradients have overflowed.
        COUPLED: whether weight decay is added to gradients.
        ALIGNED: whether all tensors begin at multiples of 16 bytes, and have multiples of 8 elements.
        BLOCK: number of elements per program.
    """
    programs += 2 * tl.program_id(0)
    member, run = tl.load(programs).to(tl.int64), tl.load(programs + 1).to(tl.int64)
    entry = table + (member + 1) * ENTRY
    factors += member * FACTORS
    parameter = tl.load(entry).to(tl.pointer_type(tl.float32))
    grad = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
    exp_avg = tl.load(entry + 2).to(tl.pointer_type(tl.int16))  # bf16
    exp_avg_sq = tl.load(entry + 3).to(tl.pointer_type(tl.int16))
    numel, first = tl.load(entry + 5), tl.load(entry + 6)
    if ALIGNED:
        parameter, grad = tl.multiple_of(parameter, 16), tl.multiple_of(grad, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
    if SKIPS:
        numel = tl.where(tl.load(factors + SKIPPED) == 0, numel, 0)
    if ALIGNED:
        numel = tl.multiple_of(numel, 8)
    at = run * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel  # no "&" here: Triton 3.9's interpreter does not accept masks combined with it

    used = tl.load(grad + at, mask=inside, other=0.0)
    if SCALED:
        used = tl.div_rn(used, factor(factors, 0))
        tl.store(grad + at, used, mask=inside)
    used = used * factor(factors, 1)
    value = tl.load(parameter + at, mask=inside, other=0.0)
    if COUPLED:
        used = used + value * factor(factors, 2)
    before = from_bf16(tl.load(exp_avg + at, mask=inside, other=0))
    average = before + (used - before) * factor(factors, 4)
    square = from_bf16(tl.load(exp_avg_sq + at, mask=inside, other=0)) * factor(factors, 5)
    square = square + used * used * factor(factors, 6)
    root = tl.div_rn(tl.sqrt_rn(square), factor(factors, 7)) + factor(factors, 8)
    value = value * factor(factors, 3) + tl.div_rn(average * factor(factors, 9), root)
    tl.store(parameter + at, value, mask=inside)
    random = hash_32((at + first).to(tl.uint32) ^ tl.load(factors + KEY).to(tl.uint32, bitcast=True))
    tl.store(exp_avg + at, rounded(average, random & 0xFFFF), mask=inside)
    tl.store(exp_avg_sq + at, rounded(square, random >> 16), mask=inside)
