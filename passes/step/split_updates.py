"""Splits calls over many parameters, such as fused updates, so that each waits for one reduction only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import edits
from zgraph.passes.common.updates import Updates, lists_of, split_call


@dataclass(frozen=True, kw_only=True)
class SplitUpdates(GraphPass):
    """Split optimizer calls over all parameters into one call per reduction, so that updates overlap later reductions.

    A fused or foreach optimizer updates all parameters in one call, which waits for the last gradient. This pass splits
    each such call, and the norms of gradient clipping, into one call per reduction. On a single rank, where nothing is
    reduced, it makes one call per 2 MiB of gradients, or per 128 MiB if parameters and state are on a GPU. The calls
    still run at the end of the step, in the order in which reductions start; `update_as_reduced` moves them. Results
    are bitwise equal.
    Leaves alone: forward and backward; steps that compute with reduced gradients before their last backward.
    """

    name: ClassVar[str] = "split_updates"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.UPDATES_SPLIT})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.OVERLAP_SCHEDULED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        before = list(gm.graph.nodes)
        updates = Updates.of(before)
        if not updates.reading:
            ctx.note(self, "nothing here reads a reduced gradient")
            return False
        if not updates.may_come_last(before):
            ctx.note(self, "the step computes with reduced gradients before its last backward")
            return False
        homes = updates.homes()
        for node in [*updates.reading, *updates.preparing]:
            _split(node, homes)
        edits.relink(_last(list(gm.graph.nodes)))
        return before != list(gm.graph.nodes)


def _split(node: fx.Node, homes: Mapping[fx.Node, int]) -> None:
    """Split a call over many tensors into one call for each reduction whose gradients it reads."""
    by_home: dict[int | None, list[int]] = {}
    for place, elements in enumerate(zip(*lists_of(node), strict=True)):
        found = [homes[element] for element in elements if element in homes]
        by_home.setdefault(max(found, default=None), []).append(place)
    split_call(node, list(by_home.values()))


def _last(order: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a step with its updates moved to the end, in the order in which their gradients arrive."""
    updates = Updates.of(order)
    homes = updates.homes()
    position = {node: place for place, node in enumerate(order)}

    def arrives(node: fx.Node) -> tuple[float, ...]:
        own = [homes[value] for value in (node, *node.all_input_nodes, *node.users) if value in homes]
        return updates.arrival[node], max(own, default=math.inf), position[node]

    placed = dict.fromkeys(node for node in order if node not in updates and node.op != "output")
    for node in [*sorted(updates.reading, key=arrives), *updates.preparing]:
        pending = [node]
        while pending:
            missing = [source for source in updates.needs(pending[-1]) if source not in placed]
            if missing:
                pending.append(min(missing, key=position.__getitem__))
            else:
                placed[pending.pop()] = None
    return [*placed, order[-1]]
