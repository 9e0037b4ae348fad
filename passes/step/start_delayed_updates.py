"""Start delayed updates as early in the step as what they overwrite has been read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph.analysis.hazards import Hazards, hazards
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import meta, nodes
from zgraph.passes.common.visits import is_fused


@dataclass(frozen=True, kw_only=True)
class StartDelayedUpdates(GraphPass):
    """Move each fused update of gradients of the call before to behind the last read of its parameters.

    Such an update (`zgraph.Offload.delayed_update_after`) waits for no gradient of this call, only for gathers that
    still send its parameters: with stages 1 and 2 for those of forward, with stage 3 for those of backward, with
    stage 0 for whatever computes with them. Behind it StreamStates lets it run beside what follows.
    Put it right before StreamStates. Leaves alone: updates that are not fused, which run beside nothing, and the order
    of everything else.
    """

    name: ClassVar[str] = "start_delayed_updates"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.STATES_STREAMED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction != "step":
            return False
        order = list(gm.graph.nodes)
        before = hazards(order)
        moved = plan_moves(order, before)
        if not moved:
            ctx.note(self, "no fused update is delayed")
            return False
        behind: dict[fx.Node, fx.Node] = {}  # by what they wait for, the last that was put there
        for node in moved:
            needed = _behind_reader(max([*_sources(node, before), _last_input(gm.graph)]))
            last = behind.get(needed, needed)
            if last < node:
                behind[needed] = node
                if last.next is not node:
                    last.append(node)
        changed = order != list(gm.graph.nodes)
        ctx.note(self, f"{sum(map(is_fused, moved))} updates start as soon as their parameters have been read")
        return changed


def plan_moves(order: Sequence[fx.Node], before: Hazards) -> list[fx.Node]:
    """Delayed fused updates, and what is computed for them alone, such as their step counts, in order."""
    wanted: dict[fx.Node, None] = {}
    for node in reversed(order):
        if meta.delayed(node) == "update" and (is_fused(node) or node in wanted):
            wanted |= dict.fromkeys(_sources(node, before))
            wanted[node] = None
    return [node for node in order if node in wanted and meta.delayed(node) == "update"]


def _sources(node: fx.Node, before: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    return [*node.all_input_nodes, *before.get(node, ())]


def _behind_reader(node: fx.Node) -> fx.Node:
    """The first reader of what a wait has brought, between which and the wait nothing is to stand; else the node."""
    readers = [user for result in nodes.results_of(node) for user in result.users] if nodes.is_wait(node) else []
    return min(readers, default=node)


def _last_input(graph: fx.Graph) -> fx.Node:
    return graph.find_nodes(op="placeholder")[-1]
