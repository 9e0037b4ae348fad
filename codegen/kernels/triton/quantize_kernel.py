"""The Triton kernel that quantizes a bucket: add the error, rotate, quantize, pack, and store the new error.

Each program processes a few groups of one gradient, which it finds through two tables. Gradients are read in place, and
codes and scales are written directly to the payload, without temporary buffers.

Results are bitwise equal to `zgraph.codegen.kernels.reference`, whatever the launch options.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton.blocks import (
    ENTRY,
    ROUNDER,
    RUN,
    TINY,
    draw_signs,
    exact_dot,
    flip,
    for_all,
    from_bf16,
    group_largest,
    hadamard,
    halves,
    in_runs,
    in_stripes,
    low_bits,
    number_to_bf16,
    offsets,
    ordered_sum,
    reciprocal,
    run_begins,
    to_all,
    widened,
)

HUGE_BITS = tl.constexpr(reference.HUGE_BITS)
NO_NUMBER = tl.constexpr(reference.NO_NUMBER)
SIGN_BIT = tl.constexpr(-(2**31))
# Adding LOW_HALF gives a number near 2^22 whose low bits are twice the 16 bits of four codes, each plus 8. HIGH_HALF
# does the same for the upper half, and cancels the exponent bits of the lower one, which are shifted along with it.
LOW_HALF = tl.constexpr(4227071.5)
HIGH_HALF = tl.constexpr(4227071.5 + 65536 - 0x2540)


@triton.jit(do_not_specialize=["payload_bytes", "key", "sign_bit"])
def quantize(
    table, programs, payload, payload_bytes: tl.int64, key, sign_bit, CASE: tl.constexpr, THREADS: tl.constexpr
):
    """Store the codes, scales and new errors of a few groups.

    Args:
        table: [tensors, ENTRY] int64: for each tensor, the addresses of gradient, error and error scales; the sizes;
            the offsets of the tensor's sections in the payload.
        programs: [programs, 2] int32: index of each program's tensor, and index of its run of groups in the chunk.
        payload: [world, payload_bytes] uint8.
        key: key of the random signs.
        sign_bit: the sign bit of an fp32 number.
        CASE: QuantizeConstants.
        THREADS: threads of a program.
    """
    program = programs + 2 * tl.program_id(0).to(tl.int64)
    entry = table + ENTRY * tl.load(program).to(tl.int64)
    before = tl.load(program + 1).to(tl.int64) * (THREADS // CASE.places)  # earlier groups of the chunk
    grad = tl.load(entry).to(tl.pointer_type(getattr(tl, CASE.grad)))
    numel = tl.load(entry + 3)
    length = tl.load(entry + 4)
    groups = tl.load(entry + 5)
    codes_at = tl.load(entry + 6)
    scales_at = tl.load(entry + 7)
    thread = tl.arange(0, THREADS)
    group, place = thread // CASE.places, thread % CASE.places  # the block of a thread
    to, stretch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    chunk = stretch * tl.num_programs(1) + to
    first = chunk * groups + before  # index of the first group among those of all chunks

    # The last group of a chunk, and the elements that a gradient lacks in its last chunks, are filled with zeros.
    left = tl.minimum(length - before * CASE.group, THREADS * CASE.stripes).to(tl.int32)  # elements left in the chunk
    real = group * CASE.group < left
    start = chunk * length + before * CASE.group
    present = tl.minimum(tl.maximum(numel - start, 0), THREADS * CASE.stripes).to(tl.int32)
    compensated = read_gradient(grad, start, group, place, tl.minimum(left, present), CASE)
    kept, error, error_scale = compensated, entry, entry
    if CASE.error != "none":
        ALIGNMENT: tl.constexpr = CASE.error_alignment
        error = tl.load(entry + 1).to(tl.pointer_type(getattr(tl, CASE.error)))
        error = tl.multiple_of(error + first * CASE.group, ALIGNMENT)
    if CASE.error == "int8":
        error_scale = tl.load(entry + 2).to(tl.pointer_type(tl.int16)) + first
        compensated, kept = add_error(compensated, error, error_scale, group, place, real, CASE)
    elif CASE.error != "none":
        at = offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)
        kept = in_stripes(tl.load(error + at, mask=for_all(real, CASE.runs, RUN)))
        compensated += kept

    rotated = compensated
    if CASE.rotate:
        signs = draw_signs(before * CASE.places + thread, key.to(tl.uint32), CASE.stripes)
        rotated = hadamard(flip(compensated, signs, SIGN_BIT))
    largest = group_largest(rotated, CASE.stripe_halvings, CASE.places)
    finite = largest.to(tl.int32, bitcast=True) < HUGE_BITS
    used = finite & (largest >= TINY)
    inverse = tl.where(used, reciprocal(largest) * CASE.top, 0.0)
    levels, over, under = best_levels(tl.fma(rotated, to_all(inverse, CASE.stripes), ROUNDER), CASE)
    scale = tl.where(used, over * reciprocal(under) * (largest * CASE.unit), 0.0)
    scale = tl.where(finite, number_to_bf16(scale), NO_NUMBER).to(tl.int16)

    code_at = to * payload_bytes + codes_at + (stretch * groups + before) * CASE.code_bytes
    store_codes(payload, code_at, levels, finite, group, place, real, CASE)
    scales = (payload + (to * payload_bytes + scales_at)).to(tl.pointer_type(tl.int16))
    scales += stretch * groups + before
    tl.store(scales + group, scale, mask=real & (place == 0))

    if CASE.error != "none":
        if CASE.rotate:
            # As an argument, `sign_bit` stops the compiler from keeping all signs in registers after their first use.
            sent = hadamard(levels) * flip(to_all(from_bf16(scale), CASE.stripes), signs, sign_bit)
        else:
            sent = levels * to_all(from_bf16(scale), CASE.stripes)
        keep = real & finite  # a group that is not finite keeps its error
        if CASE.error == "int8":
            keep_codes(kept - sent, error, error_scale, group, place, keep, CASE)
        else:
            new = CASE.residual_decay * kept + CASE.residual_gain * (compensated - sent)
            at = offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)
            tl.store(error + at, in_runs(new, CASE.runs, RUN), mask=for_all(keep, CASE.runs, RUN))


@triton.jit
def read_gradient(grad, start, group, place, left, CASE: tl.constexpr):
    """Load up to `left` elements of `grad` from element `start` on as fp32, followed by zeros."""
    GRAD: tl.constexpr = CASE.grad
    grad += start
    at = offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)
    if CASE.aligned:
        begins = run_begins(group, place, CASE.group, CASE.runs, RUN, CASE.places)
        inside = tl.broadcast_to((begins < left)[:, :, None], [CASE.runs, group.shape[0], RUN])
        grad = tl.multiple_of(grad, 16)
    else:
        inside = at < left
    return widened(in_stripes(tl.load(grad + at, mask=inside, other=0.0)), GRAD)


@triton.jit
def add_error(compensated, error, error_scale, group, place, real, CASE: tl.constexpr):
    """Add the old int8 error to `compensated`; return the sum, and the sum plus old_factor * the old error."""
    ALIGNMENT: tl.constexpr = CASE.error_alignment
    words = tl.multiple_of(error.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    words += offsets(group, place, CASE.group // 4, CASE.runs, 2, CASE.places)
    words = tl.load(words, mask=for_all(real, CASE.runs, 2))
    byte = (8 * tl.arange(0, 4))[None, None, None, :]
    old = (words[:, :, :, None] << (24 - byte)) >> 24  # with sign extension
    old = in_stripes(tl.reshape(old, [CASE.runs, group.shape[0], RUN])).to(tl.float32)
    scale = from_bf16(tl.load(error_scale + group, mask=real, other=0))
    wide, factor = to_all(scale, CASE.stripes), to_all(scale * CASE.old_factor, CASE.stripes)
    if CASE.contracts:  # the same bits with fewer instructions
        compensated = tl.fma(old, wide, compensated)
        kept = tl.fma(old, factor, compensated)
    else:
        compensated += old * wide
        kept = compensated + old * factor
    return compensated, kept


@triton.jit
def best_levels(grid, CASE: tl.constexpr):
    """Return the levels c + b for the integers u = grid - ROUNDER, and two sums whose ratio gives the scale."""
    unit = grid - ROUNDER
    levels = levels_of(unit, grid, 0, CASE)
    along = group_dot(unit, levels, CASE)
    square = along
    if len(CASE.slopes) > 1 or not CASE.unbiased:
        square = group_dot(levels, levels, CASE)
    for clip in tl.static_range(1, len(CASE.slopes)):
        other = levels_of(unit, grid, clip, CASE)
        other_along, other_square = group_dot(unit, other, CASE), group_dot(other, other, CASE)
        better = other_along * other_along * square > along * along * other_square
        levels = tl.where(to_all(better.to(tl.int1), CASE.stripes), other, levels)
        along, square = tl.where(better, other_along, along), tl.where(better, other_square, square)
    if CASE.unbiased:
        over, under = group_dot(unit, unit, CASE), along
    else:
        over, under = along, square
    return levels, over, under


@triton.jit
def levels_of(unit, grid, CLIP: tl.constexpr, CASE: tl.constexpr):
    """Return levels c + b at one clipping level, given the integers u as `unit`, and u + ROUNDER as `grid`."""
    if CASE.rotate:
        if CASE.clipped[CLIP]:
            share = tl.clamp(tl.fma(unit, CASE.slopes[CLIP], 0.5), 0.0, 1.0)  # of the interval from clip to clip
            grid = tl.fma(share, CASE.intervals, ROUNDER)
        floors = (grid.to(tl.int32, bitcast=True) & -CASE.step).to(tl.float32, bitcast=True)
        levels = tl.fma(floors, 1 / CASE.step, CASE.begins[CLIP])
    else:
        levels = tl.clamp(tl.fma(unit, CASE.slopes[CLIP], ROUNDER) - ROUNDER, CASE.low, CASE.high)
    return levels


@triton.jit
def group_dot(x, y, CASE: tl.constexpr):
    """Return the sum of the products x * y over each group."""
    if CASE.exact_sums:
        total = exact_dot(x, y, CASE.stripe_halvings, CASE.places)
    else:
        total = ordered_sum(x * y, CASE.stripe_halvings, CASE.place_halvings)
    return total


@triton.jit
def store_codes(payload, code_at, levels, finite, group, place, real, CASE: tl.constexpr):
    """Store levels [STRIPES * THREADS] as packed codes, or 0 for groups that are not finite."""
    ALIGNMENT: tl.constexpr = CASE.code_alignment
    codes = payload + code_at
    if CASE.bits == 4 and CASE.rotate:
        packed = four_bit_words(levels)
        packed = tl.where(to_all(finite, 4), packed, 0)
        words = tl.multiple_of(codes.to(tl.pointer_type(tl.int32)), 16)
        at = offsets(group, place, CASE.code_bytes // 4, 2, 2, CASE.places)
        tl.store(words + at, in_runs(packed, 2, 2), mask=for_all(real, 2, 2))
    else:
        kept = tl.where(finite, (1 << CASE.bits) - 1, 0)  # LLVM would make selected codes bytes, and widen them again
        packed = low_bits(levels - CASE.after) & to_all(kept, CASE.stripes)
        if CASE.bits == 4:
            first, second = halves(packed, 1, packed.shape[0] // 2)
            packed = first | (second << 4)
        if CASE.bits == 2:
            first, second = halves(packed, 1, packed.shape[0] // 2)
            first, second = halves(first | (second << 4), 1, first.shape[0] // 2)
            packed = first | (second << 2)
        packed = in_runs(packed.to(tl.uint8), CASE.code_runs, CASE.code_run)
        codes = tl.multiple_of(codes, ALIGNMENT)
        at = offsets(group, place, CASE.code_bytes, CASE.code_runs, CASE.code_run, CASE.places)
        tl.store(codes + at, packed, mask=for_all(real, CASE.code_runs, CASE.code_run))


@triton.jit
def four_bit_words(levels):
    """Pack levels of 4-bit codes into words of four bytes: [32 * THREADS] -> [4 * THREADS].

    Fused multiply-adds combine four codes into 16 bits; two such halves make a word.
    """
    low, high = halves(levels, 1, levels.shape[0] // 2)
    bytes_of_two = tl.fma(high, 16.0, low)
    low, high = halves(bytes_of_two, 8, levels.shape[0] // 32)
    shorts = tl.fma(high, 256.0, low)
    low, high = halves(shorts, 4, levels.shape[0] // 32)
    low = (low + LOW_HALF).to(tl.int32, bitcast=True)
    high = (high + HIGH_HALF).to(tl.int32, bitcast=True)
    return ((high << 15) + (low >> 1)) ^ -0x77777778


@triton.jit
def keep_codes(new, error, error_scale, group, place, keep, CASE: tl.constexpr):
    """Store the new error, residual_gain * `new`, as int8 codes and scales."""
    largest = group_largest(new, CASE.stripe_halvings, CASE.places)
    scale = number_to_bf16(tl.where(largest >= TINY, largest * CASE.error_unit, 0.0))
    wide = from_bf16(scale)
    inverse = tl.where(wide > 0, reciprocal(wide) * CASE.residual_gain, 0.0)
    codes = tl.fma(new, to_all(inverse, CASE.stripes), ROUNDER).to(tl.int32, bitcast=True)
    tl.store(error_scale + group, scale, mask=keep & (place == 0))
    at = offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)
    tl.store(error + at, in_runs(codes, CASE.runs, RUN).to(tl.int8), mask=for_all(keep, CASE.runs, RUN))
