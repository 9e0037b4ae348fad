"""Cleaning of a traced step: names for its inputs, no nodes that do nothing, and updates that come last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zgraph.errors import ZgraphError
from zgraph.graph import meta, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.torch_compat.operators import is_profiler, written_arguments

aten = torch.ops.aten
_NAMELESS = frozenset({aten.detach.default, aten.alias.default})


def clean(traced: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of a traced graph with named inputs.

    Left out are detached aliases, views that change nothing, and marks for the profiler.

    Args:
        traced: by `make_fx`.
        names: of its inputs.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        copies[node] = graph.placeholder(names[position])
        copies[node].meta = dict(node.meta)
    part: int | None = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            continue
        part = found if (found := meta.part(node)) is not None else part
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None and (node.target in _NAMELESS or _changes_nothing(node, source)):
            copies[node] = copies[source]
        elif not is_profiler(node.target):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function" and part is not None:
                meta.set_part(copies[node], part)
    graph.eliminate_dead_code(_has_effect)
    return fx.GraphModule(traced, graph)


def _changes_nothing(node: fx.Node, source: fx.Node) -> bool:
    return node.target is aten.view.default and meta.same_layout(meta.value(source), meta.value(node))


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure()


def check_updates_come_last(graph: fx.Graph) -> None:
    """Refuse a step that writes to parameters before its last forward or backward.

    Gathers are shared and repeated by passes, which take it that a parameter is the same in all of them.

    Raises:
        ZgraphError: names the parameter's shard.
    """
    shards = {UnshardArgs.of(marker).shard for marker in nodes.call_functions(graph, nodes.is_unshard)}
    written: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if nodes.is_marker(node) and written:
            first = next(iter(written))
            raise ZgraphError(
                f"zgraph.training_step: the step writes to a parameter ({first.name}) before its last forward or "
                "backward; change parameters outside of the step, or after its last backward."
            )
        for argument in written_arguments(node):
            while traits.is_view(argument) and argument.all_input_nodes:
                argument = argument.all_input_nodes[0]
            if argument in shards:
                written[argument] = None
