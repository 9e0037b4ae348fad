"""Functions shared by the Triton compression kernels: layout of groups in a program, and reproducible arithmetic.

Checked with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0 (of torch 2.11, 2.13, 2.14 and 2.15):

- `enable_fp_fusion=False`, given at launch, keeps a multiplication and an addition separate: LLVM writes mul.rn and
  add.rn, which ptxas does not contract, and ptxas gets --fmad=false. Both keep denormals. Kernels in which all added
  products are exact allow contraction, which then does not change results.
- `/` compiles to div.full, which is off by up to two units in the last place; `tl.div_rn` is IEEE's division.
- Triton's interpreter rounds to bfloat16 wrongly, so kernels read and write bfloat16 as integers, rounded to nearest
  even. A NaN becomes 0x7FC0, where cvt.rn.bf16 gives 0x7FFF.
- `tl.sum` adds in an unspecified order, so kernels use it only for two numbers, or numbers whose sum is exact.
- `tl.full` turns -0.0 into 0.0.
- `tl.clamp` between 0 and 1 costs nothing: ptxas saturates the operation before it.

Layout of a group in a program: each thread owns a block (see `reference.to_blocks`), so that the elements mixed by a
rotation, and the first additions of a sum, stay in its registers. Memory is accessed as [runs, THREADS, RUN]: each
thread reads or writes runs of 8 elements. Inside a kernel, values are *in stripes*: [elements of a block, THREADS],
flattened, with one column for each thread. Converting between the two layouts moves no value to another thread.

Kernels do not depend on the number or sizes of a bucket's gradients: one table in device memory has the address of each
gradient, and a second one assigns programs to gradients (`zgraph.codegen.kernels.triton.tables`).

CASE has the constants that a kernel is compiled for, see `zgraph.codegen.kernels.triton.constants`.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton import tables
from zgraph.compression import exact_arithmetic, residual_codec

RUN = tl.constexpr(reference.RUN)
ENTRY = tl.constexpr(tables.ENTRY)
TINY = tl.constexpr(residual_codec.TINY)
NEWTON_STEPS = tl.constexpr(exact_arithmetic.NEWTON_STEPS)
RECIPROCAL = tl.constexpr(exact_arithmetic.RECIPROCAL)
# Adding ROUNDER rounds to an integer, which is then in the low bits of the sum. Conversion instructions run at a
# quarter to an eighth of the rate of additions.
ROUNDER = tl.constexpr(1.5 * 2**23)


# --- numbers --------------------------------------------------------------------------------------------------------


@triton.jit
def low_bits(x):
    """Convert an fp32 value that is an integer to int32; only the low bits of the result are valid."""
    return (x + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def reciprocal(x):
    """Compute 1 / x by Newton's method, bitwise equal to `zgraph.compression.exact_arithmetic.reciprocal`."""
    found = (-x.to(tl.int32, bitcast=True) + RECIPROCAL).to(tl.float32, bitcast=True)
    for _ in tl.static_range(NEWTON_STEPS):
        found = found * tl.fma(-x, found, 2.0)
    return found


