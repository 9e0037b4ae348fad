"""Order collectives and the copies around them so that compute hides them, within the memory budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.analysis.storages import rows_of_its_own, storages_of
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes
from zgraph.graph import edits, meta, nodes, traits
from zgraph.passes.hoist_starts import HoistStarts
from zgraph.passes.sink_waits import SinkWaits
from zgraph.passes.step.update_as_reduced import UpdateAsReduced
from zgraph.runtime.chunks import MIB
from zgraph.scheduling.exposure import why_exposed
from zgraph.scheduling.plan_overlap import Plan, plan_overlap
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline

RULES: tuple[GraphPass, ...] = (SinkWaits(reductions_in_flight=3), HoistStarts(prefetch=3), UpdateAsReduced())
NOTES = 5  # exposed collectives that are explained, the longest first


@dataclass(frozen=True, kw_only=True)
class ScheduleOverlap(GraphPass):
    """Choose the order of collectives with the shortest simulated step within the memory budget.

    Candidates are the orders found by a search, the present order, and the order of the rules in `presets.default`.
    Unless the order of the rules exceeds the budget, slower candidates, and equally fast ones with a higher peak, are
    dropped. Of the remaining orders within 1 % of the fastest, the one with the lowest peak is used.

    Within a process group, gathers keep their order, and so do reductions; only their interleaving is planned. In a
    graph without collectives, each update moves to where its gradient is ready. Costs of copying a rank's own rows are
    ignored, because all ranks must choose the same order.

    Leaves alone: the order of compute. The model's own collectives are not planned; their waits move down by a rule.

    Attributes:
        in_flight_bytes: maximum bytes of unsharded parameters and gradients with a collective in flight. Two
            collectives, and the bytes that the rules have in flight, are always allowed. Replicated gradients do not
            count: their means are equally large, so waiting frees nothing. The target's budget counts everything.
    """

    in_flight_bytes: int = 64 * MIB

    name: ClassVar[str] = "schedule_overlap"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.STARTS_HOISTED})

    def __post_init__(self) -> None:
        check_bytes("schedule_overlap", in_flight_bytes=self.in_flight_bytes)

    @property
    def needs_target(self) -> bool:
        return True

    def limits(self, ctx: PassContext) -> Limits:
        return Limits(budget_bytes=ctx.plan_bytes, in_flight_bytes=self.in_flight_bytes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        assert ctx.cost_of is not None  # there is a target
        order = list(gm.graph.nodes)
        if not any(traits.is_movable(node) and nodes.is_start(node) for node in order):
            found = any(meta.is_tagged_at_use(node) for node in order)
            ctx.note(self, "every gather is to stay at its use" if found else "no collectives here")
            # Costs nothing, frees gradients, and lets host updates overlap backward.
            return UpdateAsReduced().run(gm, ctx)
        own = rows_of_its_own(order)
        costs = {node: ctx.cost_of(node) for node in order if node.op == "call_function"}
        costs |= dict.fromkeys(own, FREE)
        storages = storages_of(order, inputs_die=ctx.direction == "backward", agreed=True)
        limits = self.limits(ctx)
        by_rules = order_by_rules(gm, ctx, self.in_flight_bytes)
        plan = plan_overlap(order, costs, ctx.sharing, storages, limits, by_rules)
        self._note(plan, simulate(plan.order, costs, ctx.sharing, storages), limits, ctx)
        edits.relink(plan.order)
        return plan.order != order

    def _note(self, plan: Plan, timeline: Timeline, limits: Limits, ctx: PassContext) -> None:
        before, after, by_rules = plan.before, plan.after, plan.by_rules
        assert by_rules is not None
        ctx.note(
            self,
            f"predicted {after.step_us:.0f} us, {before.step_us:.0f} us before, {by_rules.step_us:.0f} us by rules; "
            f"peak {after.peak_bytes} bytes, {before.peak_bytes} before, {by_rules.peak_bytes} by rules",
        )
        if after.excess_bytes:
            ctx.note(self, f"no order was found within the limits: {after.excess_bytes} bytes above them at worst")
        exposed = [start for start, us in timeline.exposed_us.items() if us and traits.is_movable(start)]
        exposed.sort(key=lambda start: -timeline.exposed_us[start])
        for start in exposed[:NOTES]:
            names = ", ".join(meta.parameters(start)[:3])
            exposed_us, us = timeline.exposed_us[start], timeline.spans[start].us
            reason = why_exposed(start, plan.order, timeline, limits)
            ctx.note(self, f"{start.name} ({names}): {exposed_us:.0f} us of {us:.0f} us exposed: {reason}")
        if len(exposed) > NOTES:
            left = sum(timeline.exposed_us[start] for start in exposed[NOTES:])
            ctx.note(self, f"{len(exposed) - NOTES} more collectives are exposed for {left:.0f} us together")


def order_by_rules(gm: fx.GraphModule, ctx: PassContext, in_flight_bytes: int) -> list[fx.Node]:
    """Return the order in which the passes in `RULES` would put the nodes of a graph; the graph is not changed."""
    before = list(gm.graph.nodes)
    for rule in RULES:
        if isinstance(rule, SinkWaits | HoistStarts):
            rule = replace(rule, in_flight_bytes=min(rule.in_flight_bytes, in_flight_bytes))
        rule.run(gm, replace(ctx, notes=[]))
    order = list(gm.graph.nodes)
    edits.relink(before)
    return order
