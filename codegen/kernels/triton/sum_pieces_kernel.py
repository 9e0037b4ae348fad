"""The Triton kernel that sums the pieces of all ranks, in rank order, reading each piece once."""

# pyright: basic, reportAttributeAccessIssue=false, reportIndexIssue=false, reportInvalidTypeForm=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# Triton parses these functions itself, and its types tell type checkers little.

import triton
import triton.language as tl

from zgraph.codegen.kernels.triton.blocks import narrowed, widened


@triton.jit(do_not_specialize=["numel", "ranks", "divisor"])
def sum_pieces(
    output, received, numel: tl.int64, ranks, divisor,
    WIRE: tl.constexpr, OUTPUT: tl.constexpr, DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum `received` over the ranks in fp32, divide, and store.

    Args:
        output: [numel]; bf16 is given as int16.
        received: [ranks, numel]; bf16 is given as int16.
        divisor: divisor of the sums.
        WIRE, OUTPUT: names of the dtypes of `received` and `output`: fp32, bf16 or fp16.
        DIVIDES: whether the sums are divided.
        BLOCK: number of elements of a program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = widened(tl.load(received + at, mask=inside, other=0), WIRE)
    for sender in range(1, ranks):
        total += widened(tl.load(received + (tl.cast(sender, tl.int64) * numel + at), mask=inside, other=0), WIRE)
    if DIVIDES:
        total = tl.div_rn(total, tl.cast(divisor, tl.float32))
    tl.store(output + at, narrowed(total, OUTPUT), mask=inside)
