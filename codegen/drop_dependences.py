"""Remove `zgraph::depend` from a final graph, where nothing removes unread gathers any more."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from zgraph.graph import dataflow, edits, meta, nodes, traits

aten = torch.ops.aten


def drop_dependences(graph: fx.Graph) -> None:
    """Let readers of a value that depends on others read the value itself, or a copy where they could tell."""
    found = list(nodes.call_functions(graph, lambda node: node.target is torch.ops.zgraph.depend.default))
    if not found:
        return
    written = {source for node in graph.nodes for source in dataflow.written_sources(node)}
    returned = dict.fromkeys(node for node in nodes.returned_by(graph) if isinstance(node, fx.Node))
    copied = [node for node in found if _must_copy(node, written, returned)]
    for node in found:
        sources = node.all_input_nodes
        if node in copied:
            node.target, node.args = aten.clone.default, (sources[0],)
            continue
        node.replace_all_uses_with(sources[0])
        edits.erase_dead(graph, [node, *(one for one in sources if not nodes.is_communication(one))])


def _must_copy(node: fx.Node, written: set[fx.Node], returned: dict[fx.Node, None]) -> bool:
    """Whether it shows that both share their memory: by a write to it, by strides, or in what the graph returns.

    A graph must not return an alias of its input if the trace promised a new tensor.
    """
    value = node.all_input_nodes[0]
    base = value
    while traits.is_view(base) and base.all_input_nodes:
        base = base.all_input_nodes[0]
    if base in written or not meta.same_layout(meta.value(node), meta.value(value)):
        return True
    return base.op == "placeholder" and any(view in returned for view in _views(node))


def _views(node: fx.Node) -> Iterator[fx.Node]:
    pending = [node]
    while pending:
        view = pending.pop()
        yield view
        pending.extend(user for user in view.users if traits.is_view(user) and user.args[0] is view)
