"""Turn `zgraph::reduce_grad` into an exchange and a sum in rank order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_choice
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.build_reduction import ReductionBuilder, plan_algorithms, waits_in_grad
from zgraph.passes.common.reduction_algorithms import ALGORITHMS, Algorithm


@dataclass(frozen=True, kw_only=True)
class LowerReductions(GraphPass):
    """Exchange and sum the chunks of each gradient; a rank keeps its own sum, or all sums of a replicated parameter.

    A gradient that was only widened to be reduced (autocast) is sent in the narrow dtype; since sums are fp32 anyway,
    the result is bitwise the same.
    Leaves alone: nothing; every `reduce_grad` is lowered.

    Attributes:
        algorithm: how gradients are reduced.
            "all_to_all" sends (N-1)/N of the gradient and sums in rank order, bitwise equal to the eager marker
            (gloo's own reduce_scatter sends twice as much).
            "reduce_scatter" widens gradients narrower than fp32 and leaves the order of the sum to the backend: for
            N > 2 results are equal up to rounding.
            "narrow_reduce_scatter" does not widen: half the bytes in bf16, but each addition is rounded to bf16.
            "all_reduce" needs one collective instead of two if every rank needs the whole mean (stage 0, replicas), and
            is a reduce_scatter otherwise; its means are not rounded to `mean_dtype`.
            "auto": on gloo "all_to_all"; on NCCL the cheapest algorithm that does not sum in a narrow dtype, by the
            target's hardware or else this machine's (see common/reduction_algorithms.py), or "reduce_scatter" if
            neither is known.
    """

    algorithm: Algorithm = "auto"

    name: ClassVar[str] = "lower_reductions"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.REDUCTIONS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})

    def __post_init__(self) -> None:
        check_choice("lower_reductions", ALGORITHMS, algorithm=self.algorithm)

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_reduce_grad))
        algorithms = plan_algorithms(markers, ctx, self.algorithm)
        _let_wait(gm.graph, [marker for marker in markers if waits_in_grad(marker)])
        for marker in markers:
            edits.drop_unchanging_views(marker)
            with gm.graph.inserting_before(marker):
                reduced = ReductionBuilder(gm.graph, marker, ctx, algorithms[marker]).build()
            marker.replace_all_uses_with(reduced)
            edits.erase_dead(gm.graph, [marker, ReduceArgs.of(marker).grad])
        if not markers:
            ctx.note(self, "nothing is reduced here")
        elif self.algorithm == "auto" and (ctx.hardware or ctx.machine) is not None:
            counts = Counter(name for chosen in algorithms.values() for name in chosen.values())
            ctx.note(self, "reductions: " + ", ".join(f"{count} by {name}" for name, count in sorted(counts.items())))
        return bool(markers)


def _let_wait(graph: fx.Graph, markers: Sequence[fx.Node]) -> None:
    """Add a call at the end of a graph that lets the gradients of these markers wait (accumulate) in `.grad`."""
    handles = list(dict.fromkeys(ReduceArgs.of(marker).handle for marker in markers))
    if not handles:
        return
    with graph.inserting_before(nodes.output_of(graph)):
        call = meta.create(graph, torch.ops.zgraph.wait_in_grad.default, (handles,), like=markers[0])
    names = dict.fromkeys(name for marker in markers for name in meta.parameters(marker))
    meta.set_parameters(call, list(names), [handle.name for handle in handles])
