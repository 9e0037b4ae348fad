"""A Triton kernel that sums each group, and does nothing else."""

import triton
import triton.language as tl

from zgraph.codegen.kernels.triton.blocks import RUN, in_stripes, offsets, ordered_sum


@triton.jit
def sum_alone(values, sums, CASE: tl.constexpr, THREADS: tl.constexpr):
    thread = tl.arange(0, THREADS)
    group, place = thread // CASE.places, thread % CASE.places
    x = in_stripes(tl.load(values + offsets(group, place, CASE.group, CASE.runs, RUN, CASE.places)))
    tl.store(sums + group, ordered_sum(x, CASE.stripe_halvings, CASE.place_halvings), mask=place == CASE.places - 1)
