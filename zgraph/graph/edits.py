"""Graph edits that several passes use: copying graphs, and moving, removing and reordering nodes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import torch
from torch import fx

from zgraph.graph import meta
from zgraph.graph.nodes import order_of, output_of
from zgraph.torch_compat.modules import lazy_graph_module

aten = torch.ops.aten


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with its node names and metadata; fake values are shared with the original.

    The copy generates its Python code only when needed.
    """
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(gm.graph, {}))
    output.meta = dict(output_of(gm.graph).meta)
    return lazy_graph_module(gm, graph)


def drop_unchanging_views(node: fx.Node) -> None:
    """Replace no-op views of a node by the node itself, and no-op views of these views, too."""
    for user in list(node.users):
        if user.target is aten.view.default and meta.same_layout(meta.value(node), meta.value(user)):
            drop_unchanging_views(user)
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)


def restore_order(graph: fx.Graph) -> None:
    """Sort a graph topologically: each node placed before one of its inputs moves to just after its last input."""
    order = order_of(graph)
    missing = {node: len(node.all_input_nodes) for node in order}
    ready = [(position, node) for node, position in order.items() if not missing[node]]
    placed: dict[fx.Node, None] = {}
    while ready:
        _, node = heapq.heappop(ready)  # the earliest node that can be placed here: in a sound graph, the next one
        placed[node] = None
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (order[user], user))
    relink(placed)


def relink(placed: Iterable[fx.Node]) -> None:
    """Reorder a graph's nodes to the given order."""
    previous: fx.Node | None = None
    for node in placed:
        if previous is not None and previous.next is not node:
            previous.append(node)
        previous = node


def move_before(node: fx.Node, anchor: fx.Node) -> None:
    """Move `node` to the place just before `anchor`."""
    if node.next is not anchor:
        anchor.prepend(node)


def erase_dead(graph: fx.Graph, candidates: Iterable[fx.Node]) -> None:
    """Erase the calls among `candidates` that have no users, from the last to the first."""
    for node in sorted(candidates, reverse=True):  # nodes compare by their position in the graph
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
