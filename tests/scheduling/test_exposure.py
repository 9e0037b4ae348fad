"""Why a collective could not be hidden, in orders that rules made; those of schedule_overlap are in its own test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, aten, fake_world, mlp, traced
from zgraph.analysis.cost import NodeCost
from zgraph.graph import meta, nodes
from zgraph.scheduling.exposure import why_exposed
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.simulate import simulate
from zgraph.tiers.lanes import COMPUTE, Lane
from zgraph.torch_compat.collectives import wait_op


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def reasons(graph: fx.Graph, limits: Limits | None = None) -> dict[str, str]:
    """Of what is exposed where a collective takes 9 us, and a product or an activation 5 us."""
    order = list(graph.nodes)
    compute = (aten.mm.default, aten.addmm.default, aten.relu.default)
    costs = {
        node: NodeCost(Lane.of_group("0"), 9.0)
        if nodes.is_start(node) or nodes.is_marker(node)
        else NodeCost(COMPUTE, 5.0 if node.target in compute else 0.0)
        for node in nodes.call_functions(graph, lambda _: True)
    }
    found = simulate(order, costs)
    return {node.name: why_exposed(node, order, found, limits) for node, us in found.exposed_us.items() if us}


def test_a_rule_that_starts_a_gather_late_is_named() -> None:
    """relu, all_gather_w, wait_w, mm: relu could have run under it."""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    ahead = drawing.call(aten.relu.default, x, name="ahead")
    whole = drawing.wait(drawing.start_gather(shard, "w"))
    graph = drawing.done(drawing.call(aten.mm.default, ahead, whole)).graph
    reason = "started after ahead by a rule; schedule_overlap goes by costs"
    assert reasons(graph) == {"all_gather_w": reason}
    scheduled = Limits(in_flight_bytes=1000)  # found no better order
    assert reasons(graph, scheduled) == {
        "all_gather_w": "too little compute between ahead and the first reader of its result"
    }


def test_a_budget_is_the_reason_only_if_a_gather_does_not_fit() -> None:
    """During `ahead` its result of 256 bytes is alive, and the gather needs 256 more; inputs do not count."""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    ahead = drawing.call(aten.relu.default, x, name="ahead")
    whole = drawing.wait(drawing.start_gather(shard, "w"))
    graph = drawing.done(drawing.call(aten.mm.default, ahead, whole)).graph
    fits = "too little compute between ahead and the first reader of its result"
    lacks = "the budget of 511 bytes has no room for 256 bytes during ahead"
    for budget, reason in ((512, fits), (511, lacks)):
        limits = Limits(budget_bytes=budget, in_flight_bytes=1000)
        assert reasons(graph, limits) == {"all_gather_w": reason}


def test_gather_pinned_to_its_use_is_reported() -> None:
    """relu, all_gather_w, wait_w, mm, where nobody may move the gather"""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    ahead = drawing.call(aten.relu.default, x, name="ahead")
    start = drawing.start_gather(shard, "w")
    meta.tag_at_use(start)
    graph = drawing.done(drawing.call(aten.mm.default, ahead, drawing.wait(start))).graph
    for limits in (None, Limits(in_flight_bytes=1000)):
        reason = "gathered where its result is needed, to hold less; see bucket_collectives"
        assert reasons(graph, limits) == {"all_gather_w": reason}


@pytest.mark.parametrize("other", [True, False])
def test_a_rule_that_waits_early_for_a_reduction_is_named(other: bool) -> None:
    """all_to_all_g, wait_g, sum, then mm, which does not need the sum, or nothing"""
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    grad = drawing.call(aten.relu.default, x)
    received = drawing.wait(drawing.start_exchange(grad, "g"))
    mean = drawing.call(torch.ops.zgraph.sum_ranks.default, received, 2, 2, torch.float32, works_for="g")
    after = [drawing.call(aten.mm.default, x, x, name="other")] if other else []
    expected = "waited for before other, which does not need it, by a rule; schedule_overlap goes by costs"
    graph = drawing.done(mean, *after).graph
    assert reasons(graph) == {"all_to_all_g": expected if other else "too little compute after its input is ready"}


def test_markers_and_the_models_own_collectives() -> None:
    (graph,) = (gm.graph for where, gm in traced(mlp).graphs.items() if where == "forward")
    found = reasons(graph)
    assert len(found) == 5 and all(
        "lower_gathers and lower_reductions let it overlap" in text for text in found.values()
    )
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    own = drawing.call(torch.ops._c10d_functional.all_reduce.default, x, "sum", drawing.group_name, name="own")
    graph = drawing.done(drawing.call(wait_op(), own)).graph
    assert reasons(graph) == {"own": "a collective of the model's own, which no pass moves"}
