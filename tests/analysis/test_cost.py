"""Costs of nodes: by hand, and against torch's own counter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from tests.support.costs import TWO_PER_HOST, costs_of
from tests.support.graphs import Drawing, deep, fake_world, inputs_for, mlp, traced
from zgraph.analysis.cost import FREE, CostModel, NodeCost
from zgraph.analysis.hardware import Hardware
from zgraph.compression.low_rank import orthonormalize_work
from zgraph.compression.method_text import to_text
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.graph.traffic import transfers
from zgraph.passes import LoCo, LowerGathers, LowerReductions, NoFeedback, presets
from zgraph.tiers.lanes import COMPUTE, DEVICE_TO_HOST, DISK, HOST_TO_DEVICE, Lane
from zgraph.tiers.tier import HOST, Disk, Transit
from zgraph.torch_compat.collectives import reduce_scatter_op

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
GRAPH_PASSES = presets.default()[2:]
LOWERED = (LowerGathers(), LowerReductions())


@pytest.fixture
def world() -> Iterator[int]:
    with fake_world(2):
        yield 2


def cost(node: fx.Node, hardware: Hardware = TWO_PER_HOST) -> NodeCost:
    return CostModel(hardware).cost(node)


# --- single nodes ---------------------------------------------------------------------------------------------------


def test_a_product_counts_flops_and_bytes() -> None:
    drawing = Drawing()
    product = drawing.call(aten.mm.default, drawing.input("a", 20, 30), drawing.input("b", 30, 40))
    moved = 4 * (20 * 30 + 30 * 40 + 20 * 40)
    assert cost(product) == NodeCost(COMPUTE, moved / 50, 2 * 20 * 30 * 40, moved)


def test_the_dtype_decides_rate_and_bytes() -> None:
    fast_memory = Hardware(**{**vars(TWO_PER_HOST), "memory_bytes_per_us": 1e9})
    drawing = Drawing()
    for dtype, us in ((torch.float32, 48.0), (torch.bfloat16, 12.0)):
        a, b = drawing.input("a", 20, 30, dtype=dtype), drawing.input("b", 30, 40, dtype=dtype)
        found = cost(drawing.call(aten.mm.default, a, b), fast_memory)
        assert (found.us, found.moved_bytes) == (us, dtype.itemsize * 2600)


def test_an_operand_read_twice_is_moved_once() -> None:
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    assert cost(drawing.call(aten.mm.default, x, x)).moved_bytes == 2 * 256


def test_views_waits_and_inputs_take_no_time(world: int) -> None:
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    split = drawing.call(aten.split.Tensor, x, 4)
    free = [
        x,
        drawing.call(aten.view.default, x, [64]),
        drawing.call(aten.t.default, x),
        drawing.call(aten._unsafe_view.default, x, [64]),
        drawing.call(aten.empty.memory_format, [64]),
        split,
        drawing.call(nodes.operator.getitem, split, 0),
        drawing.wait(drawing.start_gather(drawing.input("shard", 4), "w")),
    ]
    assert [cost(node) for node in free] == [FREE] * len(free)


def test_an_op_that_writes_to_its_input_is_no_view() -> None:
    drawing = Drawing()
    x, y = drawing.input("x", 100), drawing.input("y", 100)
    assert cost(drawing.call(aten.add_.Tensor, x, y)).moved_bytes == 1200
    assert cost(drawing.call(aten.copy_.default, x, y)).moved_bytes == 800  # the target is not read


def test_only_memory_that_is_there_is_read() -> None:
    drawing = Drawing()
    row = drawing.call(aten.expand.default, drawing.input("row", 1, 100), [50, 100])
    assert cost(drawing.call(aten.clone.default, row)).moved_bytes == 400 + 20_000
    table, index = drawing.input("table", 1000, 8), drawing.input("index", 3, dtype=torch.int64)
    assert cost(drawing.call(aten.embedding.default, table, index)).moved_bytes == 96 + 24 + 96


def low_rank_right(rank: int) -> fx.Node:
    """Of two matrices [2048, 64]."""
    rows, columns = [2048] * 2, [64] * 2
    drawing = Drawing()
    left, deltas = drawing.input("left", rank * sum(rows)), drawing.input("deltas", 2, 2048, 64)
    handles = [drawing.input(f"handle {place}", 96, dtype=torch.uint8) for place in range(2)]
    return drawing.call(torch.ops.zgraph.low_rank_right.default, left, [deltas], handles, rows, columns, rank)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_low_rank_factor_costs_products_and_its_orthogonalization(rank: int) -> None:
    node = low_rank_right(rank)
    launches, swept = orthonormalize_work(operator_arguments.LowRankArgs.of(node).layout)
    numel = 2 * 2048 * 64
    factors = 4 * rank * 2 * (2 * 2048 + 64)  # P in and out, and Q
    flops = 2 * 2 * rank * numel
    moved = 4 * 3 * numel + factors + 2 * 96
    assert swept > factors
    assert cost(node) == NodeCost(
        COMPUTE, max(flops / 1000, moved / 50) + max(2.0 * launches, swept / 50), flops, moved + swept
    )


def test_an_unknown_operator_counts_by_its_bytes() -> None:
    graph = fx.Graph()
    drawing = Drawing(graph)
    x = drawing.input("x", 100)
    unknown = graph.call_function(len, (x, {1, 2}))  # an argument that cannot be hashed, too
    meta.set_value(unknown, (meta.value(x), meta.value(x), None))
    assert cost(unknown) == NodeCost(COMPUTE, 1200 / 50, 0, 1200)
    meta.set_value(unknown, None)
    assert cost(unknown) == FREE
    nameless = graph.call_method("frobnicate", (x,))
    assert cost(nameless) == FREE


def test_a_formula_that_fails_leaves_the_bytes() -> None:
    drawing = Drawing()
    product = drawing.call(aten.mm.default, drawing.input("a", 2, 3), drawing.input("b", 3, 4))
    product.args = (product.args[0], product.args[0])  # inner dimensions no longer match
    assert cost(product) == NodeCost(COMPUTE, 2.0, 0, 24 + 32)


def test_attention_on_a_cpu_counts_like_attention() -> None:
    drawing = Drawing()
    q, k, v = (drawing.input(name, 2, 4, 16, 8) for name in "qkv")
    found = drawing.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    assert cost(found).flops == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_experts_count_each_token_once() -> None:
    drawing = Drawing()
    tokens, experts = (
        drawing.input("x", 10, 16, dtype=torch.bfloat16),
        drawing.input("w", 3, 16, 32, dtype=torch.bfloat16),
    )
    grouped = drawing.graph.call_function(aten._grouped_mm.default, (tokens, experts))
    with drawing.mode:
        meta.set_value(grouped, torch.empty(10, 32, dtype=torch.bfloat16))
    assert cost(grouped).flops == 2 * 10 * 16 * 32


@pytest.mark.parametrize(
    ("transit", "us"),
    [
        (Transit(HOST, to_device=True), 3 + 400 / 20),
        (Transit(HOST, to_device=False), 4 + 400 / 25),
        (Transit(Disk(), to_device=True), 7 + 400 / 5),
    ],
)
def test_copies_between_tiers_cost_by_their_link(transit: Transit, us: float) -> None:
    drawing = Drawing()
    copied = drawing.call(aten.clone.default, drawing.input("x", 100))
    meta.set_transit(copied, transit.tier, to_device=transit.to_device)
    assert cost(copied) == NodeCost(transit.lane, us, 0, 400)


@pytest.mark.parametrize(
    ("backend", "read_us", "write_us"),
    [("gloo", 7 + 400 / 5, 7 + 400 / 5), ("nccl", (7 + 80) + (3 + 20), (7 + 80) + (4 + 16))],
)
def test_gpu_copies_from_and_to_disk_pass_the_host(backend: str, read_us: float, write_us: float) -> None:
    hardware, ops = replace(TWO_PER_HOST, backend=backend), torch.ops.zgraph
    drawing = Drawing()
    x = drawing.input("x", 100)
    read = drawing.call(ops.reload_start.default, x, torch.device("cpu"))
    store = drawing.call(ops.store_start.default, read, x)
    spill = drawing.call(ops.spill_start.default, x, "folder")
    for node, us in ((read, read_us), (store, write_us), (spill, write_us)):
        meta.set_transit(node, Disk(), to_device=node is read)
        assert cost(node, hardware) == NodeCost(DISK, us, 0, 400)


def test_copies_between_devices_are_found_by_their_devices() -> None:
    drawing = Drawing()
    x = drawing.input("x", 100)
    there = drawing.call(aten._to_copy.default, x, device=torch.device("meta"))  # stands for any accelerator
    assert cost(there) == NodeCost(HOST_TO_DEVICE, 3 + 400 / 20, 0, 400)
    back = drawing.graph.call_function(aten._to_copy.default, (there,), {"device": torch.device("cpu")})
    meta.set_value(back, meta.value(x))
    assert cost(back) == NodeCost(DEVICE_TO_HOST, 4 + 400 / 25, 0, 400)
    assert cost(drawing.call(aten._to_copy.default, x, dtype=torch.float64)).lane == COMPUTE


# --- communication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_send_what_traffic_says(size: int) -> None:
    with fake_world(size):
        drawing = Drawing()
        drawing.start_gather(drawing.input("shard", 5, 7), "w")
        drawing.start_exchange(drawing.input("pieces", 12, 5), "w")
        drawing.call(reduce_scatter_op(), drawing.input("pieces", 12, 5), "sum", size, "0")
        drawing.call(funcol.all_reduce.default, drawing.input("grad", 12, 5), "sum", "0")
        handle = drawing.input("handle", 96, dtype=torch.uint8)
        kept = torch.ops.zgraph.all_gather_kept.default
        drawing.call(kept, drawing.input("chunk", 6), handle, size, "open", "0", works_for="w")
        found = [cost(node) for node in drawing.graph.nodes if nodes.is_start(node)]
        sent = list(transfers(drawing.graph))
        assert [found.lane for found in found] == [Lane.of_group("0")] * 5
        assert [found.moved_bytes for found in found] == [transfer.sent_bytes for transfer in sent]
        assert [found.us for found in found] == [
            TWO_PER_HOST.collective_us(transfer.kind, transfer.sent_bytes, size) for transfer in sent
        ]


def test_markers_cost_their_collectives_and_their_copies(world: int) -> None:
    found = traced(deep).graphs["forward"].graph
    marker = next(node for node in found.nodes if nodes.is_unshard(node))
    copies = (32 + 64) * 4 + 96  # shard, whole and handle
    assert cost(marker) == NodeCost(Lane.of_group("0"), 1 + 128 / 100 + copies / 50, 0, 128)


def test_a_marker_without_collectives_computes(world: int) -> None:
    marker = next(node for node in traced(deep, zero_stage=0).graphs["forward"].graph.nodes if nodes.is_unshard(node))
    assert (cost(marker).lane, cost(marker).moved_bytes) == (COMPUTE, 2 * 256 + 96)


def test_a_sum_over_ranks_reads_and_writes_it_each_time(world: int) -> None:
    drawing = Drawing()
    received = drawing.input("received", 30, dtype=torch.bfloat16)
    total = drawing.call(torch.ops.zgraph.sum_ranks.default, received, 3, 3, torch.bfloat16)
    # Three pieces read; the fp32 sum written, read and written twice, divided, read and written narrow.
    moved = 60 + 40 * (1 + 2 * 2) + 2 * 40 + (40 + 20)
    assert cost(total) == NodeCost(COMPUTE, max(5 * 2.0, moved / 50), 0, moved)


def test_sum_of_wide_pieces_starts_with_two(world: int) -> None:
    drawing = Drawing()
    received = drawing.input("received", 30)
    total = drawing.call(torch.ops.zgraph.sum_ranks.default, received, 3, 3, torch.float32)
    # Three pieces read; the sum of two written, read and written with the third, divided.
    moved = 120 + 40 + 2 * 40 + 2 * 40
    assert cost(total) == NodeCost(COMPUTE, max(3 * 2.0, moved / 50), 0, moved)


def test_compression_reads_gradients_and_reads_and_writes_its_errors(world: int) -> None:
    method, plain = to_text(LoCo(group=32)), to_text(NoFeedback(group=32))
    drawing = Drawing()
    grad, handle = drawing.input("grad", 100), drawing.input("handle", 96, dtype=torch.uint8)
    quantize = torch.ops.zgraph.quantize_grads.default
    node = drawing.call(quantize, [grad], [handle], [], method, "first_hop", [50], 2, 1, 0, 0, "")
    # Two chunks of two groups each: 32 int8 and a bf16 scale to keep, 16 bytes of codes and a bf16 scale to send.
    kept, sent = 2 * 2 * (32 + 2), 2 * 48  # 36 bytes, filled up to 16s
    assert cost(node).moved_bytes == 400 + 96 + 2 * kept + sent + 8
    without = drawing.call(quantize, [grad], [handle], [], plain, "first_hop", [50], 2, 1, 0, 0, "")
    assert cost(without).moved_bytes == 400 + 96 + sent + 8


def test_waiting_gradients_are_added_to_a_sum() -> None:
    drawing = Drawing()
    grad, handle = drawing.input("grad", 100), drawing.input("handle", 96, dtype=torch.uint8)
    waits = drawing.call(torch.ops.zgraph.accumulate_grad.default, grad, handle, torch.float32, 1, 50)
    assert cost(waits).moved_bytes == 400 + 96 + 2 * 400 + 200
    taken = drawing.call(torch.ops.zgraph.add_accumulated.default, grad, handle, torch.float32, 1)
    assert cost(taken).moved_bytes == 400 + 96 + 2 * 400 + 400


@pytest.mark.parametrize("options", [{}, {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}])
@pytest.mark.parametrize("passes", [(), LOWERED, GRAPH_PASSES], ids=["markers", "lowered", "all"])
def test_a_graph_sends_what_traffic_says(world: int, options: dict[str, Any], passes: Any) -> None:
    for gm in traced(mlp, passes, **options).graphs.values():
        sent = sum(transfer.sent_bytes for transfer in transfers(gm.graph))
        costs = costs_of(gm.graph, TWO_PER_HOST).values()
        assert sum(cost.moved_bytes for cost in costs if cost.lane is not None and cost.lane.is_group) == sent


def test_flops_are_those_that_torch_counts_while_running(world: int) -> None:
    for direction, gm in traced(mlp, zero_stage=0).graphs.items():
        # Replicated parameters need no peers here; their reductions are cut off.
        for marker in nodes.call_functions(gm.graph, nodes.is_reduce_grad):
            marker.replace_all_uses_with(marker.all_input_nodes[0])
            gm.graph.erase_node(marker)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            fx.Interpreter(gm).run(*inputs_for(gm, 0))
        found = sum(cost.flops for cost in costs_of(gm.graph, TWO_PER_HOST).values())
        assert found == counter.get_total_flops() > 0, direction
