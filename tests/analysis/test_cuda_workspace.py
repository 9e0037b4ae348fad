"""What CUDA kernels take beside their results, by hand from the shapes that their sources allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zgraph
from tests.support.graphs import Drawing, aten
from zgraph.analysis.liveness import CUDA, CUDA_AT_WORST
from zgraph.analysis.workspace import workspace_bytes
from zgraph.graph import meta

BF16 = torch.bfloat16


def on_cuda(target: Any, *shapes: Any, dtype: torch.dtype = BF16) -> int:
    """Workspace of a call whose first arguments have these shapes; their values are CPU ones that stand for a GPU's."""
    drawing = Drawing()
    node = drawing.graph.create_node(
        "call_function", target, tuple(drawing.input(f"x{place}", *shape) for place, shape in enumerate(shapes))
    )
    for source in node.all_input_nodes:
        meta.set_value(source, meta.tensor_value(source).to(dtype))
    meta.set_value(node, meta.tensor_value(node.all_input_nodes[0]))
    return workspace_bytes(node, device_type="cuda")


@pytest.mark.parametrize(
    "target",
    [
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ],
)
def test_flash_attention_sums_the_querys_gradient_in_fp32(target: Any) -> None:
    query = (2, 8, 100, 80)
    rows = 2 * 8 * 128 * (96 + 1) * 4  # rows to 128, channels to 32, and a number for each row
    assert on_cuda(target, query, query, query, query) == rows
    grouped = (2, 4, 60, 80)  # keys of four heads: gradients for all eight first
    assert on_cuda(target, query, query, grouped, grouped) == rows + 2 * 2 * 8 * 60 * 80 * 2


def test_efficient_attention_accumulates_narrow_gradients_wide() -> None:
    target = aten._scaled_dot_product_efficient_attention_backward.default
    shape = (2, 8, 100, 80)
    rows = 2 * 8 * 100 * 4
    assert on_cuda(target, shape, shape, shape, shape) == rows + 3 * 2 * 8 * 100 * 80 * 4
    assert on_cuda(target, shape, shape, shape, shape, dtype=torch.float32) == rows


def test_a_sort_and_what_sorts() -> None:
    assert on_cuda(aten.sort.default, (1000,)) == 1000 * (2 + 8)
    assert on_cuda(aten.embedding_dense_backward.default, (50, 16), (50,), dtype=torch.float32) == 4 * 50 * 8
    assert on_cuda(aten.mm.default, (8, 8), (8, 8)) == 0


def test_blocks_above_a_mebibyte_may_exceed_by_one() -> None:
    assert CUDA_AT_WORST.allocated_bytes(2**20) == CUDA.allocated_bytes(2**20) == 2**20
    assert CUDA_AT_WORST.allocated_bytes(2**20 + 1) == 2**21 + 512
    assert CUDA_AT_WORST.allocated_bytes(0) == 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).square().mean()


def test_a_plan_for_gpus_counts_the_kernels_of_gpus() -> None:
    """Where attention's backward is the peak: its accumulator of the query's gradient on a GPU, blocks on a CPU."""
    found = {
        name: zgraph.plan(Attention, world_size=2, hardware=name, batch=lambda: (torch.zeros(1, 2048, 64),))
        for name in ("h100", "cpu")
    }
    during = {
        name: max(
            count
            for node, count in zip(curve.nodes, curve.bytes_during, strict=True)
            if "attention_for_cpu_backward" in str(node.target)
        )
        for name, plan in found.items()
        for curve in plan.curves
    }
    gpu = 4 * 2048 * (32 + 1) * 4
    cpu = (2 * 256 * 512 + 256) * 4
    grad = 4 * 2048 * 16 * 4  # which the CPU's kernel copies where it is strided
    assert during["h100"] - during["cpu"] in (gpu - cpu, gpu - cpu - grad)
