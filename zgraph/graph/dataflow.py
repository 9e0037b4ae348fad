"""Follows a value through views, casts and copies, to its users and to its sources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import fx

from zgraph.graph import meta, nodes, traits
from zgraph.torch_compat.operators import written_arguments


def reshaped_values(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the node, and all nodes whose values come from the node's result only by views, casts and copies."""
    pending = [node]
    while pending:
        value = pending.pop()
        yield value
        pending.extend(user for user in value.users if traits.is_reshaping(user))


def without_views(node: fx.Node) -> fx.Node:
    """Skip no-op views: return the node that a chain of such views ending with `node` starts from.

    A no-op view has the same shape, strides and dtype as its input; `DTensor.to_local`, for example, leaves one.
    """
    while node.target is torch.ops.aten.view.default:
        source = cast(fx.Node, node.args[0])
        if not meta.same_layout(meta.value(source), meta.value(node)):
            break
        node = source
    return node


def below_views(node: fx.Node) -> fx.Node:
    """Skip views: return the node that a chain of views ending with `node` starts from."""
    while traits.is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def needed_for(kept: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that compute the values `kept`, or write to them, directly or indirectly.

    The search stops at `zgraph::unshard` and `zgraph::reduce_grad` nodes, whose inputs may differ between ranks.
    """
    needed = set(kept)
    for node in reversed(graph.nodes):
        if (node in needed or not needed.isdisjoint(written_sources(node))) and not nodes.is_marker(node):
            needed.update((node, *node.all_input_nodes, *map(below_views, node.all_input_nodes)))
    return needed


def written_sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a call writes to; for an argument that is a view, the view's base."""
    return list(map(below_views, written_arguments(node)))


def parts_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return, for each call in the graph of a whole training step, the number of its part.

    Part 0 is the first forward, 1 its backward, 2 the second forward, and so on; an optimizer's step is a part of its
    own, with an even number. A call without a recorded number has the number of the call before it.
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
    """Return the nodes between graph inputs and a collective's start; None unless all of them cast, pad or pack data.

    Inputs reloaded from the host count as graph inputs.
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
