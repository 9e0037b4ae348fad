"""Move waits down to where their results are needed, so that compute hides the collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from torch import fx

from zgraph.analysis.hazards import Hazards, hazards
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes, check_least
from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.runtime.chunks import MIB


@dataclass(frozen=True, kw_only=True)
class SinkWaits(GraphPass):
    """Move each wait, and the copies out of its buffer, to just before the first user of the result.

    The only user of a reduced gradient is often the graph's output, and a wait there would keep the send buffer alive
    to the end. A reduction is therefore awaited once `reductions_in_flight` later reductions have started. In the graph
    of a whole training step the same rule applies to gathers of averaged gradients, so that updates overlap them.
    A copy to the host is awaited, and its source freed, once `offloads_in_flight` later copies have started.
    Leaves alone: waits that are already next to their first user. Reads of a value stay before later writes to it.

    Attributes:
        reductions_in_flight: maximum number of reductions in flight.
        in_flight_bytes: maximum bytes of unsharded gradients in flight; one reduction may always be in flight.
        offloads_in_flight: maximum number of copies to the host in flight.
    """

    reductions_in_flight: int = 2
    offloads_in_flight: int = 2
    in_flight_bytes: int = 16 * MIB

    name: ClassVar[str] = "sink_waits"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.OVERLAP_SCHEDULED})

    def __post_init__(self) -> None:
        check_least("sink_waits", 1, "1 or more", reductions_in_flight=self.reductions_in_flight)
        check_least("sink_waits", 1, "1 or more", offloads_in_flight=self.offloads_in_flight)
        check_bytes("sink_waits", in_flight_bytes=self.in_flight_bytes)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        before = list(gm.graph.nodes)
        ahead = hazards(before)
        sink(gm.graph, ahead)
        limit_reductions(gm.graph, self.reductions_in_flight, self.in_flight_bytes, ahead)
        limit_offloads(gm.graph, self.offloads_in_flight)
        if ctx.direction == "step":
            finish_means(gm.graph, self.reductions_in_flight, ahead)
        changed = before != list(gm.graph.nodes)
        if not changed:
            ctx.note(self, "every wait stands where it is needed")
        return changed


def sink(graph: fx.Graph, ahead: Hazards) -> None:
    """Move waits, and the copies of their results, to just before their first users; other nodes keep their order."""
    of_gradients = _copies_of_gradients(graph)
    sinkable = {
        node
        for node in graph.nodes
        if nodes.is_communication(node)
        and node not in of_gradients
        and (not _is_started(node) or carries_mean(node))
        and node.users
        and meta.lane(node) is None  # copies from the host were placed early to be hidden
        and not (nodes.is_copy_wait(node) and nodes.is_offload(nodes.start_of(node)))  # free the source early
    }
    placed: dict[fx.Node, None] = {}
    for node in list(graph.nodes):
        if node in sinkable:
            continue
        pending = [node]
        while pending:
            sources = [*pending[-1].all_input_nodes, *ahead.get(pending[-1], ())]
            needed = [source for source in sources if source in sinkable and source not in placed]
            if needed:
                pending.append(needed[0])
            else:
                taken = pending.pop()
                placed[taken] = None
                if nodes.is_wait(taken):  # a grouped result list stays alive until every result is selected from it
                    placed |= dict.fromkeys(result for result in nodes.results_of(taken) if result in sinkable)
    edits.relink(placed)


def _copies_of_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return casts and copies that prepare computed values for collectives.

    Moving such a copy later would only keep its source alive.
    """
    found: set[fx.Node] = set()
    for node in nodes.call_functions(graph, nodes.is_communication):
        if not nodes.is_start(node) and not nodes.is_wait(node):
            sources = (source for source in node.all_input_nodes if source.op == "call_function")
            if any(source in found or not nodes.is_communication(source) for source in sources):
                found.add(node)
    return found


def _is_started(node: fx.Node) -> bool:
    """Return whether a node starts a collective, or selects one result of a collective with several."""
    return nodes.is_start(node) or (nodes.is_getitem(node) and nodes.is_start(node.all_input_nodes[0]))


def limit_reductions(graph: fx.Graph, in_flight: int, in_flight_bytes: int, ahead: Hazards) -> None:
    """Move waits of reductions up so that the limits on reductions in flight hold whenever another one starts."""
    outstanding: list[fx.Node] = []
    for start in nodes.call_functions(graph, nodes.is_exchange):
        while outstanding and (
            len(outstanding) == in_flight or sum(map(nodes.unsharded_bytes, [*outstanding, start])) > in_flight_bytes
        ):
            finish_before(graph, outstanding.pop(0), start, ahead)
        outstanding.append(start)
    # Gathers of the last means start together, before any of them is waited for.
    means = [start for start in nodes.call_functions(graph, nodes.is_all_gather) if carries_mean(start)]
    order = nodes.order_of(graph)
    if outstanding:  # waits before the first start belong to other collectives
        means = [start for start in means if order[cast(fx.Node, nodes.wait_of(start))] > order[outstanding[-1]]]
    first_wait = min((cast(fx.Node, nodes.wait_of(start)) for start in means), key=order.__getitem__, default=None)
    for start in outstanding:
        if first_wait is not None and order[start] < order[first_wait]:
            finish_before(graph, start, first_wait, ahead)


def limit_offloads(graph: fx.Graph, in_flight: int) -> None:
    """Move waits of copies to the host up so that at most `in_flight` copies are in flight when another one starts."""
    order = nodes.order_of(graph)
    outstanding: list[fx.Node] = []
    for start in nodes.call_functions(graph, nodes.is_offload):
        outstanding.append(start)
        if len(outstanding) > in_flight:
            wait = cast(fx.Node, nodes.wait_of(outstanding.pop(0)))
            if order[wait] > order[start]:
                edits.move_before(wait, start)


def finish_means(graph: fx.Graph, in_flight: int, ahead: Hazards) -> None:
    """Wait for each gather of averaged gradients once `in_flight` later gathers of this kind have started."""
    means = [start for start in nodes.call_functions(graph, nodes.is_all_gather) if carries_mean(start)]
    for start, later in zip(means, means[in_flight:], strict=False):
        finish_before(graph, start, later.next, ahead)


def carries_mean(node: fx.Node) -> bool:
    """Return whether a node gathers averaged gradients, the second half of the reduction of a replicated gradient."""
    if not nodes.is_all_gather(node) or nodes.gathers_addends(node):
        return False
    return bool(meta.parameters(node)) and dataflow.copy_in(node) is None


def finish_before(graph: fx.Graph, start: fx.Node, anchor: fx.Node, ahead: Hazards) -> None:
    """Move the wait of a reduction, and the nodes that turn its result into a gradient, to just before `anchor`.

    For a replicated parameter, the gather of the averaged gradient also starts there; the gather's wait does not move.
    """
    order = nodes.order_of(graph)
    wait = cast(fx.Node, nodes.wait_of(start))
    chain, pending = dict[fx.Node, None](), [wait]
    while pending:
        node = pending.pop()
        chain[node] = None
        if not nodes.is_start(node):
            pending.extend(user for user in node.users if meta.parameters(user) and not nodes.is_wait(user))
    for node in sorted(chain, key=order.__getitem__):
        # A gather of several means may still need another reduction, whose finishing will move it.
        sources = [*node.all_input_nodes, *ahead.get(node, ())]
        if order[node] > order[anchor] and all(order[source] < order[anchor] for source in sources):
            edits.move_before(node, anchor)
            order[node] = order[anchor] - 1
