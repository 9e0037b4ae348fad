"""The Triton kernel that decodes a bucket: unpack, scale, rotate back, sum over the ranks, divide and store.

Each program finds a few groups of one gradient through two tables, and sums over the ranks in rank order, in registers.
All added products are exact, so multiply-adds may be fused.

Results are bitwise equal to `zgraph.codegen.kernels.reference`, whatever the launch options.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels.triton.blocks import (
    ENTRY,
    RUN,
    draw_signs,
    flip,
    for_all,
    from_bf16,
    hadamard,
    in_runs,
    in_stripes,
    narrowed,
    offsets,
    run_begins,
    sign_key,
    to_all,
    unite,
    widened,
)

SIGN_BIT = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["row_bytes", "ranks", "base", "first_rank", "divisor"])
def dequantize(
    table, programs, received, row_bytes: tl.int64, ranks, base, first_rank, divisor,
    CASE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Store the sums over ranks, or the values of each rank, of a few groups.

    Args:
        table: [tensors, ENTRY] int64: for each tensor, the address and the sizes of the output, and the offsets of the
            tensor's sections in the payload.
        programs: [programs, 2] int32: index of each program's tensor, and index of its run of groups in the chunk.
        received: [ranks, row_bytes] uint8.
        base: the part of the random signs' key that depends on step and salt.
        first_rank: rank that sent the first row.
        divisor: number by which the sums are divided if CASE.divides, else multiplied.
        CASE: DequantizeConstants.
        THREADS: threads of a program.
    """
    program = programs + 2 * tl.program_id(0).to(tl.int64)
    entry = table + ENTRY * tl.load(program).to(tl.int64)
    before = tl.load(program + 1).to(tl.int64) * (THREADS // CASE.places)  # earlier groups of the chunk
    if CASE.output == "bfloat16":
        output = tl.load(entry).to(tl.pointer_type(tl.int16))
    else:
        output = tl.load(entry).to(tl.pointer_type(getattr(tl, CASE.output)))
    length = tl.load(entry + 1)
    groups = tl.load(entry + 2)
    codes_at = tl.load(entry + 3)
    scales_at = tl.load(entry + 4)
    thread = tl.arange(0, THREADS)
    group, place = thread // CASE.places, thread % CASE.places  # the block of a thread
    left = tl.minimum(length - before * CASE.group, THREADS * CASE.stripes).to(tl.int32)  # elements left in the chunk
    real = group * CASE.group < left
    row = tl.program_id(1)  # row of the outputs: a stretch, or a rank
    stretch = row
    if CASE.each:
        stretch = 0
    first = tl.cast(stretch, tl.int64) * groups + before  # index of the first group among those of all stretches
    codes_at += first * CASE.code_bytes
    scales_at += 2 * first

    # -0.0, so that -0.0 + x is bitwise x for any x; tl.full would turn it into 0.0.
    total = tl.full([CASE.stripes * THREADS], SIGN_BIT, tl.int32).to(tl.float32, bitcast=True)
    begin, end = 0, ranks
    if CASE.each:
        begin, end = row, row + 1
    for sender in range(begin, end):
        from_row = tl.cast(sender, tl.int64) * row_bytes
        levels = read_levels(received, from_row + codes_at, group, place, real, CASE)
        scales = (received + (from_row + scales_at)).to(tl.pointer_type(tl.int16))
        scale = to_all(from_bf16(tl.load(scales + group, mask=real, other=0)), CASE.stripes)
        if CASE.rotate:
            signs = draw_signs(before * CASE.places + thread, sign_key(base, first_rank + sender), CASE.stripes)
            total += hadamard(levels) * flip(scale, signs, SIGN_BIT)
        else:
            total += levels * scale

    by = tl.cast(divisor, tl.float32)
    result = tl.div_rn(total, by) if CASE.divides else total * by
    store_values(output, row.to(tl.int64) * length + before * CASE.group, result, group, place, left, CASE)


@triton.jit
def read_levels(received, codes_at, group, place, real, CASE: tl.constexpr):
    """Load codes and return their levels c + b as [STRIPES * THREADS]."""
    ALIGNMENT: tl.constexpr = CASE.code_alignment
    codes = received + codes_at
    if CASE.code_bytes < RUN:
        codes = tl.multiple_of(codes, ALIGNMENT)
        at = offsets(group, place, CASE.code_bytes, CASE.code_runs, CASE.code_run, CASE.places)
        packed = tl.load(codes + at, mask=for_all(real, CASE.code_runs, CASE.code_run), other=0)
        packed = in_stripes(packed.to(tl.int32)) ^ CASE.signs
    else:
        words = tl.multiple_of(codes.to(tl.pointer_type(tl.int32)), ALIGNMENT)
        at = offsets(group, place, CASE.code_bytes // 4, CASE.code_runs, 2, CASE.places)
        packed = tl.load(words + at, mask=for_all(real, CASE.code_runs, 2), other=0)
        packed = packed ^ CASE.word_signs
        packed = packed[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]
        packed = in_stripes(tl.reshape(packed, [CASE.code_runs, group.shape[0], CASE.code_run]))
    if CASE.bits == 8:
        bits = code_bits(packed, 0, CASE.bits)
    elif CASE.bits == 4:
        bits = side_by_side(code_bits(packed, 0, CASE.bits), code_bits(packed, 1, CASE.bits))
    else:
        first = side_by_side(code_bits(packed, 0, CASE.bits), code_bits(packed, 1, CASE.bits))
        second = side_by_side(code_bits(packed, 2, CASE.bits), code_bits(packed, 3, CASE.bits))
        bits = side_by_side(first, second)
    # 2^22 + x has 2 x in its low bits: this turns a code into a number without a conversion instruction.
    return (bits | 0x4A800000).to(tl.float32, bitcast=True) - CASE.middle


@triton.jit
def code_bits(packed, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Return twice the code at position PLACE in the lowest byte of each word."""
    return (packed << 1 if PLACE == 0 else packed >> (PLACE * BITS - 1)) & ((2 << BITS) - 2)


@triton.jit
def side_by_side(first, second):
    return unite(first, second, 1, first.shape[0])


@triton.jit
def store_values(output, start, result, group, place, left, CASE: tl.constexpr):
    """Write up to `left` elements of `result` to `output`, from element `start` on; with CASE.accumulate, add them."""
    OUTPUT: tl.constexpr = CASE.output
    output += start
    at = offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)
    if CASE.aligned:
        begins = run_begins(group, place, CASE.group, CASE.runs, RUN, CASE.places)
        inside = tl.broadcast_to((begins < left)[:, :, None], [CASE.runs, group.shape[0], RUN])
        output = tl.multiple_of(output, 16)
    else:
        inside = at < left
    if CASE.accumulate:
        old = in_stripes(tl.load(output + at, mask=inside, other=0))
        result += old if OUTPUT == "float64" else widened(old, OUTPUT)
    tl.store(output + at, in_runs(narrowed(result, OUTPUT), CASE.runs, RUN), mask=inside)