@triton.jit
def from_bf16(bits):
    """Convert bf16, given as int16, to fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bf16(x):
    """Round fp32 to the nearest bf16, ties to even, returned as int16."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def number_to_bf16(x):
    """Round fp32 to bf16 like `to_bf16`, but only for values that are not NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def widened(x, DTYPE: tl.constexpr):
    """Convert values of the named dtype to fp32; bf16 values may be given as int16."""
    return from_bf16(x.to(tl.int16, bitcast=True)) if DTYPE == "bfloat16" else x.to(tl.float32)


@triton.jit
def narrowed(x, DTYPE: tl.constexpr):
    """Convert fp32 or fp64 values to the named dtype; bf16 values are returned as int16."""
    return to_bf16(x) if DTYPE == "bfloat16" else x.to(getattr(tl, DTYPE))


# --- places ---------------------------------------------------------------------------------------------------------


@triton.jit
def halves(x, MANY: tl.constexpr, SIZE: tl.constexpr):
    """Split each of MANY consecutive parts into halves: [MANY * 2 * SIZE] -> two tensors [MANY * SIZE]."""
    pairs = tl.permute(tl.reshape(x, [MANY, 2, SIZE]), (0, 2, 1))
    return tl.split(tl.reshape(pairs, [MANY * SIZE, 2]))


@triton.jit
def unite(first, second, MANY: tl.constexpr, SIZE: tl.constexpr):
    """Undo `halves`."""
    pairs = tl.reshape(tl.join(first, second), [MANY, SIZE, 2])
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), [2 * MANY * SIZE])


@triton.jit
def in_stripes(x):
    """Rearrange runs into stripes, one column per thread: [runs, THREADS, run] -> [runs * run * THREADS]."""
    return tl.reshape(tl.permute(x, (0, 2, 1)), [x.shape[0] * x.shape[1] * x.shape[2]])


@triton.jit
def in_runs(x, RUNS: tl.constexpr, SIZE: tl.constexpr):
    """Rearrange stripes, one column per thread, into runs: [RUNS * SIZE * THREADS] -> [RUNS, THREADS, SIZE]."""
    return tl.permute(tl.reshape(x, [RUNS, SIZE, x.shape[0] // (RUNS * SIZE)]), (0, 2, 1))


@triton.jit
def run_begins(group, place, GROUP: tl.constexpr, RUNS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return the offset of the first element of each run of each thread's block: [RUNS, THREADS].

    Args:
        group: [THREADS], group of each thread.
        place: [THREADS], place of each thread's block in the group.
        GROUP: number of elements of a group.
        RUNS, SIZE: number of runs per block, and number of elements per run.
        PLACES: number of blocks of a group.
    """
    return (group * GROUP + place * SIZE)[None, :] + (tl.arange(0, RUNS) * (SIZE * PLACES))[:, None]


