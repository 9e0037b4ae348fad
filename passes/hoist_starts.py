"""Start each gather early, while the parameters of an earlier gather are still in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from zgraph.analysis.hazards import Hazards, hazards
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes, check_least
from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.runtime.chunks import MIB


@dataclass(frozen=True, kw_only=True)
class HoistStarts(GraphPass):
    """Prefetch gathers: start each one just before the wait of an earlier gather, as early as the limits allow.

    Copies of offloaded activations back to the device are prefetched in the same way. Reductions already start where
    their gradients are ready.
    Leaves alone: gathers of values that the graph computes or writes to, such as averaged gradients; gathers that are
    pinned to their first reader to save memory.

    Attributes:
        prefetch: maximum number of gathers in flight besides the awaited one. Copies have an equal limit of their own.
        in_flight_bytes: maximum bytes of unsharded parameters in flight. Copies have an equal limit of their own. One
            gather and one copy are always prefetched, whatever their size.
    """

    prefetch: int = 1
    in_flight_bytes: int = 16 * MIB

    name: ClassVar[str] = "hoist_starts"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.STARTS_HOISTED})

    def __post_init__(self) -> None:
        check_least("hoist_starts", 0, "0 (none), 1 or more", " is negative", prefetch=self.prefetch)
        check_bytes("hoist_starts", ", or prefetch=0", in_flight_bytes=self.in_flight_bytes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        plan = plan_hoists(gm.graph, self.prefetch, self.in_flight_bytes)
        order = nodes.order_of(gm.graph)
        changed = False
        for start, anchor in plan:
            inputs = start.all_input_nodes if nodes.is_reload(start) else dataflow.copy_in(start) or []
            for node in [*sorted(inputs, key=order.__getitem__), start]:
                if order[node] > order[anchor]:
                    edits.move_before(node, anchor)
                    changed = True
        if not changed:
            ctx.note(self, "no gather can start earlier")
        return changed


def _reads_inputs_alone(start: fx.Node, ahead: Hazards) -> bool:
    copies = dataflow.copy_in(start)
    return copies is not None and not any(node in ahead for node in (start, *copies))


def plan_hoists(graph: fx.Graph, prefetch: int, in_flight_bytes: int) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs (start node, node to move it before): first the gathers, then the copies from the host.

    The first gathers move to the top of the graph. With prefetch 0, the result is empty.
    """
    if prefetch == 0:
        return []
    ahead = hazards(list(graph.nodes))
    gathers = [
        start
        for start in nodes.call_functions(graph, nodes.is_gather)
        if meta.parameters(start) and not meta.is_tagged_at_use(start) and _reads_inputs_alone(start, ahead)
    ]
    reloads = list(nodes.call_functions(graph, nodes.is_reload))
    order = nodes.order_of(graph)
    plan = list(_ahead(graph, gathers, prefetch, in_flight_bytes))
    for start, anchor in _ahead(graph, reloads, prefetch, in_flight_bytes):
        kept = start.all_input_nodes[0]
        if not nodes.is_wait(kept) or order[nodes.start_of(kept)] < order[anchor]:  # already offloaded by then
            plan.append((start, anchor))
    return plan


def _ahead(
    graph: fx.Graph, starts: Sequence[fx.Node], prefetch: int, in_flight_bytes: int
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield pairs (start node, node to move it before) for `starts`, which are all gathers or all copies, in order."""
    if not starts:
        return
    # Before the first compute, or the first wait if that comes first: after it they would overtake nothing.
    first_wait = nodes.wait_of(starts[0])
    top = next(
        node
        for node in graph.nodes
        if node is first_wait or not (node.op == "placeholder" or nodes.is_communication(node))
    )
    oldest = 0  # the oldest start that is still in flight or awaited when the next one starts
    for position, start in enumerate(starts):
        while position - oldest > prefetch or (
            position - oldest > 1 and sum(map(nodes.unsharded_bytes, starts[oldest : position + 1])) > in_flight_bytes
        ):
            oldest += 1
        reaches_top = oldest == 0 and position < prefetch
        yield start, top if reaches_top else cast(fx.Node, nodes.wait_of(starts[oldest]))
