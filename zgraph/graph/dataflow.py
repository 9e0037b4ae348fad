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
    """The producer behind a node's views that change nothing, such as the view that `DTensor.to_local` leaves."""
    while node.target is torch.ops.aten.view.default:
        source = cast(fx.Node, node.args[0])
        if not meta.same_layout(meta.value(source), meta.value(node)):
            break
        node = source
    return node


def below_views(node: fx.Node) -> fx.Node:
    """The producer of the memory that a node's chain of views shows; the node itself if it is not a view."""
    while traits.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def needed_for(kept: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """The nodes that compute or write the kept values, traced back only to markers, whose inputs may differ by rank."""
    needed = set(kept)
    for node in reversed(graph.nodes):
        if (node in needed or not needed.isdisjoint(written_sources(node))) and not nodes.is_marker(node):
            needed.update((node, *node.all_input_nodes, *map(below_views, node.all_input_nodes)))
    return needed


def written_sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a call writes to: for an argument that is a view, the producer of the viewed memory."""
    return list(map(below_views, written_arguments(node)))


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of the forward or backward that each call of a whole step belongs to.

    0 is the first forward, 1 its backward, 2 the next forward, and so on. An optimizer's step takes the number of a
    next forward; a forward that reads the updated parameters has a later number. A call without a recorded number has
    that of the call before it.
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
    """The nodes that cast, pad and pack the graph's inputs for a start; None if any other kind of node lies in between.

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
