"""Share one gather per parameter and graph, and one reduction of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.gathers_per_part import share_gathers

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class DedupeGathers(GraphPass):
    """Gather each parameter once per graph, and reduce the sum of its gradients once.

    `reduce(a) + reduce(b)` becomes `reduce(a + b)`: the same sum as in the replicated model, for half the bytes.
    Leaves alone: reads of a parameter in different dtypes; sums of a reduced gradient and any other value. In the graph
    of a whole training step also, as in eager torch: reads of stage 0 and 3 parameters in different forwards and
    backwards, reads before and after an update, and sums of gradients of several backwards.
    """

    name: ClassVar[str] = "dedupe_gathers"
    phase: ClassVar[Phase] = "joint"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_DEDUPED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        whole_step = ctx.direction == "step"
        shared = share_gathers(gm.graph)
        folded = 0
        while not whole_step and (fold := next_fold(gm.graph)) is not None:
            _fold(gm.graph, *fold)
            folded += 1
        if not shared and not folded:
            ctx.note(self, "every parameter is read once")
        return shared > 0 or folded > 0


def next_fold(graph: fx.Graph) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return the first sum of two reductions of one parameter, as (add, left, right); None if there is none.

    The two reductions have no reader but the addition.
    """
    for add in nodes.call_functions(graph, lambda node: node.target is aten.add.Tensor):
        if add.kwargs or len(add.all_input_nodes) != 2:
            continue
        left, right = (dataflow.without_views(source) for source in add.all_input_nodes)
        if left is right or not (nodes.is_reduce_grad(left) and nodes.is_reduce_grad(right)):
            continue
        if left.args[1:] == right.args[1:] and _feeds_only(left, add) and _feeds_only(right, add):
            return add, left, right
    return None


def _feeds_only(node: fx.Node, reader: fx.Node) -> bool:
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node is reader:
            return True
        if node.target is not aten.view.default:
            return False
    return False


def _fold(graph: fx.Graph, add: fx.Node, left: fx.Node, right: fx.Node) -> None:
    grads = (ReduceArgs.of(left).grad, ReduceArgs.of(right).grad)
    between = [source for source in add.all_input_nodes if source not in (left, right)]
    with graph.inserting_before(add):
        total = meta.create(graph, aten.add.Tensor, grads)
        reduced = meta.create(graph, left.target, (total, *left.args[1:]), like=left, name=left.name)
    add.replace_all_uses_with(reduced)
    graph.erase_node(add)
    edits.erase_dead(graph, [*between, left, right])
