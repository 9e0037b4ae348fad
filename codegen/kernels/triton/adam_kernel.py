"""The Triton kernels of AdamW on packed state, bitwise equal to `zgraph.codegen.kernels.adam_reference`.

The step count, the loss scale and the overflow flag stay on the GPU, so that the host never waits. The first kernel
runs one program per parameter and computes the scalars of its update, in fp64. The others make one pass over all
elements: `update_codes` of parameters whose state consists of codes, `update_words` of the rest.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.triton.blocks import ENTRY, from_bf16, hash_32, to_bf16
from zgraph.compression import packed_state

POWER_BITS = tl.constexpr(adam_reference.POWER_BITS)
MIXER = tl.constexpr(adam_reference.MIXER)
# 4-byte numbers per parameter: the fields of `Factors`, the key of random bits, whether the update is skipped.
FACTORS = tl.constexpr(16)
KEY = tl.constexpr(9)
SKIPPED = tl.constexpr(10)
GROUP = tl.constexpr(packed_state.GROUP)
WORDS = tl.constexpr(packed_state.WORDS)
WORDS_WITH_REMAINDERS = tl.constexpr(packed_state.WORDS_WITH_REMAINDERS)
TINY_BITS = tl.constexpr(packed_state.TINY_BITS)
INF_BITS = tl.constexpr(packed_state.INF_BITS)
NO_NUMBER = tl.constexpr(packed_state.NO_NUMBER)
# Of codes of the first and of the second moment: the largest, and its inverse.
FIRST_STEPS = tl.constexpr(float(packed_state.FIRST_STEPS))
FIRST_SHARE = tl.constexpr(1 / packed_state.FIRST_STEPS)
SECOND_STEPS = tl.constexpr(float(packed_state.SECOND_STEPS))
SECOND_SHARE = tl.constexpr(1 / packed_state.SECOND_STEPS)
DITHER = tl.constexpr(0.5**packed_state.DITHER_BITS)
DITHER_MASK = tl.constexpr((1 << packed_state.DITHER_BITS) - 1)


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
    LR: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Compute the scalars of each parameter's update, with one program per parameter.

    Args:
        table: [1 + parameters, ENTRY] int64. First row: lr, beta1, beta2, weight_decay and eps as doubles, and the
            addresses of the loss scale and of found_inf. Then a row for each parameter: the addresses of parameter,
            gradient, state and step count, and the number of elements.
        factors: [parameters, FACTORS] int32, overwritten.
        LR: "number" if the table has the learning rate itself, or its dtype if the table has its address.
        SCALED: whether there is a loss scale.
        SKIPS: whether there is a found_inf.
        MAXIMIZE: as in `AdamOptions`.
    """
    member = tl.program_id(0).to(tl.int64)
    entry = table + (member + 1) * ENTRY
    factors += member * FACTORS
    lr = number(table, 0) if LR == "number" else value_at(table, 0, LR).to(tl.float64)
    beta1, beta2, weight_decay = number(table, 1), number(table, 2), number(table, 3)
    step = value_at(entry, 3, "float32").to(tl.int64)
    one = beta1 * 0.0 + 1.0
    store_factor(factors, 0, value_at(table, 5, "float32") if SCALED else one)
    store_factor(factors, 1, -one if MAXIMIZE else one)
    store_factor(factors, 2, one - lr * weight_decay)
    store_factor(factors, 3, one - beta1)
    store_factor(factors, 4, beta2)
    store_factor(factors, 5, one - beta2)
    store_factor(factors, 6, tl.sqrt(one - power(beta2, step)))
    store_factor(factors, 7, number(table, 4))
    store_factor(factors, 8, -lr / (one - power(beta1, step)))
    key = hash_32(step.to(tl.uint32) * MIXER + 1)
    tl.store(factors + KEY, key.to(tl.int32, bitcast=True))
    if SKIPS:
        tl.store(factors + SKIPPED, (value_at(table, 6, "float32") == 1).to(tl.int32))


@triton.jit
def factor(factors, place: tl.constexpr):
    return tl.load(factors + place).to(tl.float32, bitcast=True)


