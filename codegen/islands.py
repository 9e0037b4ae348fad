"""Islands: runs of compute between the nodes whose order was planned, each cut out as a graph of its own.

A scheduled graph in order, where c is compute and S, W start and wait for a collective, has three islands here:

    c c c S c c c W c c        ->        [ccc] S [ccc] W [cc]

A compiler may do as it likes inside an island. What the passes have ordered stays between them, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zgraph import nodes
from zgraph.torch_compat import OpOverload, returns_alias, written_arguments


@dataclass(frozen=True)
class Island:
    """A run of nodes as a graph of its own.

    Attributes:
        members: the nodes, in order.
        inputs: nodes outside that members read, in the order in which they are first read: the graph's placeholders.
        outputs: members that are read outside, in order: what the graph returns, as a tuple.
        gm: the graph. Names are numbers, so islands that compute the same have equal code.
    """

    members: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gm: fx.GraphModule


def find_islands(graph: fx.Graph, least_fusible: int = 2) -> list[Island]:
    """All islands with at least `least_fusible` nodes that a compiler can fuse; the others are left to run node by node.

    Changes nothing but the places of `getitem` nodes, which move up to the call whose results they take.
    """
    _join_getitems(graph)
    islands: list[Island] = []
    run: list[fx.Node] = []
    for node in [*graph.nodes, None]:
        if node is not None and is_compute(node):
            run.append(node)
            continue
        if sum(map(_is_fusible, run)) >= least_fusible:
            islands.append(cut_out(run))
        if node is None or node.op not in ("placeholder", "get_attr"):  # these have no place in time
            run = []
    return islands


def is_compute(node: fx.Node) -> bool:
    """Whether a compiler may take the node, and move it among its neighbours.

    Not so: communication and other ops of zgraph, ops that write to their inputs, and random ones, which draw in order.
    """
    if nodes.is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_compute(source)
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not written_arguments(node)
        and _has_values(node)
    )


def _has_values(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))


def _is_fusible(node: fx.Node) -> bool:
    """A pointwise operator, reduction or copy; views cost nothing, and matmuls run in a library either way."""
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__
    return not returns_alias(node.target) and name not in _IN_A_LIBRARY


# Their results come from a library call, with or without a compiler (aten names).
_IN_A_LIBRARY = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "empty", "empty_strided"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)


def _join_getitems(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if nodes.is_getitem(node) and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            last = source
            while nodes.is_getitem(last.next) and last.next.args[0] is source:
                last = last.next
            if node is not last and node.prev is not last:
                last.append(node)


def cut_out(members: Sequence[fx.Node]) -> Island:
    """The graph of these nodes; it shares nothing with the one they stand in."""
    inside = set(members)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = list(dict.fromkeys(arg for node in members for arg in node.all_input_nodes if arg not in inside))
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{number}")
        copies[node].meta["val"] = node.meta["val"]
    for number, node in enumerate(members):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"n{number}")
        copies[node].meta["val"] = node.meta["val"]
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in outputs))
    return Island(tuple(members), tuple(inputs), tuple(outputs), fx.GraphModule({}, graph))
