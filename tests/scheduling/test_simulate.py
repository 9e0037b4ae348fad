"""Schedules on paper: who runs when, who waits for whom, and what is alive meanwhile."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, fake_world
from tests.support.judges.event_machine import peak_bytes, replay
from tests.support.random_steps import draw_step
from zgraph.analysis.cost import FREE, NodeCost
from zgraph.analysis.storages import storages_of
from zgraph.graph import nodes
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Sharing, Timeline
from zgraph.tiers.lanes import COMPUTE, DISK, HOST_TO_DEVICE, Lane
from zgraph.torch_compat.collectives import wait_op

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def run(gm: fx.GraphModule, sharing: Sharing | None = None, **us: float) -> Timeline:
    """With these microseconds by name: of collectives of w on group:0, of v on group:1, else of compute."""
    order = list(gm.graph.nodes)
    costs = {node: FREE for node in order if node.op == "call_function"}
    for node in costs:
        if nodes.is_start(node):
            lane = Lane.of_group("1") if node.name.endswith("_v") else Lane.of_group("0")
            costs[node] = NodeCost(lane, us[node.name.rsplit("_", 1)[1]])
        elif node.name in us:
            costs[node] = NodeCost(COMPUTE, us[node.name])
    return simulate(order, costs, sharing)


def by_name(timeline: Timeline, values: str) -> dict[str, float]:
    return {node.name: us for node, us in getattr(timeline, values).items()}


def prefetched() -> fx.GraphModule:
    """all_gather_w, one, wait_w, two"""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    start = drawing.start_gather(shard, "w")
    one = drawing.call(aten.relu.default, x, name="one")
    return drawing.done(drawing.call(aten.add.Tensor, one, drawing.wait(start), name="two"))


@pytest.mark.parametrize(("gather", "step", "exposed"), [(3.0, 12.0, 0.0), (5.0, 12.0, 0.0), (8.0, 15.0, 3.0)])
def test_a_gather_is_hidden_by_what_runs_before_its_wait(gather: float, step: float, exposed: float) -> None:
    """compute [one 5].[two 7], group:0 [gather]"""
    found = run(prefetched(), w=gather, one=5.0, two=7.0)
    assert found.step_us == step
    assert by_name(found, "exposed_us") == {"all_gather_w": exposed}
    assert by_name(found, "hidden_us") == {"all_gather_w": gather - exposed}
    assert found.busy_us == {COMPUTE: 12.0, Lane.of_group("0"): gather}
    assert found.utilisation(COMPUTE) == 12.0 / step and found.utilisation(DISK) == 0.0
    names = [node.name for node in found.critical_path()]
    assert names == (["all_gather_w", "two"] if exposed else ["one", "two"])


def two_gathers(second: str) -> fx.GraphModule:
    """all_gather_w, all_gather_<second>, one, both waits, two"""
    drawing = Drawing()
    x, shard = drawing.input("x", 8, 8), drawing.input("shard", 4, 8)
    starts = [drawing.start_gather(shard, name) for name in ("w", second)]
    one = drawing.call(aten.relu.default, x, name="one")
    left, right = map(drawing.wait, starts)
    return drawing.done(drawing.call(aten.addmm.default, one, left, right, name="two"))


@pytest.mark.parametrize(
    ("second", "sharing", "ends", "exposed"),
    [
        # One lane: one after the other.   group:0 [w 4][u 6]
        ("u", None, (4.0, 10.0), (0.0, 5.0)),
        # Two lanes: side by side.         group:0 [w 4]  group:1 [v 6]
        ("v", None, (4.0, 6.0), (0.0, 1.0)),
        # Two lanes of one link: each at half speed until w is done at 8, and v alone for the last 2 us.
        ("v", Sharing(links={Lane.of_group("0"): "eth0", Lane.of_group("1"): "eth0"}), (8.0, 10.0), (3.0, 2.0)),
        # Two at once of one lane, which get 1.6 times through what one does: each at 0.8 until w is done at 5.
        ("u", Sharing(at_once=2, gains={"group:0": 1.6}), (5.0, 7.0), (0.0, 2.0)),
        # They would go no faster than alone if the link had room for more.
        ("u", Sharing(at_once=2, gains={"group:0": 3.0}), (4.0, 6.0), (0.0, 1.0)),
        # The program spends 1 us on each: w begins at 1, u at 5, behind it, and one ends at 7.
        ("u", Sharing(issue_us=1.0), (5.0, 11.0), (0.0, 4.0)),
        # Copies that take half of the core: compute is slowed down to 5 + (4 + 1) us; both at once stop it.
        ("u", Sharing(compute_share=0.5), (4.0, 10.0), (0.0, 0.0)),
        ("v", Sharing(compute_share=0.5), (4.0, 6.0), (0.0, 0.0)),
    ],
)
def test_lanes_queue_and_links_are_shared(
    second: str, sharing: Sharing | None, ends: tuple[float, float], exposed: tuple[float, float]
) -> None:
    found = run(two_gathers(second), sharing, w=4.0, u=6.0, v=6.0, one=5.0, two=7.0)
    names = ("all_gather_w", f"all_gather_{second}")
    assert tuple(span.end_us for node, span in found.spans.items() if node.name in names) == ends
    assert tuple(by_name(found, "exposed_us").values()) == exposed


def test_a_queued_collective_says_whom_it_waited_for() -> None:
    found = run(two_gathers("u"), w=4.0, u=6.0, one=1.0, two=7.0)
    assert [node.name for node in found.critical_path()] == ["all_gather_w", "all_gather_u", "two"]


def test_copies_from_disk_and_host_follow_one_another() -> None:
    """disk [read 4], host_to_device ....[copy 3], compute [one 1]......[two 2], which waits without a wait node."""
    drawing = Drawing()
    x, held = drawing.input("x", 8, 8), drawing.input("held", 8, 8)
    read = drawing.call(aten.clone.default, held)
    copy = drawing.call(aten.clone.default, read)
    one = drawing.call(aten.relu.default, x)
    two = drawing.call(aten.add.Tensor, one, copy)
    gm = drawing.done(two)
    costs = {
        read: NodeCost(DISK, 4.0),
        copy: NodeCost(HOST_TO_DEVICE, 3.0),
        one: NodeCost(COMPUTE, 1.0),
        two: NodeCost(COMPUTE, 2.0),
    }
    found = simulate(list(gm.graph.nodes), costs)
    assert found.step_us == 9.0
    assert by_name(found, "exposed_us") == {read.name: 0.0, copy.name: 6.0}
    assert found.critical_path() == [read, copy, two]


def test_members_of_a_coalesced_collective_arrive_together() -> None:
    drawing = Drawing()
    x = drawing.input("x", 8, 8)
    both = drawing.call(torch.ops._c10d_functional.all_reduce_coalesced.default, [x, x], "sum", drawing.group_name)
    parts = [drawing.call(wait_op(), drawing.call(operator.getitem, both, index)) for index in (0, 1)]
    gm = drawing.done(drawing.call(aten.add.Tensor, *parts))
    order = list(gm.graph.nodes)
    costs = {node: FREE for node in nodes.call_functions(gm.graph, lambda _: True)}
    found = simulate(order, costs | {both: NodeCost(Lane.of_group("0"), 5.0)})
    assert (found.step_us, found.exposed_us) == (5.0, {both: 5.0})


def test_unawaited_collective_belongs_to_the_step() -> None:
    drawing = Drawing()
    shard = drawing.input("shard", 4, 8)
    gm = drawing.done(drawing.start_gather(shard, "w"))
    found = run(gm, w=5.0)
    assert (found.step_us, by_name(found, "hidden_us")) == (5.0, {"all_gather_w": 0.0})


def test_an_empty_schedule_takes_no_time() -> None:
    found = simulate([], {})
    assert (found.step_us, found.critical_path(), found.memory.peak_bytes, found.utilisation(COMPUTE)) == (
        0,
        [],
        0,
        0,
    )


def shuffled(order: Sequence[fx.Node], seed: int) -> list[fx.Node]:
    """Another order in which every node stands behind its inputs."""
    chance = random.Random(seed)
    left, found = list(order), list[fx.Node]()
    while left:
        ready = [node for node in left if node.op != "output" and not set(node.all_input_nodes) & set(left)] or left
        found.append(chance.choice(ready))
        left.remove(found[-1])
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_second_account_of_the_machine_agrees(seed: int) -> None:
    """Step, exposure and peak, on random orders of random steps, with links shared and compute slowed down or not."""
    step = draw_step(seed, layers=5)
    order = shuffled(step.order, seed)
    links = {Lane.of_group("0"): "eth0", Lane.of_group("1"): "eth0"} if seed % 3 == 0 else {}
    gains = {"eth0": 1.5, "group:0": 1.25} if seed % 5 else {}
    sharing = Sharing(
        links=links,
        at_once=1 + seed % 2,
        gains=gains,
        issue_us=(0.0, 0.5)[seed // 4 % 2],
        compute_share=(0.0, 0.25, 0.5, 1.0)[seed // 2 % 4],
    )
    storages = storages_of(order, inputs_die=seed % 2 == 0)
    found = simulate(order, step.costs, sharing, storages)
    expected = replay(order, step.costs, sharing)
    assert found.step_us == pytest.approx(float(expected.now), rel=1e-12)
    exposed = {start: float(us) for start, us in expected.exposed.items() if us}
    # A collective that ends within rounding of its wait may be waited for by less than a millionth of a microsecond.
    assert {start: us for start, us in found.exposed_us.items() if us > 1e-6} == pytest.approx(exposed, rel=1e-9)
    assert found.memory.peak_bytes == peak_bytes(order, storages)
    for start, us in found.hidden_us.items():
        assert -1e-9 <= us <= found.spans[start].us + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_a_critical_path_has_no_gaps(seed: int) -> None:
    step = draw_step(seed, layers=5)
    found = simulate(shuffled(step.order, seed), step.costs)
    path = found.critical_path()
    assert found.spans[path[0]].begin_us == 0 and found.spans[path[-1]].end_us == found.step_us
    for before, after in pairwise(path):
        assert found.spans[before].end_us == pytest.approx(found.spans[after].begin_us)


def test_refusals_name_the_node() -> None:
    gm = prefetched()
    order = list(gm.graph.nodes)
    costs = {node: FREE for node in order if node.op == "call_function"}
    with pytest.raises(ValueError, match="simulate: one has no cost; give one to every call, NodeCost"):
        simulate(order, {node: cost for node, cost in costs.items() if node.name != "one"})
    with pytest.raises(ValueError, match="simulate: two comes before one, which it reads"):
        simulate([node for node in order if node.name != "one"] + [order[3]], costs)
    with pytest.raises(ValueError, match=r"simulate: two costs -1\.0 us; write a finite number that is not negative"):
        simulate(order, costs | {order[-2]: NodeCost(COMPUTE, -1.0)})
    with pytest.raises(ValueError, match=r"simulate: compute_share=1\.5 is the part of .* write a number from 0 to 1"):
        Sharing(compute_share=1.5)
    with pytest.raises(ValueError, match="simulate: at_once=0 collectives of a group; write 1 or more"):
        Sharing(at_once=0)
    with pytest.raises(ValueError, match=r"simulate: issue_us=-1\.0; write a finite time"):
        Sharing(issue_us=-1.0)
    with pytest.raises(ValueError, match=r"simulate: gain=0\.5 of eth0"):
        Sharing(gains={"eth0": 0.5})
