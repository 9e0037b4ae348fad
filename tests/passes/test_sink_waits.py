"""Waits stand where their results are needed, and only so many reductions are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.testing import FileCheck

import zgraph
from tests.support.graphs import Drawing, Traced, apply, by_rank, deep, fake_world, mlp, names_of, traced
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassContext, PassList, PreconditionError
from zgraph.graph import meta, nodes
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions, SinkWaits, presets
from zgraph.passes.sink_waits import carries_mean

aten = torch.ops.aten
LOWERED = (LowerGathers(), LowerReductions())


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def most_in_flight(graph: fx.Graph) -> int:
    """How many reductions have been started and not yet finished, at the worst moment."""
    outstanding: dict[fx.Node, None] = {}
    most = 0
    for node in graph.nodes:
        if nodes.is_exchange(node):
            outstanding[node] = None
            most = max(most, len(outstanding))
        elif nodes.is_wait(node):
            outstanding.pop(node.args[0], None)
    return most


def draw(user_first: bool = False) -> tuple[fx.GraphModule, PassContext]:
    """all_gather, wait, mm, add; or with the add, which reads the wait, before the mm."""
    drawing = Drawing()
    shard, x = drawing.input("shard", 4, 8), drawing.input("x", 8, 8)
    whole = drawing.wait(drawing.start_gather(shard, "w"))
    if user_first:
        total = drawing.call(aten.add.Tensor, x, whole)
        gm = drawing.done(drawing.call(aten.mm.default, total, x))
    else:
        product = drawing.call(aten.mm.default, x, x)
        gm = drawing.done(drawing.call(aten.add.Tensor, product, whole))
    return gm, PassContext(direction="forward")


@pytest.mark.usefixtures("world")
def test_wait_sinks_below_an_independent_matmul() -> None:
    gm, ctx = draw()
    assert apply(SinkWaits(), Traced(gm, {"forward": gm}, ctx), "forward")
    FileCheck().check("all_gather_w").check("aten.mm").check("wait_w").check("aten.add").run(graph_text(gm.graph))


@pytest.mark.usefixtures("world")
def test_wait_next_to_its_reader_is_left_alone() -> None:
    gm, ctx = draw(user_first=True)
    before = names_of(gm.graph)
    assert not apply(SinkWaits(), Traced(gm, {"forward": gm}, ctx), "forward")
    assert names_of(gm.graph) == before
    assert ctx.notes == [("sink_waits", "forward", "every wait stands where it is needed")]


@pytest.mark.usefixtures("world")
def test_copies_out_of_a_bucket_sink_with_their_readers() -> None:
    found = traced(deep, [*LOWERED, BucketCollectives(bucket_bytes=2**20)])
    assert apply(SinkWaits(), found, "forward")
    graph = found.graphs["forward"].graph
    order = nodes.order_of(graph)
    copies = [node for node in graph.nodes if node.target is aten.clone.default]
    products = [node for node in graph.nodes if node.target is aten.mm.default]
    assert len(copies) == len(products) == 6
    for copy, product, later in zip(copies, products, [*products[1:], nodes.output_of(graph)], strict=True):
        assert order[copy] < order[product] < order[later]
    assert [order[copy] > order[product] for copy, product in zip(copies[1:], products, strict=False)] == [True] * 5


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("in_flight", [1, 2, 3, 6])
def test_no_more_reductions_are_in_flight_than_asked(in_flight: int) -> None:
    for options in ({}, {"zero_stage": 0}):
        found = traced(deep, LOWERED, **options)
        assert apply(SinkWaits(reductions_in_flight=in_flight), found, "backward")
        assert most_in_flight(found.graphs["backward"].graph) == in_flight


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("layers", "outstanding"), [(1, 1), (2, 2), (5, 5), (99, 6)])
def test_no_more_bytes_are_in_flight_than_asked(layers: int, outstanding: int) -> None:
    found = traced(deep, LOWERED)
    apply(SinkWaits(reductions_in_flight=9, in_flight_bytes=layers * 256), found, "backward")
    assert most_in_flight(found.graphs["backward"].graph) == outstanding


@pytest.mark.usefixtures("world")
def test_means_of_replicated_gradients_start_before_any_wait() -> None:
    found = traced(deep, LOWERED, zero_stage=0)
    apply(SinkWaits(), found, "backward")
    graph = found.graphs["backward"].graph
    order = nodes.order_of(graph)
    means = list(nodes.call_functions(graph, nodes.is_all_gather))
    assert len(means) == 6
    assert max(map(order.__getitem__, means)) < min(order[nodes.wait_of(mean)] for mean in means)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("room", [1, 2, 3])
def test_buckets_are_limited_too(room: int) -> None:
    found = traced(deep, [*LOWERED, BucketCollectives(bucket_bytes=room * 256)])
    assert apply(SinkWaits(reductions_in_flight=1), found, "backward")
    assert most_in_flight(found.graphs["backward"].graph) == 1


@pytest.mark.usefixtures("world")
def test_a_reduction_stays_in_flight_as_long_as_it_may() -> None:
    """It is finished when the next one starts, not sooner: compute hides it."""
    found = traced(deep, LOWERED)
    apply(SinkWaits(reductions_in_flight=1), found, "backward")
    calls = [node for node in found.graphs["backward"].graph.nodes if node.op == "call_function"]
    starts = [node for node in calls if nodes.is_exchange(node)]
    for start, following in pairwise(starts):
        wait = nodes.wait_of(start)
        between = calls[calls.index(wait) : calls.index(following)]  # pyright: ignore[reportArgumentType]
        assert {name for node in between for name in meta.parameters(node)} >= set(meta.parameters(start))
        assert not [node for node in between if node.target is aten.mm.default]


@pytest.mark.usefixtures("world")
def test_second_run_changes_nothing() -> None:
    for passes in (LOWERED, (*LOWERED, BucketCollectives(bucket_bytes=256))):
        found = traced(deep, passes)
        for direction in ("forward", "backward"):
            apply(SinkWaits(), found, direction)
            before = names_of(found.graphs[direction].graph)
            assert not apply(SinkWaits(), found, direction)
            assert names_of(found.graphs[direction].graph) == before


@pytest.mark.usefixtures("world")
def test_nothing_but_waits_and_copies_moves() -> None:
    found = traced(mlp, LOWERED)
    for direction in ("forward", "backward"):
        graph = found.graphs[direction].graph
        others = [node for node in graph.nodes if not nodes.is_communication(node) or nodes.is_start(node)]
        apply(SinkWaits(reductions_in_flight=99), found, direction)
        assert [node for node in graph.nodes if node in others] == others


def test_bad_limit_is_refused_when_the_pass_is_built() -> None:
    with pytest.raises(ValueError, match="sink_waits: reductions_in_flight=0; write 1 or more"):
        SinkWaits(reductions_in_flight=0)
    with pytest.raises(
        ValueError, match="sink_waits: in_flight_bytes=0 holds nothing; write a positive number of byte"
    ):
        SinkWaits(in_flight_bytes=0)


def test_it_is_refused_before_lowering() -> None:
    with pytest.raises(PreconditionError, match="sink_waits requires gathers_lowered, reductions_lowered"):
        PassList([SinkWaits()])


@pytest.mark.parametrize("options", [{}, {"zero_stage": 0}], ids=str)
def test_results_are_bitwise_the_same(options: dict[str, int]) -> None:
    ranks = by_rank(mlp, [*LOWERED, BucketCollectives(bucket_bytes=200)], world=3, **options)
    for direction in ("forward", "backward"):
        before = [copy_of(found.graphs[direction]) for found in ranks]
        for found in ranks:
            SinkWaits(reductions_in_flight=1).run(found.graphs[direction], found.ctx)
        assert_same_results(before, [found.graphs[direction] for found in ranks])


@dataclass(frozen=True, kw_only=True)
class Seen(zgraph.GraphPass):
    """Changes nothing; keeps the order of updates and of waits, by what is waited for."""

    order: list[str]

    name: ClassVar[str] = "seen"

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        for node in gm.graph.nodes:
            if nodes.is_wait(node):
                self.order.append("mean" if carries_mean(nodes.start_of(node)) else "pieces")
            elif "_fused_" in str(node.target):
                self.order.append("update")
        return False


def order_of_a_step(layers: int) -> str:
    """Waits and updates of a whole step at stage 0, each layer's gradients in a bucket of their own."""
    seen = Seen(order=[])
    with fake_world(2):
        model = zgraph.shard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(layers))), zero_stage=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        pipeline = zgraph.PassList([*presets.default(bucket_bytes=1), seen])

        @zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})
        def step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(torch.zeros(2, 8))
    return " ".join(seen.order)


def test_updates_of_replicas_run_while_later_means_arrive() -> None:
    """With three in flight: the first mean is waited for, and used, once the gather of the fourth has started."""
    ends = "mean update " * 3
    assert order_of_a_step(3) == f"pieces pieces pieces {ends}".strip()
    assert order_of_a_step(5) == f"pieces pieces pieces pieces mean update pieces mean update {ends}".strip()
