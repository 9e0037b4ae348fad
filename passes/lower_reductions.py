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
from zgraph.passes.common.build_reduction import ReductionBuilder, waits_in_grad
from zgraph.passes.common.reduction_algorithms import ALGORITHMS, Algorithm, plan_algorithms


@dataclass(frozen=True, kw_only=True)
class LowerReductions(GraphPass):
    """Lower each `reduce_grad` to an exchange between ranks and a sum.

    Each rank keeps the sum of its chunk or, for a replicated parameter, the sums of all chunks. A gradient that
    autocast has only widened is sent in the narrow dtype. Sums are fp32, so results are bitwise equal.
    Leaves alone: nothing.

    Attributes:
        algorithm: how gradients are summed over N ranks.
            "all_to_all": sends (N-1)/N of the gradient and sums in rank order, bitwise equal to `reduce_grad` in eager
            mode. gloo's own reduce_scatter sends twice as much.
            "reduce_scatter": widens narrow gradients to fp32; the backend chooses the order of the sum. For N > 2,
            results are equal up to rounding.
            "narrow_reduce_scatter": does not widen. Sends half the bytes in bf16, but rounds each addition to bf16.
            "all_reduce": one collective instead of two if every rank needs the whole mean (stage 0, replicas),
            otherwise a reduce_scatter. Means are not rounded to `mean_dtype`.
            "auto": "all_to_all" on gloo. On NCCL the fastest algorithm that sums in fp32, by the hardware of the
            target or else of this machine (see common/reduction_algorithms.py); "reduce_scatter" if it is unknown.
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
    """Add a call at the end of a graph that prepares `.grad` to accumulate gradients without reducing them.

    Args:
        graph: graph to change.
        markers: reduce_grad nodes of the gradients.
    """
    handles = list(dict.fromkeys(ReduceArgs.of(marker).handle for marker in markers))
    if not handles:
        return
    with graph.inserting_before(nodes.output_of(graph)):
        call = meta.create(graph, torch.ops.zgraph.wait_in_grad.default, (handles,), like=markers[0])
    names = dict.fromkeys(name for marker in markers for name in meta.parameters(marker))
    meta.set_parameters(call, list(names), [handle.name for handle in handles])
