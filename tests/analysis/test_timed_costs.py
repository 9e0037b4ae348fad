"""Costs that are measured while compiling: what is run, what is not, and that all ranks plan by the same."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import zgraph
from tests.support import models
from tests.support.graphs import Drawing, Keep, fake_world
from tests.support.ranks import Ranks
from zgraph.analysis.cost import CostModel
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.timed_costs import TimedCosts
from zgraph.compression.method_text import to_text
from zgraph.graph import nodes
from zgraph.passes import LoCo, presets

aten = torch.ops.aten
CPU = Hardware.preset("cpu")


def drawn() -> dict[str, fx.Node]:
    """table[index] -> product -> relu, beside a gather and a view."""
    with fake_world(2):
        drawing = Drawing()
        x, table = drawing.input("x", 64, 64), drawing.input("table", 100, 64)
        start = drawing.start_gather(x, "w")
        product = drawing.call(aten.mm.default, x, x, name="product")
        relu = drawing.call(aten.relu.default, product, name="relu")
        gm = drawing.done(relu, table, drawing.wait(start), drawing.call(aten.view.default, x, [4096], name="view"))
        return {node.name: node for node in gm.graph.nodes}


def test_kernels_have_measured_times_and_others_estimates() -> None:
    store = HashStore()
    found = drawn()
    with fake_world(2):
        timed, estimated = TimedCosts(CPU, store), CostModel(CPU)
        for node in found.values():
            cost, estimate = timed.cost(node), estimated.cost(node)
            assert (cost.lane, cost.flops, cost.moved_bytes) == (estimate.lane, estimate.flops, estimate.moved_bytes)
            is_kernel = node.name in ("product", "relu")
            assert (cost.us != estimate.us) == is_kernel, node.name
        # Another rank takes what the first has published, whatever it would measure.
        other = TimedCosts(CPU, store)
        for name in ("product", "relu"):
            assert other.cost(found[name]) == timed.cost(found[name])


def test_compression_kernels_are_timed_on_their_own_errors() -> None:
    method = to_text(LoCo(group=32))
    drawing = Drawing()
    grad, handle = drawing.input("grad", 100), drawing.input("handle", 96, dtype=torch.uint8)
    quantize, dequantize = torch.ops.zgraph.quantize_grads.default, torch.ops.zgraph.dequantize_sum.default
    both = drawing.call(quantize, [grad], [handle], [], method, "first_hop", [50], 2, 1, 0, 0, "")
    payload, draw = (drawing.call(operator.getitem, both, place) for place in range(2))
    shards = drawing.call(dequantize, payload, draw, method, [50], 2, 1, 0, 2, torch.float32)
    timed, estimated = TimedCosts(CPU, HashStore()), CostModel(CPU)
    for node in (both, shards):
        assert timed.cost(node).us != estimated.cost(node).us
        assert timed.cost(node).moved_bytes == estimated.cost(node).moved_bytes


def test_ranks_share_quantizer_times_despite_different_signs() -> None:
    """Else each would plan by its own time, and another order of collectives than its peers."""
    method, store = to_text(LoCo()), HashStore()
    found: list[float] = []
    for rank in (0, 1):
        drawing = Drawing()
        grad, handle = drawing.input("grad", 100), drawing.input("handle", 96, dtype=torch.uint8)
        args = ([grad], [handle], [], method, "first_hop", [50], 2, 1, rank, 4 + rank, "")
        found.append(TimedCosts(CPU, store).cost(drawing.call(torch.ops.zgraph.quantize_grads.default, *args)).us)
    assert found[0] == found[1]
    assert store.num_keys() == 1


def low_rank_nodes(rank: int) -> list[fx.Node]:
    """Of one [64, 48] matrix, of which this rank rebuilds its half."""
    drawing = Drawing()
    grads, handles = [drawing.input("grad", 64, 48)], [drawing.input("handle", 96, dtype=torch.uint8)]
    sizes = ([64], [48], 2)
    left = drawing.call(torch.ops.zgraph.low_rank_left.default, grads, handles, *sizes)
    product, delta = (drawing.call(operator.getitem, left, place) for place in range(2))
    right = drawing.call(torch.ops.zgraph.low_rank_right.default, product, [delta], handles, *sizes)
    factors = [drawing.call(operator.getitem, right, place) for place in range(2)]
    own = ([32 * rank], [32], torch.float32, "alone")
    means = drawing.call(torch.ops.zgraph.low_rank_means.default, *factors, handles, *sizes, *own)
    return [left, right, means]


def test_ranks_share_low_rank_times_despite_different_rows() -> None:
    store = HashStore()
    found = [[TimedCosts(CPU, store).cost(node).us for node in low_rank_nodes(rank)] for rank in (0, 1)]
    assert found[0] == found[1]
    assert store.num_keys() == 3
    for node, us in zip(low_rank_nodes(0), found[0], strict=True):
        assert us != CostModel(CPU).cost(node).us, node


def test_nothing_is_left_behind() -> None:
    """Neither in the random stream, nor in the graph's fake values."""
    found = drawn()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with fake_world(2):
        TimedCosts(CPU, HashStore()).cost(found["product"])
    assert torch.equal(torch.rand(3), expected)
    assert type(found["product"].meta["val"]).__name__ == "FakeTensor"


