"""Place copies of what rests on the host or on disk, and updates there, by what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.analysis.liveness import curve_of
from zgraph.analysis.storages import rows_of_its_own, storages_of
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import edits, meta, nodes
from zgraph.runtime.chunks import MIB
from zgraph.scheduling.plan_overlap import Plan, plan_overlap
from zgraph.scheduling.problem import Limits


@dataclass(frozen=True, kw_only=True)
class ScheduleCopies(GraphPass):
    """Start each copy to the device just early enough, and wait for copies from it, and for updates, as late as pays.

    `StreamStates` places them by rules, behind `ScheduleOverlap`, which has not seen them. This schedules the final
    graph again, its collectives among the copies: on the simulator, where each link, the disk and the host's worker is
    a lane, and within the budget; without one within the peak of the rules, lest a slow link brings all that rests
    elsewhere at once. The order that is there is among those to choose from. Therefore the step is never slower on the
    simulator than by rules, and never holds more where it is as fast, unless the rules exceed the budget.
    Leaves alone: the order of compute, and where updates start; graphs of which nothing rests elsewhere.

    Attributes:
        in_flight_bytes: as for `ScheduleOverlap`, of collectives; what copies bring is limited by the budget.
    """

    in_flight_bytes: int = 64 * MIB

    name: ClassVar[str] = "schedule_copies"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED, Fact.STATES_STREAMED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.COPIES_SCHEDULED})

    def __post_init__(self) -> None:
        if self.in_flight_bytes < 1:
            raise ValueError(
                f"schedule_copies: in_flight_bytes={self.in_flight_bytes} holds nothing; write a positive number of "
                "bytes."
            )

    @property
    def needs_target(self) -> bool:
        return True

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        order = list(gm.graph.nodes)
        if not any(map(_rests_elsewhere, order)):
            ctx.note(self, "everything rests on the device")
            return False
        plan = plan_copies(order, ctx, self.in_flight_bytes)
        before, after = plan.before, plan.after
        ctx.note(
            self,
            f"predicted {after.step_us:.0f} us, {before.step_us:.0f} us by rules; peak {after.peak_bytes} bytes, "
            f"{before.peak_bytes} by rules",
        )
        if after.excess_bytes:
            ctx.note(self, f"no order was found within the limits: {after.excess_bytes} bytes above them at worst")
        edits.relink(plan.order)
        return plan.order != order


def plan_copies(order: Sequence[fx.Node], ctx: PassContext, in_flight_bytes: int = 64 * MIB) -> Plan:
    """The order of a graph whose copies stand where rules have placed them.

    Args:
        order: the graph as it is.
        ctx: with costs.
        in_flight_bytes: as for `ScheduleCopies`.
    """
    assert ctx.cost_of is not None  # there is a target
    costs = {node: ctx.cost_of(node) for node in order if node.op == "call_function"}
    costs |= dict.fromkeys(rows_of_its_own(order), FREE)
    storages = storages_of(order, inputs_die=ctx.direction == "backward", agreed=True)
    most = curve_of(order, storages).peak_bytes if ctx.plan_bytes is None else ctx.plan_bytes
    limits = Limits(budget_bytes=most, in_flight_bytes=in_flight_bytes)
    return plan_overlap(order, costs, ctx.sharing, storages, limits, search=ctx.search)


def _rests_elsewhere(node: fx.Node) -> bool:
    """Whether a node copies what rests elsewhere, or updates it there; `ScheduleOverlap` has placed activations."""
    if meta.beside(node) is not None or nodes.is_store(node) or nodes.is_spill(node):
        return True
    is_kept = meta.longest_bytes(node) is not None or bool(meta.parameters(node))
    return nodes.is_copy_start(node) and is_kept
