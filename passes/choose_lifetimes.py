"""Decide how long a gathered parameter lives, by its ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph import meta, nodes
from zgraph.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.nodes import UnshardArgs


@dataclass(frozen=True, kw_only=True)
class ChooseLifetimes(GraphPass):
    """Make backward gather again what forward gathered, instead of saving it, at stages 0 and 3.

    The gather and every view and cast after it are tagged for recomputation, or the partitioner would save whole
    weights. A replicated parameter is tagged as well: its gather is free, and what would be saved is its cast copy.
    Leaves alone: parameters of stages 1 and 2, which are gathered once per window and saved for its backwards; those
    that the graph returns, as before a graph break, for whoever receives them keeps them alive.
    """

    name: ClassVar[str] = "choose_lifetimes"
    phase: ClassVar[Phase] = "joint"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if ctx.direction == "inference":
            ctx.note(self, "inference saves nothing")
            return False
        for node in nodes.call_functions(gm.graph, nodes.is_unshard):
            if UnshardArgs.of(node).zero_stage in (1, 2):
                meta.tag_saved(node)
        changed = False
        for node in plan_regathers(gm.graph, ctx.user_outputs):
            for part in nodes.reshaped_values(node):
                changed = changed or not meta.is_tagged_recompute(part)
                meta.tag_recompute(part)
        return changed


def plan_regathers(graph: fx.Graph, user_outputs: int | None) -> list[fx.Node]:
    """The gathers that backward repeats: those of stages 0 and 3 whose result the forward does not return."""
    returned = nodes.returned_by(graph)[:user_outputs]
    return [
        node
        for node in nodes.call_functions(graph, nodes.is_unshard)
        if UnshardArgs.of(node).zero_stage in (0, 3)
        and not any(part in returned for part in nodes.reshaped_values(node))
    ]
