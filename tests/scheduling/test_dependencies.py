"""The scheduler's dependency graph and queues, judged by networkx, which knows nothing of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import networkx
import pytest
import torch

from tests.support.graphs import Drawing, fake_world
from tests.support.random_steps import draw_step
from zgraph.analysis.cost import FREE, NodeCost
from zgraph.graph import nodes
from zgraph.scheduling.dependencies import Dependencies
from zgraph.scheduling.queues import Queues
from zgraph.scheduling.simulate import Work
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import Lane

aten = torch.ops.aten
SEEDS = range(12)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def drawn(seed: int) -> tuple[Work, Dependencies, Queues]:
    step = draw_step(seed, layers=6)
    work = Work.of(step.order, step.costs, Sharing())
    by_data = Dependencies.of(work)
    queues = Queues.of(work, by_data)
    return work, by_data, queues


def as_network(dependencies: Dependencies) -> networkx.DiGraph[int]:
    edges = [(source, number) for number, needs in enumerate(dependencies.needs) for source in needs]
    return networkx.DiGraph(edges)


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_lie_between_needed_and_needing_compute(seed: int) -> None:
    _, by_data, queues = drawn(seed)
    ranks, last = by_data.rank, len(by_data.compute_order) - 1
    for dependencies in (by_data, by_data.in_queues(queues.queues)):
        network = as_network(dependencies)
        assert networkx.is_directed_acyclic_graph(network)
        for number in (number for number, moves in enumerate(dependencies.movable) if moves):
            behind = [ranks[one] for one in networkx.descendants(network, number) if one in ranks]
            assert dependencies.use[number] == min(behind, default=last)
            if dependencies is by_data:
                ahead = [ranks[one] + 1 for one in networkx.ancestors(network, number) if one in ranks]
                assert dependencies.release[number] == max(ahead, default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_queued_starts_follow_one_another_on_one_lane(seed: int) -> None:
    work, by_data, queues = drawn(seed)
    network = as_network(by_data.in_queues(queues.queues))
    assert sorted(start for queue in queues.queues for start in queue) == list(queues.limited_bytes)
    for queue in queues.queues:
        assert len({(work.lane[start], by_data.reads_inputs_alone(start)) for start in queue}) == 1
        assert all(networkx.has_path(network, before, start) for before, start in pairwise(queue))
        assert all(queues.queues[queues.queue_of[start]] is queue for start in queue)
    gathers_first = [by_data.reads_inputs_alone(queue[0]) for queue in queues.queues]
    assert gathers_first == sorted(gathers_first, reverse=True)


def test_start_is_needed_as_early_as_later_queue_members() -> None:
    """all_gather_w, all_gather_v, mm of v, mm of w: v cannot start before w has."""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    w, v = (drawing.start_gather(shard, name) for name in ("w", "v"))
    first = drawing.call(aten.mm.default, x, drawing.wait(v))
    gm = drawing.done(drawing.call(aten.mm.default, first, drawing.wait(w)))
    costs = {node: NodeCost(Lane.of_group("0"), 1.0) if nodes.is_start(node) else FREE for node in gm.graph.nodes}
    work = Work.of(list(gm.graph.nodes), costs, Sharing())
    by_data = Dependencies.of(work)
    queued = by_data.in_queues(Queues.of(work, by_data).queues)
    assert [found.use[work.numbers[w]] for found in (by_data, queued)] == [1, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_starts_after_a_node_are_reached_through_movable_nodes(seed: int) -> None:
    _, by_data, _ = drawn(seed)
    moving = [number for number, moves in enumerate(by_data.movable) if moves]
    for number in moving:
        network = networkx.DiGraph(as_network(by_data).subgraph(moving))
        network.add_node(number)
        others = [start for start in network if by_data.is_start[start] and start != number]
        network.remove_edges_from(list(network.in_edges(others)))
        assert set(by_data.after[number]) == networkx.ancestors(network, number) & set(others)
