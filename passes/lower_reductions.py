"""Turn `zgraph::reduce_grad` into an exchange and a sum in rank order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zgraph import nodes
from zgraph.build_reduction import Algorithm, ReductionBuilder
from zgraph.graph_pass import Fact, GraphPass, PassContext
from zgraph.nodes import ReduceArgs


@dataclass(frozen=True, kw_only=True)
class LowerReductions(GraphPass):
    """Exchange the chunks of each gradient, sum them, and keep this rank's; gather the means for replicated parameters.

    A gradient that was only widened to be reduced (autocast) travels narrow: the sum is fp32 on arrival, bit for bit
    the same.
    Leaves alone: nothing; every marker is lowered.

    Attributes:
        algorithm: "all_to_all" moves (N-1)/N of the gradient and sums in rank order, bitwise equal to the eager marker;
            gloo's own reduce_scatter moves twice that. "reduce_scatter" leaves sum and order to the backend: for N > 2
            equal to rounding only. "auto": "reduce_scatter" on NCCL, "all_to_all" elsewhere.
    """

    algorithm: Algorithm = "auto"

    name: ClassVar[str] = "lower_reductions"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.REDUCTIONS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})

    def __post_init__(self) -> None:
        if self.algorithm not in ("auto", "all_to_all", "reduce_scatter"):
            raise ValueError(
                f'lower_reductions: algorithm={self.algorithm!r} is unknown; write "auto", "all_to_all" or '
                '"reduce_scatter".'
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_reduce_grad))
        for marker in markers:
            nodes.drop_unchanging_views(marker)
            with gm.graph.inserting_before(marker):
                reduced = ReductionBuilder(gm.graph, marker, ctx, self.algorithm).build()
            marker.replace_all_uses_with(reduced)
            nodes.erase_dead(gm.graph, [marker, ReduceArgs.of(marker).grad])
        if not markers:
            ctx.note(self, "nothing is reduced here")
        return bool(markers)