@triton.jit
def offsets(group, place, GROUP: tl.constexpr, RUNS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Return the offsets of all elements of each thread's block: [RUNS, THREADS, SIZE].

    Args:
        group, place, GROUP, RUNS, SIZE, PLACES: as for `run_begins`.
    """
    return run_begins(group, place, GROUP, RUNS, SIZE, PLACES)[:, :, None] + tl.arange(0, SIZE)[None, None, :]


@triton.jit
def for_all(mask, RUNS: tl.constexpr, SIZE: tl.constexpr):
    """Repeat one value per thread for all elements in runs: [THREADS] -> [RUNS, THREADS, SIZE]."""
    return tl.broadcast_to(mask[None, :, None], [RUNS, mask.shape[0], SIZE])


@triton.jit
def to_all(x, STRIPES: tl.constexpr):
    """Repeat one value per thread for all its elements in stripes: [THREADS] -> [STRIPES * THREADS]."""
    return tl.reshape(tl.broadcast_to(x[None, :], [STRIPES, x.shape[0]]), [STRIPES * x.shape[0]])


# --- over a group: each of its threads gets the same result -----------------------------------------------------------


@triton.jit
def group_largest(x, HALVINGS: tl.constexpr, PLACES: tl.constexpr):
    """Return each group's largest magnitude, for each of its threads: [STRIPES * THREADS] -> [THREADS].

    The result is NaN for a group with a NaN.
    """
    x = tl.abs(x)
    for _ in tl.static_range(HALVINGS):
        first, second = halves(x, 1, x.shape[0] // 2)
        x = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    if PLACES > 1:
        bits = tl.reshape(x.to(tl.int32, bitcast=True), [x.shape[0] // PLACES, PLACES])
        bits = tl.broadcast_to(tl.max(bits, axis=1, keep_dims=True), [x.shape[0] // PLACES, PLACES])
        x = tl.reshape(bits, [x.shape[0]]).to(tl.float32, bitcast=True)
    return x


@triton.jit
def exact_dot(x, y, STRIPE_HALVINGS: tl.constexpr, PLACES: tl.constexpr):
    """Return each group's sum of x * y, for each of its threads: two tensors [STRIPES * THREADS] -> [THREADS].

    The sums must be exact, because the order of additions is not fixed.
    """
    total = add_products(tl.zeros([x.shape[0] >> STRIPE_HALVINGS], tl.float32), x, y, STRIPE_HALVINGS)
    if PLACES > 1:
        of_group = tl.sum(tl.reshape(total, [total.shape[0] // PLACES, PLACES]), axis=1, keep_dims=True)
        total = tl.reshape(tl.broadcast_to(of_group, [total.shape[0] // PLACES, PLACES]), [total.shape[0]])
    return total


@triton.jit
def add_products(total, x, y, HALVINGS: tl.constexpr):
    """Add each thread's products x * y to `total` [THREADS], by one fused multiply-add after another.

    Up to Triton 3.7, `tl.sum` adds in this order. Triton 3.8 adds neighbours first, so that only one of two products
    can be fused.
    """
    if HALVINGS == 0:
        return tl.fma(x, y, total)
    else:
        x_first, x_second = halves(x, 1, x.shape[0] // 2)
        y_first, y_second = halves(y, 1, y.shape[0] // 2)
        return add_products(add_products(total, x_first, y_first, HALVINGS - 1), x_second, y_second, HALVINGS - 1)


@triton.jit
def ordered_sum(x, STRIPE_HALVINGS: tl.constexpr, PLACE_HALVINGS: tl.constexpr):
    """Return each group's sum, for each of its threads: [STRIPES * THREADS] -> [THREADS].

    The order is fixed: the second half of the numbers is added to the first half, repeatedly.
    """
    for _ in tl.static_range(STRIPE_HALVINGS):
        first, second = halves(x, 1, x.shape[0] // 2)
        x = first + second
    if PLACE_HALVINGS > 0:
        PLACES: tl.constexpr = 1 << PLACE_HALVINGS
        GROUPS: tl.constexpr = x.shape[0] // PLACES
        for halving in tl.static_range(PLACE_HALVINGS):
            x = tl.sum(tl.reshape(x, [GROUPS, 2, PLACES >> (halving + 1)]), axis=1)
        x = tl.broadcast_to(tl.reshape(x, [GROUPS, 1]), [GROUPS, PLACES])
        x = tl.reshape(x, [GROUPS * PLACES])
    return x


# --- rotation -------------------------------------------------------------------------------------------------------


@triton.jit
def hash_32(words):
    """Hash 32-bit words by Wellons' "lowbias32"."""
    words = words ^ (words >> 16)
    words = words * 0x7FEB352D
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def sign_key(base, rank):
    """Return the key of a rank's random signs; `base` is the part of the key that depends on step and salt."""
    return hash_32(base.to(tl.uint32) + rank.to(tl.uint32) * 0x85EBCA77)


@triton.jit
def draw_signs(block, key, STRIPES: tl.constexpr):
    """Return int32 words with random sign bits, given each thread's block number: [THREADS] -> [STRIPES * THREADS]."""
    words = hash_32(block.to(tl.uint32) ^ key)
    bits = words[None, :] << tl.arange(0, STRIPES).to(tl.uint32)[:, None]
    return tl.reshape(bits.to(tl.int32, bitcast=True), [STRIPES * block.shape[0]])


@triton.jit
def flip(x, signs, sign_bit):
    """Multiply x by random signs, given as the sign bits of int32 words."""
    return (x.to(tl.int32, bitcast=True) ^ (signs & sign_bit)).to(tl.float32, bitcast=True)


@triton.jit
def butterflies(x, STAGE: tl.constexpr):
    first, second = halves(x, 1 << STAGE, x.shape[0] >> (STAGE + 1))
    return unite(first + second, first - second, 1 << STAGE, x.shape[0] >> (STAGE + 1))


@triton.jit
def hadamard(x):
    """Hadamard-transform each thread's block of 32 elements, in stripes, not normalised."""
    for stage in tl.static_range(5):
        x = butterflies(x, stage)
    return x
