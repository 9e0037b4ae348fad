"""The CUDA kernel of sum_ranks: bit for bit what torch's operators compute, in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.kernels.buckets import BF16, F16, F32, POINTERS, needs_triton, same_bits, within
from zgraph.codegen.kernels.triton import sum_blocks
from zgraph.codegen.kernels.triton.launch_options import load
from zgraph.dialect.sum_ranks import sum_pieces

pytestmark = needs_triton


def compare(ranks: int, numel: int, wire: torch.dtype, dtype: torch.dtype, divisor: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    received = within((torch.randn(ranks * numel, generator=generator) * 3).to(wire))
    received[0], received[-1], received[numel // 2] = torch.inf, -0.0, torch.nan
    found = sum_blocks.sum_pieces(received, ranks, divisor, dtype)
    expected = sum_pieces(received, ranks, divisor, dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert same_bits(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize(("ranks", "divisor"), [(1, 3), (2, 2), (3, 3), (3, 1), (7, 14)])
@pytest.mark.parametrize(("wire", "dtype"), [(BF16, F32), (F32, F32), (BF16, BF16), (F16, F16)], ids=str)
def test_kernel_equals_the_operator(ranks: int, divisor: int, wire: Any, dtype: Any, interpreted: Callable[..., Any]):
    for numel in (1, 63, 1000, 4101):
        interpreted(compare, ranks, numel, wire, dtype, divisor)


@pytest.mark.parametrize("capability", [80, 90])
def test_it_divides_as_ieee_says_and_reads_each_piece_once(capability: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load("sum_pieces")
    types = {"output": POINTERS[F32], "received": "*i16", "numel": "i64", "ranks": "i32", "divisor": "fp64"}
    constants = {"WIRE": "bfloat16", "OUTPUT": "float32", "DIVIDES": True, "BLOCK": 1024}
    source = ASTSource(fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    ptx = made.asm["ptx"]
    assert "div.rn.f32" in ptx and "add.rn.f32" in ptx
    assert re.findall(r"\bfma\.\S+|\bdiv\.full\S*|\bdiv\.approx\S*|\brcp\.\S+", ptx) == []
