"""Run each update as soon as the gradients it needs have been reduced."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import edits, nodes
from zgraph.passes.common.updates import Updates


@dataclass(frozen=True, kw_only=True)
class UpdateAsReduced(GraphPass):
    """Move each update to just after the reduction of its gradient, so that the gradient is freed early.

    Norms for clipping are computed as gradients arrive; nodes that need the total norm come after the last gradient.
    Nodes that only prepare an update, such as weight decay, move together with that update. A gather among the step's
    own lines, such as one of a whole gradient, starts equally early, and is awaited where its result is needed.
    Leaves alone: the order of everything else, and steps that compute with reduced gradients before the last backward.
    """

    name: ClassVar[str] = "update_as_reduced"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.UPDATES_SPLIT, Fact.WAITS_SUNK})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.UPDATES_MOVED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        before = list(gm.graph.nodes)
        updates = Updates.of(before)
        if updates.reading and updates.may_come_last(before):
            edits.relink(_as_reduced(before, updates))
        changed = before != list(gm.graph.nodes)
        if not changed:
            ctx.note(self, "no update can run earlier")
        return changed


def _as_reduced(order: Sequence[fx.Node], updates: Updates) -> list[fx.Node]:
    """Return the nodes of a step with each update, and the nodes that prepare it, as early as possible."""
    position = {node: place for place, node in enumerate(order)}
    placed: dict[fx.Node, None] = {}
    missing: dict[fx.Node, int] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for node in updates.reading:
        sources = _beyond_preparation(node, updates)
        missing[node] = len(sources)
        for source in sources:
            waiting.setdefault(source, []).append(node)
    ready: list[tuple[int, fx.Node]] = []
    held: dict[fx.Node, None] = {}  # waits whose collectives have started, until a node needs them

    def append(node: fx.Node) -> None:
        for source in held if node.op == "output" else updates.needs(node):
            if source in held and source not in placed:
                append(source)
        placed[node] = None

    def release(node: fx.Node) -> None:
        for update in waiting.get(node, ()):
            missing[update] -= 1
            if not missing[update]:
                heapq.heappush(ready, (position[update], update))

    for node in order:
        if node in updates or node in placed:
            continue
        append(node)
        release(node)
        while ready:
            _, update = heapq.heappop(ready)
            for one in _preparation(update, updates):
                if one not in placed:
                    append(one)
                    release(one)
            if nodes.is_wait(update) and nodes.is_gather(nodes.start_of(update)):
                held[update] = None
            else:
                append(update)
            release(update)
    return list(placed)


def _beyond_preparation(node: fx.Node, updates: Updates) -> set[fx.Node]:
    """Return what a node and its preparing nodes depend on, except for nodes that prepare updates."""
    found: set[fx.Node] = set()
    for one in [*_preparation(node, updates), node]:
        found.update(source for source in updates.needs(one) if source not in updates.preparing)
    return found


def _preparation(node: fx.Node, updates: Updates) -> list[fx.Node]:
    """Return all nodes that only prepare the given node, in dependency order."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        missing = [
            source for source in updates.needs(pending[-1]) if source in updates.preparing and source not in found
        ]
        if missing:
            pending.append(missing[0])
        else:
            found[pending.pop()] = None
    found.pop(node, None)
    return list(found)
