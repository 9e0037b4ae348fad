"""Following a value through views, casts and copies, forwards and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import fx

from zgraph.graph import meta, nodes, traits
from zgraph.torch_compat.operators import written_arguments


def reshaped_values(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all nodes that are only views, casts or copies of its result."""
    pending = [node]
    while pending:
        value = pending.pop()
        yield value
        pending.extend(user for user in value.users if traits.is_reshaping(user))


def without_views(node: fx.Node) -> fx.Node:
    """The node below a chain of views that change nothing and end with `node`; `node` itself if there is none.

    `DTensor.to_local`, for example, leaves such a view.
    """
    while node.target is torch.ops.aten.view.default:
        source = cast(fx.Node, node.args[0])
        if not meta.same_layout(meta.value(source), meta.value(node)):
            break
        node = source
    return node


def below_views(node: fx.Node) -> fx.Node:
    """The node at the base of a chain of views that ends with `node`; `node` itself if it is not a view."""
    while traits.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def needed_for(kept: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute the values `kept` or write to them.

    Stops at markers, because the inputs of markers may differ between ranks.
    """
    needed = set(kept)
    for node in reversed(graph.nodes):
        if (node in needed or not needed.isdisjoint(written_sources(node))) and not nodes.is_marker(node):
            needed.update((node, *node.all_input_nodes, *map(below_views, node.all_input_nodes)))
    return needed


def written_sources(node: fx.Node) -> list[fx.Node]:
    """The nodes to whose memory a call writes. For an argument that is a view, this is the base of the view."""
    return list(map(below_views, written_arguments(node)))


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number the forwards and backwards of a whole step, and return for each call the number of its part.

    0 is the first forward, 1 its backward, 2 the next forward, and so on. An optimizer's step has a number of its own,
    an even one. A call without a recorded number has the number of the call before it.
    """
    found: dict[fx.Node, int] = {}
    part = 0
    for node in nodes.call_functions(graph, lambda _: True):
        known = meta.part(node)
        part = part if known is None else known
        found[node] = part
    return found


def _is_brought(node: fx.Node) -> bool:
    return nodes.is_copy_wait(node) and nodes.is_reload(nodes.start_of(node))


def copy_in(start: fx.Node) -> list[fx.Node] | None:
    """The nodes between the graph's inputs and a start, if these nodes only cast, pad and pack; otherwise None.

    Reloaded copies of offloaded inputs count as inputs.
    """
    found: dict[fx.Node, None] = {}
    pending = list(start.all_input_nodes)
    for node in pending:
        if node.op in ("placeholder", "get_attr") or node in found or _is_brought(node):
            continue
        is_copy = nodes.is_communication(node) or traits.is_reshaping(node)
        if nodes.is_start(node) or nodes.is_wait(node) or not is_copy:
            return None
        found[node] = None
        pending.extend(node.all_input_nodes)
    return list(found)
