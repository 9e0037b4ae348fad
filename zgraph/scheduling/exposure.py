"""Explain why a collective is exposed, that is, not hidden by compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.queues import limited_bytes
from zgraph.scheduling.timeline import Timeline


def why_exposed(start: fx.Node, order: Sequence[fx.Node], timeline: Timeline, limits: Limits | None) -> str:
    """Return a phrase that gives the reason why a collective is exposed.

    Args:
        start: start of a collective that the compute lane waits for.
        order: nodes of the graph in the order in which they run.
        timeline: simulation of `order`.
        limits: memory limits for which `order` was planned; None: fixed rules made `order`, without a cost model.
    """
    if nodes.is_marker(start):
        return "a marker gathers or reduces on the spot; lower_gathers and lower_reductions let it overlap"
    if nodes.is_copy_start(start):
        return "too little compute to hide copies between host and device; offload less, or give the step more memory"
    if not meta.parameters(start):
        return "a collective of the model's own, which no pass moves"
    if meta.is_tagged_at_use(start):
        return "gathered where its result is needed, to hold less; see bucket_collectives"
    place_of = {node: place for place, node in enumerate(order)}
    span = timeline.spans[start]
    cause = timeline.causes.get(start)
    if cause is not None and timeline.spans[cause].lane == span.lane:
        wait = nodes.wait_of(cause)
        if wait is None or place_of[wait] > place_of[start]:  # else the program itself waited for it
            return f"queued behind {cause.name} on {span.lane}"
    before = order[: place_of[start]]
    ahead = next((node for node in reversed(before) if timeline.spans[node].us and not traits.is_movable(node)), None)
    delayed = _waited_before(start, order, place_of, timeline) if limits is None else None
    if delayed is not None:
        return f"waited for before {delayed.name}, which does not need it, by a rule; schedule_overlap goes by costs"
    if dataflow.copy_in(start) is None:
        return "too little compute after its input is ready"
    if ahead is None:
        return "too little compute before its result is needed"
    if limits is None:
        return f"started after {ahead.name} by a rule; schedule_overlap goes by costs"
    needed_bytes = nodes.unsharded_bytes(start)
    if (
        limits.budget_bytes is not None
        and timeline.memory.bytes_during[place_of[ahead]] + needed_bytes > limits.budget_bytes
    ):
        return f"the budget of {limits.budget_bytes} bytes has no room for {needed_bytes} bytes during {ahead.name}"
    started = [node for node in timeline.exposed_us if _is_in_flight(node, place_of, place_of[ahead])]
    in_flight = [size for node in started if (size := limited_bytes(node))]
    if len(in_flight) > 1 and sum(in_flight) + needed_bytes > limits.in_flight_bytes:
        return f"in_flight_bytes={limits.in_flight_bytes} has no room for {needed_bytes} bytes during {ahead.name}"
    return f"too little compute between {ahead.name} and the first reader of its result"


def _waited_before(
    start: fx.Node, order: Sequence[fx.Node], place_of: Mapping[fx.Node, int], timeline: Timeline
) -> fx.Node | None:
    """Return the first compute node after a collective's wait; None if this node depends on the wait."""
    wait = nodes.wait_of(start)
    if wait is None:
        return None
    timed = (node for node in order[place_of[wait] :] if timeline.spans[node].us and not nodes.is_communication(node))
    first = next(timed, None)
    pending, seen = [] if first is None else [first], dict[fx.Node, None]()
    while pending:
        node = pending.pop()
        if node is wait:
            return None
        if node not in seen and place_of[node] > place_of[wait]:
            seen[node] = None
            pending.extend(node.all_input_nodes)
    return first


def _is_in_flight(node: fx.Node, place_of: Mapping[fx.Node, int], place: int) -> bool:
    if not (nodes.is_start(node) and traits.is_movable(node)):
        return False
    wait = nodes.wait_of(node)
    return place_of[node] < place and (wait is None or place_of[wait] > place)
