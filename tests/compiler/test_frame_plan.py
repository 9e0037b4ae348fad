"""The plan of a frame: a function of what was captured, with a variant for each step from which on a pass counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import fx

from tests.support.graphs import Traced, fake_world, mlp, traced
from zgraph import GraphPass, Hardware, PassContext, PassList, PreconditionError, Target
from zgraph.compiler.fit_budget import plan_within_budget
from zgraph.compiler.frame_plan import FramePlan, plan_frame
from zgraph.graph import nodes
from zgraph.graph.text import graph_text
from zgraph.passes import CompressGradients, NoFeedback, ScheduleOverlap, presets
from zgraph.scheduling.problem import Limits


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def ignore(graph_pass: GraphPass | None, ctx: PassContext, graph: fx.Graph) -> None: ...


def texts(plan: FramePlan) -> list[list[str]]:
    return [[graph_text(gm.graph) for gm in variant.graphs.values()] for variant in plan.variants]


@pytest.mark.parametrize("train", [True, False])
def test_captured_graph_stays_unchanged(train: bool) -> None:
    found = traced(mlp, train=train)
    if not train:
        found.know(split=None)
    before = graph_text(found.captured.graph)
    plans = [plan_frame(found.captured, PassList(presets.default()), found.ctx, ignore) for _ in range(2)]
    assert graph_text(found.captured.graph) == before
    assert found.ctx.notes == [] and plans[0].ctx.notes == plans[1].ctx.notes != []
    assert texts(plans[0]) == texts(plans[1])
    assert [*plans[0].graphs] == (["forward", "backward"] if train else ["inference"])
    assert [run.name for run in plans[0].runs] == [run.name for run in plans[1].runs]


def test_limits_are_those_of_the_pass_that_orders_by_costs() -> None:
    found = traced(mlp)
    assert plan_frame(found.captured, PassList(presets.default()), found.ctx, ignore).limits is None
    target = Target(hardware=Hardware.preset("cpu"))
    limited = ScheduleOverlap(in_flight_bytes=99)
    passes = [limited if isinstance(one, ScheduleOverlap) else one for one in presets.planned()]
    pipeline = PassList(passes, target=target)
    ctx = replace(target.known_to(found.ctx, found.captured.graph), plan_bytes=10**6)
    limits = plan_frame(found.captured, pipeline, ctx, ignore).limits
    assert limits == Limits(budget_bytes=10**6, in_flight_bytes=99)


def test_dumps_see_captured_graphs_and_last_variants_passes() -> None:
    seen: list[tuple[str, str]] = []
    found = traced(mlp)

    def observe(graph_pass: GraphPass | None, ctx: PassContext, graph: fx.Graph) -> None:
        seen.append(("captured" if graph_pass is None else graph_pass.name, ctx.direction))

    pipeline = PassList(compressed(2))
    plan_frame(found.captured, pipeline, found.ctx, observe)
    both = ("forward", "backward")
    assert seen == [
        *[(name, "joint") for name in ("captured", *(entry.name for entry in pipeline.of("joint")))],
        *[(name, where) for name in ("captured", *(entry.name for entry in pipeline.of("graph"))) for where in both],
    ]


def compressed(*from_steps: int) -> list[GraphPass]:
    """The default, and for each step a pass that compresses gradients from there on: the last one all of them."""
    passes = presets.default()
    place = [entry.name for entry in passes].index("lower_reductions")
    sizes = [10**6] * (len(from_steps) - 1) + [1]
    passes[place:place] = [
        CompressGradients(method=NoFeedback(), min_numel=size, min_dims=1, warmup_steps=steps)
        for size, steps in zip(sizes, from_steps, strict=True)
    ]
    return passes


def quantizations(found: FramePlan) -> list[int]:
    backwards = [variant.graphs["backward"].graph for variant in found.variants]
    return [len(list(nodes.call_functions(graph, nodes.is_quantize))) for graph in backwards]


@pytest.mark.parametrize(
    ("from_steps", "steps", "expected"), [((0,), [0], [5]), ((3,), [0, 3], [0, 5]), ((2, 5), [0, 2, 5], [0, 0, 5])]
)
def test_each_from_step_of_passes_has_a_variant(
    from_steps: tuple[int, ...], steps: list[int], expected: list[int]
) -> None:
    found = traced(mlp)
    plan = plan_frame(found.captured, PassList(compressed(*from_steps)), found.ctx, ignore)
    assert [variant.from_step for variant in plan.variants] == steps
    assert quantizations(plan) == expected
    assert len({graph_text(variant.graphs["forward"].graph) for variant in plan.variants}) == 1
    assert plan.graphs is plan.variants[-1].graphs
    noted = [text for name, where, text in plan.ctx.notes if (name, where) == ("compress_gradients", "backward")]
    assert len(noted) == len(from_steps)


@dataclass(frozen=True, kw_only=True)
class LateForward(GraphPass):
    """Adds a node to every graph, from the second step on."""

    name: ClassVar[str] = "late_forward"

    @property
    def from_step(self) -> int:
        return 1

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        with gm.graph.inserting_before(nodes.output_of(gm.graph)):
            gm.graph.call_function(max, (1, 2))
        return True


def test_a_pass_that_counts_later_may_not_change_forward() -> None:
    found = traced(mlp)
    with pytest.raises(PreconditionError, match="late_forward starts at step 1 and has changed the forward graph"):
        plan_frame(found.captured, PassList([*presets.default(), LateForward()]), found.ctx, ignore)


def budgeted(found: Traced, budget_bytes: int) -> tuple[FramePlan, list[int]]:
    """The plan that a search returns, and what it planned for on its way."""
    asked: list[int] = []
    target = Target(hardware=Hardware.preset("h100"), budget_bytes=budget_bytes)
    ctx = target.known_to(found.ctx, found.captured.graph)

    def plan_for(plan_bytes: int) -> FramePlan:
        asked.append(plan_bytes)
        pipeline = PassList(presets.planned(), target=target)
        return plan_frame(found.captured, pipeline, replace(ctx, plan_bytes=plan_bytes), ignore)

    return plan_within_budget(plan_for, budget_bytes, "0/0"), asked


def test_plan_within_budget_is_the_last_one_made() -> None:
    found = traced(mlp)
    plenty, asked = budgeted(found, 10**9)
    assert asked == [10**9] and plenty.ctx.plan_bytes == 10**9
    least, asked = budgeted(found, plenty.peak_bytes - 1)
    assert least.peak_bytes < plenty.peak_bytes
    assert least.ctx.plan_bytes == asked[-1] and len(asked) == len(set(asked))
    with pytest.raises(ValueError, match=r"the step of frame 0/0 does not fit into budget_bytes=1\. The smallest"):
        budgeted(found, 1)