def test_sizes_of_another_graph_are_timed_anew() -> None:
    """Two graphs whose symbols have one name stand for different sizes."""
    store = HashStore()
    keys: list[int] = []
    for size in (8, 512):
        environment = ShapeEnv()
        with FakeTensorMode(shape_env=environment) as mode:
            x = mode.from_tensor(
                torch.ones(size, size),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2),
            )
        drawing = Drawing()
        node = drawing.input("x", 8, 8)
        node.meta["val"] = x
        product = drawing.call(aten.mm.default, node, node, name="product")
        assert TimedCosts(CPU, store).cost(product).us > 0
        keys.append(store.num_keys())
    assert keys[1] == keys[0] + 1


@torch.library.custom_op("zgraph_tests::counts_its_calls", mutates_args=())
def counts_its_calls(x: Tensor) -> Tensor:
    raise AssertionError("a library's operator was run while compiling")


@counts_its_calls.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_communicating_or_failing_operators_are_estimated() -> None:
    """An operator of somebody else's; and the Cholesky factor of a matrix that is not symmetric."""
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    theirs = drawing.call(torch.ops.zgraph_tests.counts_its_calls.default, x, name="theirs")
    factor = drawing.call(aten.linalg_cholesky.default, theirs, name="factor")
    drawing.done(factor)
    timed, estimated = TimedCosts(CPU, HashStore()), CostModel(CPU)
    for node in (theirs, factor):
        assert timed.cost(node) == estimated.cost(node)


def planned_by(time_kernels: bool) -> tuple[list[str], list[float], list[Tensor]]:
    """The order of a backward's collectives, what its kernels cost, and the gradients."""
    torch.manual_seed(0)
    model: Any = zgraph.shard(models.Language(layers=2, width=32), zero_stage=3)
    keep = Keep()
    target = zgraph.Target(hardware=Hardware.preset("cpu"), time_kernels=time_kernels)
    options = {"lowering": "fx", "passes": zgraph.PassList([*presets.planned(), keep], target=target)}
    called: Any = torch.compile(model, backend="zgraph", options=options)
    called(torch.randint(0, 23, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
    graph, cost_of = keep.kept["backward"].graph, keep.kept["ctx"].cost_of
    order = [node.name for node in graph.nodes if nodes.is_start(node)]
    own = [node for node in graph.nodes if node.op == "call_function" and not nodes.is_communication(node)]
    grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return order, [cost_of(node).us for node in own], grads


def test_ranks_plan_by_the_same_times(ranks: Ranks) -> None:
    first, second = ranks.run(planned_by, True)
    assert first[0] == second[0] and first[1] == second[1]
    estimated = ranks.run(planned_by, False)[0]
    assert first[1] != estimated[1]
    for timed, plain in zip(first[2], estimated[2], strict=True):
        assert torch.equal(timed, plain)
