"""Gathers start early, but no more of them are in flight than asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch.testing import FileCheck

from tests.support.graphs import (
    Autocast,
    Drawing,
    Traced,
    apply,
    by_rank,
    deep,
    fake_world,
    mlp,
    names_of,
    traced,
)
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassContext, PassList, PreconditionError
from zgraph.graph import meta, nodes
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, HoistStarts, LowerGathers, LowerReductions, SinkWaits

aten = torch.ops.aten
SUNK = (LowerGathers(), LowerReductions(), SinkWaits())


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def most_in_flight(graph: fx.Graph) -> int:
    """How many gathers of parameters are started and not yet waited for, at the worst moment."""
    in_flight: dict[fx.Node, None] = {}
    most = 0
    for node in graph.nodes:
        if nodes.is_all_gather(node):
            in_flight[node] = None
            most = max(most, len(in_flight))
        elif nodes.is_wait(node):
            in_flight.pop(node.args[0], None)
    return most


def hidden_matmuls(graph: fx.Graph) -> list[int]:
    """For each gather how many matmuls run between its start and its wait."""
    order = nodes.order_of(graph)
    matmuls = [order[node] for node in graph.nodes if node.target is aten.mm.default]
    return [
        sum(order[start] < place < order[nodes.wait_of(start)] for place in matmuls)  # pyright: ignore[reportArgumentType]
        for start in nodes.call_functions(graph, nodes.is_all_gather)
    ]


@pytest.mark.usefixtures("world")
def test_each_gather_starts_before_the_matmul_ahead_of_its_own() -> None:
    found = traced(deep, SUNK)
    assert hidden_matmuls(found.graphs["forward"].graph) == [0] * 6
    assert apply(HoistStarts(), found, "forward")
    assert hidden_matmuls(found.graphs["forward"].graph) == [0, 1, 1, 1, 1, 1]
    (
        FileCheck()
        .check("all_gather_0_weight")
        .check("all_gather_1_weight")
        .check("wait_0_weight")
        .check("aten.mm")
        .check("all_gather_2_weight")
        .check("wait_1_weight")
        .check("aten.mm")
        .run(graph_text(found.graphs["forward"].graph))
    )


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_no_more_gathers_are_in_flight_than_asked(prefetch: int, room: int) -> None:
    buckets = [BucketCollectives(bucket_bytes=room * 256)] if room else []
    for direction in ("forward", "backward"):
        found = traced(deep, [*SUNK[:2], *buckets, SUNK[2]])
        apply(HoistStarts(prefetch=prefetch), found, direction)
        graph = found.graphs[direction].graph
        gathers = len(list(nodes.call_functions(graph, nodes.is_all_gather)))
        assert most_in_flight(graph) == min(prefetch + 1, gathers)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("layers", "in_flight"), [(1, 2), (2, 2), (3, 3), (4, 4), (5, 5), (99, 6)])
def test_no_more_bytes_are_in_flight_than_asked(layers: int, in_flight: int) -> None:
    """One gather is prefetched in any case."""
    found = traced(deep, SUNK)
    assert apply(HoistStarts(prefetch=9, in_flight_bytes=layers * 256), found, "forward")
    assert most_in_flight(found.graphs["forward"].graph) == in_flight


@pytest.mark.usefixtures("world")
def test_a_gather_of_the_models_own_is_left_alone() -> None:
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    product = drawing.call(aten.mm.default, x, x)
    start = drawing.start_gather(shard, "w")
    wait = drawing.wait(start)
    gm = drawing.done(drawing.call(aten.mm.default, product, wait))
    twin = copy_of(gm)
    assert apply(HoistStarts(), Traced(gm, {"forward": gm}, PassContext()), "forward")
    for node in twin.graph.nodes:
        meta.set_parameters(node, [], [])
    assert not apply(HoistStarts(), Traced(twin, {"forward": twin}, PassContext()), "forward")


@pytest.mark.usefixtures("world")
def test_prefetch_zero_moves_nothing() -> None:
    found = traced(deep, SUNK)
    before = names_of(found.graphs["forward"].graph)
    assert not apply(HoistStarts(prefetch=0), found, "forward")
    assert names_of(found.graphs["forward"].graph) == before
    assert found.ctx.notes == [("hoist_starts", "forward", "no gather can start earlier")]


@pytest.mark.usefixtures("world")
def test_casts_and_pads_move_with_the_start_they_feed() -> None:
    found = traced(Autocast, SUNK)
    assert apply(HoistStarts(), found, "forward")
    assert most_in_flight(found.graphs["forward"].graph) == 2


@pytest.mark.usefixtures("world")
def test_a_gather_of_something_computed_is_left_alone() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4, 8)
    other = drawing.call(aten.relu.default, drawing.call(aten.relu.default, x))
    mean = drawing.call(aten.neg.default, x)
    gm = drawing.done(other, drawing.wait(drawing.start_gather(mean, "mean")))
    before = names_of(gm.graph)
    assert not apply(HoistStarts(), Traced(gm, {"forward": gm}, PassContext()), "forward")
    assert names_of(gm.graph) == before


@pytest.mark.usefixtures("world")
def test_means_of_replicated_gradients_stay_where_they_are() -> None:
    found = traced(deep, SUNK, zero_stage=0)
    before = names_of(found.graphs["backward"].graph)
    assert not apply(HoistStarts(prefetch=3), found, "backward")
    assert names_of(found.graphs["backward"].graph) == before


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("prefetch", [1, 2])
def test_second_run_changes_nothing(prefetch: int) -> None:
    found = traced(deep, SUNK)
    for direction in ("forward", "backward"):
        assert apply(HoistStarts(prefetch=prefetch), found, direction)
        assert not apply(HoistStarts(prefetch=prefetch), found, direction)


@pytest.mark.usefixtures("world")
def test_order_of_the_collectives_stays() -> None:
    """Or ranks whose graphs differ by a pad would start them in different orders."""
    found = traced(mlp, SUNK)
    for direction in ("forward", "backward"):
        graph = found.graphs[direction].graph
        before = [node for node in graph.nodes if nodes.is_all_gather(node)]
        assert apply(HoistStarts(prefetch=2), found, direction)
        assert [node for node in graph.nodes if nodes.is_all_gather(node)] == before


def test_bad_prefetch_is_refused_when_the_pass_is_built() -> None:
    with pytest.raises(ValueError, match="hoist_starts: prefetch=-1 is negative; write 0"):
        HoistStarts(prefetch=-1)
    with pytest.raises(ValueError, match="hoist_starts: in_flight_bytes=0 holds nothing; write a positive number"):
        HoistStarts(in_flight_bytes=0)


def test_it_is_refused_before_waits_are_sunk() -> None:
    with pytest.raises(PreconditionError, match="hoist_starts requires waits_sunk, which no earlier pass provides"):
        PassList([HoistStarts()])


def test_results_are_bitwise_the_same() -> None:
    ranks = by_rank(mlp, SUNK, world=3)
    for direction in ("forward", "backward"):
        before = [copy_of(found.graphs[direction]) for found in ranks]
        for found in ranks:
            assert HoistStarts(prefetch=2).run(found.graphs[direction], found.ctx)
        assert_same_results(before, [found.graphs[direction] for found in ranks])


def written_shard(*, casts: bool) -> tuple[fx.GraphModule, Traced]:
    """mm, shard.add_(1), all_gather, wait, mm; the gather may send a copy that was made ahead of the write."""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    product = drawing.call(aten.mm.default, x, x)
    copied = drawing.call(aten.clone.default, shard, works_for="w", name="copied") if casts else shard
    drawing.call(aten.add_.Tensor, shard, 1, name="write")
    gm = drawing.done(drawing.call(aten.mm.default, product, drawing.wait(drawing.start_gather(copied, "w"))))
    return gm, Traced(gm, {"forward": gm}, PassContext(direction="forward"))


def test_gather_does_not_move_past_writes_to_its_input() -> None:
    with fake_world(2):
        gm, found = written_shard(casts=False)
        before = names_of(gm.graph)
        for entry in (SinkWaits(), HoistStarts(prefetch=3)):
            assert not apply(entry, found, "forward")
        assert names_of(gm.graph) == before


def test_copy_stays_before_writes_to_its_source() -> None:
    with fake_world(2):
        gm, found = written_shard(casts=True)
        for entry in (SinkWaits(), HoistStarts(prefetch=3)):
            apply(entry, found, "forward")
            names = names_of(gm.graph)
            assert names.index("copied") < names.index("write")
        assert names.index("all_gather_w") < names.index("mm_default")  # it reads the copy, and may start early
