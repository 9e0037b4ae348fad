"""Gather the first parameters of the next step while this one still updates others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import fx

from zgraph.analysis.hazards import hazards
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.graph.lanes import COMPUTE
from zgraph.passes.common.updates import Updates
from zgraph.runtime.chunks import MIB


@dataclass(frozen=True, kw_only=True)
class GatherAhead(GraphPass):
    """Gather what the next forward reads first behind the last updates, which hide it, and hold it until then.

    Where gradients are clipped by the norm of all, the link is idle while parameters are updated. Those that the next
    forward reads first are updated first, and gathered meanwhile. At its beginning the next step compares what each
    rank holds of its own with what it would send, and the ranks agree on the result: if anything has written to a
    parameter, they gather as before. That costs a pass over this rank's part and a message of a few bytes, and the
    memory from step to step. Without clipping there is little to hide it behind.
    Put it last. Leaves alone: all but the first gathers of the first forward, and gathers of codes.

    Attributes:
        most_bytes: most bytes of unsharded parameters that are held. With a target also no more than the updates hide.
    """

    most_bytes: int = 32 * MIB

    name: ClassVar[str] = "gather_ahead"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GATHERED_AHEAD})

    def __post_init__(self) -> None:
        if self.most_bytes < 1:
            raise ValueError(
                f"gather_ahead: most_bytes={self.most_bytes} holds nothing; write a positive number of bytes, or leave "
                "the pass out of the pipeline."
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        order = list(gm.graph.nodes)
        updates = Updates.of(order)
        if not updates.reading or not updates.may_come_last(order):
            ctx.note(self, "the step does not update parameters, or computes with them afterwards")
            return False
        last = max(place for place, node in enumerate(order) if node not in updates and node.op != "output")
        starts = plan_ahead(order, order[last + 1 : -1], self.most_bytes, ctx)
        if not starts:
            ctx.note(self, "the first gather cannot be held, or is too large, or updates would not hide it")
            return False
        again = [_again(gm.graph, start, part=meta.part(order[last]) or 0) for start in starts]
        held_bytes = sum(map(nodes.unsharded_bytes, starts))
        edits.relink(_hidden(list(gm.graph.nodes), last + 1, again))
        _take(gm.graph, starts)
        ctx.note(self, f"{held_bytes} bytes of {len(starts)} gathers are held for the next step")
        return True


def plan_ahead(order: Sequence[fx.Node], hiding: Iterable[fx.Node], most_bytes: int, ctx: PassContext) -> list[fx.Node]:
    """The first gathers of the step's first forward, as many as may be held and are hidden.

    Args:
        order: all nodes of the step.
        hiding: the updates behind its last reduction.
        most_bytes: that may be held.
        ctx: with costs, if there is a target.
    """
    cost_of = ctx.cost_of
    room_us = float("inf")
    if cost_of is not None:
        costs = [cost_of(node) for node in hiding if node.op == "call_function"]
        room_us = sum(cost.us for cost in costs if cost.lane == COMPUTE)
    found: list[fx.Node] = []
    group_name = ""
    for start in order:
        if not (nodes.is_gather(start) and meta.parameters(start)) or meta.part(start) != 0:
            continue
        group_name = group_name or nodes.group_of(start)
        most_bytes -= nodes.unsharded_bytes(start)
        room_us -= 0.0 if cost_of is None else cost_of(start).us
        if not _may_be_held(start) or nodes.group_of(start) != group_name:
            break
        if most_bytes < 0 or room_us < 0:
            break
        found.append(start)
    return found


def _may_be_held(start: fx.Node) -> bool:
    """Whether a gather sends parameters as they are, straight from the inputs, each of several with its handle."""
    if nodes.is_quantized_gather(start) or dataflow.copy_in(start) is None:
        return False
    return nodes.is_all_gather(start) or (
        nodes.is_grouped_gather(start) and len(meta.handles(start)) == len(nodes.sent_by(start))
    )


@dataclass(frozen=True)
class _Member:
    """What a gather sends of one bucket, or of one member of a group.

    Attributes:
        sent: this rank's part.
        result: all of it, behind the wait.
        handle: of the first parameter.
    """

    sent: fx.Node
    result: fx.Node
    handle: fx.Node


def _members(graph: fx.Graph, start: fx.Node) -> list[_Member]:
    """The parts of a gather, without those that nobody reads."""
    wait, sent = cast(fx.Node, nodes.wait_of(start)), nodes.sent_by(start)
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    handles = [inputs[name] for name in meta.handles(start)]
    if not nodes.is_group_wait(wait):
        return [_Member(sent[0], wait, handles[0])]
    places = [(result, cast(int, result.args[1])) for result in nodes.results_of(wait)]
    return [_Member(sent[place], result, handles[place]) for result, place in places]


def _again(graph: fx.Graph, start: fx.Node, *, part: int) -> list[fx.Node]:
    """Gather once more at the end of the step, and hold the results: the start, its wait, and what holds them."""
    copies: dict[fx.Node, fx.Node] = {}
    chain = sorted(cast("list[fx.Node]", dataflow.copy_in(start)))  # nodes compare by their place in the graph
    members, wait = _members(graph, start), cast(fx.Node, nodes.wait_of(start))
    finish = dict.fromkeys([wait, *(member.result for member in members)])
    with graph.inserting_before(nodes.output_of(graph)):
        for node in [*chain, start, *finish]:
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
            meta.set_part(copies[node], part)
        kept = [
            meta.create(graph, torch.ops.zgraph.keep_ahead.default, (result, member.handle), like=result)
            for member in members
            for result in [copies[member.result]]
        ]
    return [copies[start], *(copies[node] for node in finish), *kept]


def _hidden(order: Sequence[fx.Node], tail: int, again: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes of a step, with gathers as early behind its last reduction as the updates that they need allow.

    Args:
        order: the step, with gathers and what holds them at the end.
        tail: place of the first update behind the last reduction.
        again: start, wait and the nodes that hold the results, in the order in which the next forward reads them.
    """
    before = hazards(order)
    placed = dict.fromkeys(order[:tail])
    late = [node for _, *finish in again for node in finish]
    updates = [node for node in order[tail:-1] if node not in late]
    for node in [*(start for start, *_ in again), *updates, *late]:
        pending = [node]
        while pending:
            needed = [*pending[-1].all_input_nodes, *before.get(pending[-1], ())]
            missing = [source for source in needed if source not in placed]
            if missing:
                pending.append(missing[0])
            else:
                placed[pending.pop()] = None
    return [*placed, order[-1]]


def _take(graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
    """Replace gathers by what the step before has gathered, at the top of the graph."""
    members = [(start, member) for start in starts for member in _members(graph, start)]
    chains = dict.fromkeys(node for start in starts for node in sorted(dataflow.copy_in(start) or []))
    sent, handles = [member.sent for _, member in members], [member.handle for _, member in members]
    top = next(node for node in graph.nodes if node.op != "placeholder" and node not in chains)
    for node in chains:
        edits.move_before(node, top)
    with graph.inserting_before(top):
        given = (sent, handles, nodes.group_of(starts[0]))
        agreed = meta.create(graph, torch.ops.zgraph.agree_ahead.default, given, like=starts[0])
        taken = [
            meta.create(
                graph,
                torch.ops.zgraph.take_ahead.default,
                (member.sent, agreed, member.handle, *start.args[1:]),
                like=member.result,
                name=f"ahead_{meta.label(member.result)}",
            )
            for start, member in members
        ]
    for (_, member), whole in zip(members, taken, strict=True):
        member.result.replace_all_uses_with(whole)
    for start in starts:
        wait = cast(fx.Node, nodes.wait_of(start))
        for node in dict.fromkeys([*nodes.results_of(wait), wait, start]):
            graph.erase_node(node)
