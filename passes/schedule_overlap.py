"""Put collectives, and the copies in and out of their buffers, where compute hides them, within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.storages import Storage, agreed_storages, rows_of_its_own
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import PreconditionError
from zgraph.graph import edits, meta, nodes
from zgraph.runtime.chunks import MIB
from zgraph.scheduling.builder import Builder, Score, is_no_better, problem_of
from zgraph.scheduling.exposure import why_exposed
from zgraph.scheduling.plan_schedule import plan_schedule
from zgraph.scheduling.problem import Limits, is_movable
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Sharing, Timeline

NOTES = 5  # exposed collectives that are explained, the longest first


@dataclass(frozen=True, kw_only=True)
class ScheduleOverlap(GraphPass):
    """Start gathers early enough and reductions at once, wait late, and hold no more than the budget, on the simulator.

    Never slower on paper than the order it finds: it keeps that one where it knows none better, unless it exceeds the
    limits. Decides by costs, which must be equal on all ranks; those of a rank's own rows, which may not be, are left
    out. On each group gathers keep their order, and so do reductions; their interleaving is planned.
    Leaves alone: the order of compute, and collectives of the model's own.

    Attributes:
        in_flight_bytes: of whole parameters and gradients whose collectives may be under way at once; two may be in any
            case. Replicated gradients do not count: their means are as large, so that waiting for them frees nothing.
            The budget is the context's, and counts everything.
    """

    in_flight_bytes: int = 64 * MIB

    name: ClassVar[str] = "schedule_overlap"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.STARTS_HOISTED})

    def __post_init__(self) -> None:
        if self.in_flight_bytes < 1:
            raise ValueError(
                f"schedule_overlap: in_flight_bytes={self.in_flight_bytes} holds nothing; write a positive number of "
                "bytes."
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.cost_of is None:
            raise PreconditionError(
                f"schedule_overlap on the {ctx.direction} graph: the PassContext has no cost_of to plan by; set it, or "
                "use sink_waits and hoist_starts, which need none."
            )
        order = list(gm.graph.nodes)
        if not any(is_movable(node) and nodes.is_start(node) for node in order):
            found = any(meta.is_tagged_at_use(node) for node in order)
            ctx.note(self, "every gather is to stay at its use" if found else "no collectives here")
            return False
        own = rows_of_its_own(order)
        costs = {node: ctx.cost_of(node) for node in order if node.op == "call_function"}
        costs |= {node: NodeCost("", 0.0) for node in own}
        storages = agreed_storages(order, own, inputs_die=ctx.direction == "backward")
        limits = ctx.limits = Limits(budget_bytes=ctx.plan_bytes, in_flight_bytes=self.in_flight_bytes)
        plan = plan_overlap(order, costs, ctx.sharing, storages, limits)
        self._note(plan, simulate(plan.order, costs, ctx.sharing, storages), limits, ctx)
        edits.relink(plan.order)
        return plan.order != order

    def _note(self, plan: Plan, timeline: Timeline, limits: Limits, ctx: PassContext) -> None:
        before, after = plan.before, plan.after
        ctx.note(
            self,
            f"predicted {after.step_us:.0f} us, {before.step_us:.0f} us before; peak {after.peak_bytes} bytes, "
            f"{before.peak_bytes} before",
        )
        if after.excess_bytes:
            ctx.note(self, f"no order was found within the limits: {after.excess_bytes} bytes above them at worst")
        exposed = [start for start, us in timeline.exposed_us.items() if us and is_movable(start)]
        exposed.sort(key=lambda start: -timeline.exposed_us[start])
        for start in exposed[:NOTES]:
            names = ", ".join(meta.parameters(start)[:3])
            exposed_us, us = timeline.exposed_us[start], timeline.spans[start].us
            reason = why_exposed(start, plan.order, timeline, limits)
            ctx.note(self, f"{start.name} ({names}): {exposed_us:.0f} us of {us:.0f} us exposed: {reason}")
        if len(exposed) > NOTES:
            left = sum(timeline.exposed_us[start] for start in exposed[NOTES:])
            ctx.note(self, f"{len(exposed) - NOTES} more collectives are exposed for {left:.0f} us together")


@dataclass(frozen=True)
class Plan:
    """The order to run a graph in, and how it and the one before score."""

    order: list[fx.Node]
    before: Score
    after: Score


def plan_overlap(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing,
    storages: Sequence[Storage],
    limits: Limits,
) -> Plan:
    """The best order found, or the one given where none is better."""
    problem = problem_of(order, costs, sharing, storages, limits)
    present = Builder(problem)
    for node in order:
        number = problem.work.numbers[node]
        if not present.placed[number]:
            present.issue(number)
    before = present.score()
    found = plan_schedule(problem)
    if limits.budget_bytes is not None and found.peak_bytes > limits.budget_bytes:
        # Some moment needs more than the budget; all others may use as much.
        relaxed = replace(limits, budget_bytes=found.peak_bytes)
        found = plan_schedule(problem_of(order, costs, sharing, storages, relaxed))
    after = found.score(limits)
    return Plan(list(order), before, before) if is_no_better(after, before) else Plan(found.nodes(), before, after)
