"""Place copies of tensors offloaded to the host or disk, and host updates, by their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.analysis.cost import FREE
from zgraph.analysis.liveness import curve_of
from zgraph.analysis.storages import rows_of_its_own, storages_of
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes
from zgraph.graph import edits, meta, nodes
from zgraph.runtime.chunks import MIB
from zgraph.scheduling.plan_overlap import Plan, plan_overlap
from zgraph.scheduling.problem import Limits


@dataclass(frozen=True, kw_only=True)
class ScheduleCopies(GraphPass):
    """Start each copy to the device just early enough, and wait for copies back and for updates as late as is useful.

    `StreamStates` inserts copies by fixed rules. This pass schedules copies and collectives of the final graph
    together, on a simulator with a lane for each link, the disk, and the host's updates. The new order stays within the
    budget or, without a budget, within the peak of the order by rules. That order is a candidate, too: unless it
    exceeds the budget, slower orders, and equally fast ones with a higher peak, are dropped.
    Leaves alone: the order of compute, and where updates start; graphs without offloaded tensors.

    Attributes:
        in_flight_bytes: limit for collectives, as for `ScheduleOverlap`; copies are limited by the budget only.
    """

    in_flight_bytes: int = 64 * MIB

    name: ClassVar[str] = "schedule_copies"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED, Fact.STATES_STREAMED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.COPIES_SCHEDULED})

    def __post_init__(self) -> None:
        check_bytes("schedule_copies", in_flight_bytes=self.in_flight_bytes)

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
    """Plan the order of a graph whose copies have been placed by fixed rules.

    Args:
        order: nodes of the graph in their present order.
        ctx: context with costs.
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
    """Return whether a node copies offloaded state or updates it on the host; copies of activations do not count."""
    if meta.beside(node) is not None or nodes.is_store(node) or nodes.is_spill(node):
        return True
    is_kept = meta.longest_bytes(node) is not None or bool(meta.parameters(node))
    return nodes.is_copy_start(node) and is_kept