@triton.jit
def gradients(entry, factors, at, inside, HALF: tl.constexpr, SCALED: tl.constexpr):
    """Read gradients as fp32; if SCALED, divide them by the loss scale, in place."""
    grad = tl.load(entry + 1).to(tl.pointer_type(tl.int16 if HALF else tl.float32))
    given = tl.load(grad + at, mask=inside, other=0)
    used = from_bf16(given) if HALF else given
    if SCALED:
        used = tl.div_rn(used, factor(factors, 0))
        tl.store(grad + at, to_bf16(used) if HALF else used, mask=inside)
    return used * factor(factors, 1)


@triton.jit
def joined(upper, remainder, BITS: tl.constexpr):
    """Return fp32 weights from bf16 weights, given as int16, and int32 remainders of BITS bits."""
    upper = upper.to(tl.int32)
    remainder = tl.where(((upper + 0x80) & 0x7F80) > 0x80, remainder, 0)  # of normal numbers
    return ((upper << 16) + (remainder << (16 - BITS))).to(tl.float32, bitcast=True)


@triton.jit
def split(value, random, BITS: tl.constexpr):
    """Round fp32 weights to 16 + BITS bits, and return (bf16 as int16, remainder of BITS bits as int32)."""
    bits = value.to(tl.uint32, bitcast=True)
    kept = ((bits.to(tl.uint64) + random.to(tl.uint64)) >> (16 - BITS)).to(tl.int32)
    upper = ((kept.to(tl.int64) & 0xFFFFFFFF) + (1 << BITS >> 1) >> BITS).to(tl.int32)
    remainder = tl.where(((upper + 0x80) & 0x7F80) > 0x80, kept - (upper << BITS), 0)
    return tl.where(value == value, upper, NO_NUMBER).to(tl.int16), tl.where(value == value, remainder, 0)


@triton.jit
def updated(value, used, average, square, factors):
    """Return new values of weights and first moments, and of second moments with their roots."""
    average = average + (used - average) * factor(factors, 3)
    square = square * factor(factors, 4) + used * used * factor(factors, 5)
    root = tl.sqrt_rn(square)
    divisor = tl.div_rn(root, factor(factors, 6)) + factor(factors, 7)
    return value * factor(factors, 2) + tl.div_rn(average * factor(factors, 8), divisor), average, square, root


@triton.jit
def scale_of(magnitudes):
    """Return the bf16 scale of each group as int32 bits [groups, 1], and its inverse as fp32, 0 for a scale of 0."""
    largest = tl.max(magnitudes.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None]
    rounded = tl.where(largest < INF_BITS, (largest + 0xFFFF) >> 16, NO_NUMBER)
    bits = tl.where(largest < TINY_BITS, 0, rounded)
    scale = tl.where(bits == 0, 1.0, (bits << 16).to(tl.float32, bitcast=True))
    return bits, tl.where(bits == 0, 0.0, tl.div_rn(1.0, scale))


@triton.jit
def codes(magnitudes, inverse, dither, STEPS: tl.constexpr):
    """Return codes of scaled magnitudes as fp32 numbers; the next lower integers are the codes."""
    found = tl.sqrt_rn(magnitudes * inverse) * STEPS + dither
    return tl.where(found < STEPS, found, STEPS)


