"""What is kept and what is made again: the model is the step that torch makes, and the choice close to the best."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from tests.support.graphs import Drawing, fake_world
from tests.support.random_joint_graphs import draw_training, model_of
from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import step_curve
from zgraph.graph import edits
from zgraph.passes.choose_lifetimes import apply
from zgraph.scheduling.lifetimes.lifetime_model import StepEstimate
from zgraph.scheduling.lifetimes.partitioned_model import PartitionedModel
from zgraph.scheduling.lifetimes.plan_lifetimes import greedy_frontier
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import COMPUTE, Lane
from zgraph.torch_compat.aot import min_cut_partition

aten = torch.ops.aten
ONE_US = NodeCost(COMPUTE, 1.0)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


@pytest.mark.parametrize("seed", range(12))
def test_predicted_step_equals_the_partitioners(seed: int) -> None:
    """Whatever is dropped: the same calls, and during each of them the same bytes."""
    chance = random.Random(seed)
    gm, costs = draw_training(seed, layers=5)
    model = model_of(gm, costs)
    for _ in range(3):
        estimate = model.estimate(dict.fromkeys(value for value in model.values if chance.random() < 0.5))
        tagged = edits.copy_of(gm)
        apply(estimate, {node.name: node for node in tagged.graph.nodes})
        forward, backward = min_cut_partition(tagged, (), num_fwd_outputs=1)
        curve = step_curve(forward.graph, backward.graph, user_outputs=1)
        calls = [place for place, node in enumerate(curve.nodes) if node.op == "call_function"]
        assert list(estimate.bytes_during) == [curve.bytes_during[place] for place in calls]
        computed = [node.name for node in forward.graph.nodes if node.op == "call_function"]
        again = [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in computed]
        assert again == [node.name for node in estimate.recomputed if node.name in computed]


def every_look(model: PartitionedModel) -> list[StepEstimate]:
    subsets = itertools.chain.from_iterable(
        itertools.combinations(model.values, count) for count in range(len(model.values) + 1)
    )
    return [model.estimate(dict.fromkeys(subset)) for subset in subsets]


def fastest(estimates: list[StepEstimate], target_bytes: int) -> float | None:
    return min((estimate.step_us for estimate in estimates if estimate.peak_bytes <= target_bytes), default=None)


def test_choice_is_near_optimal_and_beats_all_or_nothing() -> None:
    """Every subset of what can be dropped, for five budgets from the smallest that is feasible to more than enough."""
    ratios: list[float] = []
    better = worse = missed = 0
    for seed in range(25):
        model = model_of(*draw_training(seed, layers=4))
        estimates, path = every_look(model), greedy_frontier(model)
        parameters = dict.fromkeys(value for value in model.values if value.gather is not None)
        activations = dict.fromkeys(value for value in model.values if value.gather is None)
        whole = [{}, parameters, activations, parameters | activations]
        all_or_nothing = [model.estimate(dropped) for dropped in whole]
        least, most = min(estimate.peak_bytes for estimate in estimates), estimates[0].peak_bytes
        for quarter in range(5):
            target = least + (most - least) * quarter // 4
            found, best, simple = path.choose(target), fastest(estimates, target), fastest(all_or_nothing, target)
            assert best is not None
            if found.peak_bytes > target:
                missed += 1
                continue
            ratios.append(found.step_us / best)
            better += simple is None or found.step_us < simple
            worse += simple is not None and found.step_us > simple
    assert missed <= 4 and max(ratios) < 1.15 and sum(ratios) < 1.01 * len(ratios)
    assert sum(ratio == 1 for ratio in ratios) > 0.9 * len(ratios)
    assert better > len(ratios) / 3 and worse == 0


@pytest.mark.parametrize("seed", range(5))
def test_more_bytes_are_never_slower_on_paper(seed: int) -> None:
    model = model_of(*draw_training(seed, layers=8))
    path = greedy_frontier(model)
    peaks = sorted(estimate.peak_bytes for estimate in path.estimates)
    chosen = [path.choose(target) for target in peaks]
    assert [estimate.step_us for estimate in chosen] == sorted((estimate.step_us for estimate in chosen), reverse=True)
    assert all(estimate.peak_bytes <= target for estimate, target in zip(chosen, peaks, strict=True))
    assert path.choose(0).peak_bytes == peaks[0]
    assert len({estimate.peak_bytes for estimate in chosen}) > 3


def chain_of(call: str) -> tuple[PartitionedModel, fx.Node]:
    """x, a = exp x, b = call(a), y = exp b; backward reads a, b and y: may b be made again out of a?"""
    drawing = Drawing()
    x, tangent = drawing.input("primals_1", 8, 8), drawing.input("tangents_1", 8, 8)
    a = drawing.call(aten.exp.default, x)
    if call == "a random one":
        b = drawing.call(aten.rand_like.default, a)
    elif call == "a written one":
        written = drawing.input("primals_2", 8, 8)
        b = drawing.call(aten.mm.default, a, written)
    else:
        b = drawing.call(aten.mm.default, a, a)
    y = drawing.call(aten.mm.default, b, b)
    if call == "one of the user's":
        b.meta["recompute"], b.meta["ac_graph_id"] = CheckpointPolicy.MUST_SAVE, 0
    if call == "a written one":
        drawing.call(aten.copy_.default, written, y)
    grad = drawing.call(aten.mm.default, tangent, drawing.call(aten.t.default, b))
    grad = drawing.call(aten.mm.default, grad, drawing.call(aten.t.default, a))
    gm = drawing.done(y, grad)
    forward, backward = min_cut_partition(gm, (), num_fwd_outputs=1)
    ends = forward.graph, backward.graph
    model = PartitionedModel(gm.graph, *ends, user_outputs=1, cost_of=lambda node: ONE_US, sharing=Sharing())
    return model, next(node for node in gm.graph.nodes if node.name == b.name)


@pytest.mark.parametrize(
    ("call", "expected"),
    [("any other", True), ("a random one", False), ("a written one", False), ("one of the user's", False)],
)
def test_unrepeatable_values_are_kept(call: str, expected: bool) -> None:
    model, node = chain_of(call)
    estimate = model.estimate({})
    assert node in estimate.saved or any(node in one.all_input_nodes for one in estimate.saved)
    droppable = [value for value in model.values if model.chain(value, estimate) is not None]
    assert any(source is node for value in droppable for source in (*value.nodes, *value.nodes[0].all_input_nodes)) == (
        expected
    )


def test_a_parameter_is_a_value_like_any_other() -> None:
    """Compute hides every gather: parameters are gathered again before anything is computed again, and vice versa."""
    gm, costs = draw_training(3, layers=6)
    model = model_of(gm, costs)
    for slow in (COMPUTE, Lane.of_group("0")):
        model.costs = {
            node: NodeCost(cost.lane, cost.us * (100 if cost.lane == slow else 1)) for node, cost in model.costs.items()
        }
        first = next(iter(greedy_frontier(model).estimates[1].dropped))
        assert (first.gather is not None) == (slow == COMPUTE)
        model.costs = {node: costs[node.name] for node in model.costs}
