"""Cleanup of a traced step: name its inputs, remove nodes without effect, and number its forwards and backwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from zgraph.errors import ZgraphError
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.torch_compat.modules import lazy_graph_module
from zgraph.torch_compat.operators import is_profiler

aten = torch.ops.aten
_NAMELESS = frozenset({aten.detach.default, aten.alias.default})


def clean(traced: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Copy a traced graph, naming its inputs.

    The copy omits detached aliases, views that change nothing, and profiler marks.

    Args:
        traced: graph from `make_fx`.
        names: names of its inputs.
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
    return lazy_graph_module(traced, graph)


def _changes_nothing(node: fx.Node, source: fx.Node) -> bool:
    return node.target is aten.view.default and meta.same_layout(meta.value(source), meta.value(node))


def _has_effect(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.is_impure()


def number_parts(graph: fx.Graph) -> None:
    """Number the forwards and backwards (parts) of a step such that no parameter changes within a part.

    The numbers increase where the step reads a parameter again after a write. Later passes let each part gather a
    parameter at most once.

    Raises:
        ZgraphError: a backward needs a parameter that has changed since its forward; the message names the shard.
    """
    writes: Counter[fx.Node] = Counter()
    made_of: dict[fx.Node, tuple[fx.Node, int]] = {}  # gathered parameters, and views of them: shard, writes before
    shards = {UnshardArgs.of(marker).shard for marker in nodes.call_functions(graph, nodes.is_unshard)}
    added, is_changed = 0, False
    for node in graph.nodes:
        for shard, before in (made_of[source] for source in node.all_input_nodes if source in made_of):
            if writes[shard] != before:
                raise ZgraphError(
                    f"zgraph.training_step: the step writes to a parameter ({shard.name}) between a forward that reads "
                    "it and that forward's backward; call backward() first, then step."
                )
        if nodes.is_unshard(node):
            shard = UnshardArgs.of(node).shard
            made_of[node] = shard, writes[shard]
            added, is_changed = added + 2 * is_changed, False
        elif traits.is_reshaping(node) and node.all_input_nodes[0] in made_of:
            made_of[node] = made_of[node.all_input_nodes[0]]
        part = meta.part(node)
        if part is not None and added:
            meta.set_part(node, part + added)
        written = [source for source in dataflow.written_sources(node) if source in shards]
        writes.update(written)
        is_changed = is_changed or bool(written)