@triton.jit
def update_codes(
    table, programs, factors,
    HALF: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a parameter whose state consists of codes.

    Args:
        table: as for `adam_factors`; the second row is that of the first parameter in `programs`.
        programs: [programs, 2] int32: index of each program's parameter, and index of its block in the parameter.
        factors: [parameters, FACTORS] int32, the result of `adam_factors`.
        HALF: whether parameters and gradients are bf16.
        SCALED: whether gradients are divided by a loss scale, in place.
        SKIPS: whether nothing is written if gradients have overflowed.
        BLOCK: number of elements per program.
    """
    programs += 2 * tl.program_id(0)
    member, run = tl.load(programs).to(tl.int64), tl.load(programs + 1).to(tl.int64)
    entry = table + (member + 1) * ENTRY
    factors += member * FACTORS
    parameter = tl.load(entry).to(tl.pointer_type(tl.int16 if HALF else tl.float32))
    state = tl.load(entry + 2).to(tl.pointer_type(tl.int8))
    words: tl.constexpr = WORDS_WITH_REMAINDERS if HALF else WORDS
    groups = tl.load(entry + 4) // GROUP
    if SKIPS:
        groups = tl.where(tl.load(factors + SKIPPED) == 0, groups, 0)
    group = run * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
    lane = tl.arange(0, GROUP)[None, :]
    at, record = group * GROUP + lane, state + group * (4 * words)
    inside = (group < groups) & (lane < GROUP)
    scales = (record + 4 * words - 4).to(tl.pointer_type(tl.int16))

    used = gradients(entry, factors, at, inside, HALF, SCALED)
    value = tl.load(parameter + at, mask=inside, other=0)
    if HALF:
        value = joined(value, tl.load(record + 2 * GROUP + lane, mask=inside, other=0).to(tl.int32), 8)
    first = tl.load(record + lane, mask=inside, other=0).to(tl.float32) * FIRST_SHARE
    second = tl.load(record + GROUP + lane, mask=inside, other=0).to(tl.uint8, bitcast=True)
    second = second.to(tl.int32).to(tl.float32) * SECOND_SHARE
    average = first * tl.abs(first) * from_bf16(tl.load(scales, mask=group < groups, other=0))
    root = second * second * from_bf16(tl.load(scales + 1, mask=group < groups, other=0))
    value, average, _, root = updated(value, used, average, root * root, factors)

    random = value.to(tl.uint32, bitcast=True) + average.to(tl.uint32, bitcast=True) * MIXER
    random = hash_32(random ^ tl.load(factors + KEY).to(tl.uint32, bitcast=True))
    first_bits, inverse = scale_of(average)
    first = codes(tl.abs(average), inverse, 0.5, FIRST_STEPS).to(tl.int32)
    tl.store(record + lane, tl.where(average < 0, -first, first).to(tl.int8), mask=inside)
    second_bits, inverse = scale_of(root)
    dither = (random & DITHER_MASK).to(tl.int32).to(tl.float32) * DITHER
    second = codes(root, inverse, dither, SECOND_STEPS).to(tl.int32)
    second = tl.where((root > 0) & (second < 1), 1, second)
    tl.store(record + GROUP + lane, second.to(tl.uint8).to(tl.int8, bitcast=True), mask=inside)
    tl.store(scales, first_bits.to(tl.int16), mask=group < groups)
    tl.store(scales + 1, second_bits.to(tl.int16), mask=group < groups)
    if HALF:
        value, remainder = split(value, random >> 24, 8)
        tl.store(record + 2 * GROUP + lane, remainder.to(tl.int8), mask=inside)
    tl.store(parameter + at, value, mask=inside)


@triton.jit
def update_words(
    table, programs, factors,
    HALF: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a parameter whose state has two or three words per element; see `update_codes`."""
    programs += 2 * tl.program_id(0)
    member, run = tl.load(programs).to(tl.int64), tl.load(programs + 1).to(tl.int64)
    entry = table + (member + 1) * ENTRY
    factors += member * FACTORS
    parameter = tl.load(entry).to(tl.pointer_type(tl.int16 if HALF else tl.float32))
    state = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    numel = tl.load(entry + 4)
    if SKIPS:
        numel = tl.where(tl.load(factors + SKIPPED) == 0, numel, 0)
    at = run * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    record = state + at * (3 if HALF else 2)

    used = gradients(entry, factors, at, inside, HALF, SCALED)
    value = tl.load(parameter + at, mask=inside, other=0)
    if HALF:
        value = joined(value, tl.load(record + 2, mask=inside, other=0), 16)
    average = tl.load(record, mask=inside, other=0).to(tl.float32, bitcast=True)
    square = tl.load(record + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
    value, average, square, _ = updated(value, used, average, square, factors)
    tl.store(record, average.to(tl.int32, bitcast=True), mask=inside)
    tl.store(record + 1, square.to(tl.int32, bitcast=True), mask=inside)
    if HALF:
        value, remainder = split(value, used.to(tl.uint32, bitcast=True) * 0, 16)
        tl.store(record + 2, remainder, mask=inside)
    tl.store(parameter + at, value, mask=inside)
