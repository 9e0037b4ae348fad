"""Islands: runs of compute between the nodes whose order was planned, each cut out as a graph of its own.

A scheduled graph, where c is compute and S, W start and wait for a collective, has three islands:

    c c c S c c c W c c        ->        [ccc] S [ccc] W [cc]

A compiler may do as it likes inside an island. What the passes have ordered stays between them, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zgraph.graph import nodes
from zgraph.torch_compat.operators import OpOverload, returns_alias, written_arguments

LEAST_FUSIBLE = 2  # with fewer there is nothing to fuse


@dataclass(frozen=True)
class Island:
    """A run of nodes as a graph of its own.

    Attributes:
        members: the nodes, in order.
        inputs: nodes outside that members read, in the order in which they are first read: the graph's placeholders.
        outputs: members that are read outside, in order: what the graph returns, as a tuple.
        gm: the graph. Its names are numbers, so islands that compute the same have equal code.
    """

    members: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gm: fx.GraphModule


def find_islands(graph: fx.Graph) -> list[list[fx.Node]]:
    """The runs that are worth compiling, in order; everything else is left to run node by node.

    Moves each `getitem` up to the call whose result it takes, and changes nothing else.
    """
    _join_getitems(graph)
    found: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    for node in graph.nodes:
        if is_compute(node):
            run.append(node)
        elif node.op not in ("placeholder", "get_attr"):  # these have no place in time
            found.append(run)
            run = []
    return [run for run in found if sum(map(_is_fusible, run)) >= LEAST_FUSIBLE]


def is_compute(node: fx.Node) -> bool:
    """Whether a compiler may take the node, and move it among its neighbours.

    It may not take communication and other ops of zgraph, ops that write to their inputs, and random ones: they draw in
    the order in which they run. On CPU it may not take the copies in and out of collectives' buffers either: they are
    as fast without it, and their strides, which are those of the bucket, would make every kernel around them another
    one, at two seconds of C++ compiler each.
    """
    if nodes.is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_compute(source)
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not (nodes.is_communication(node) and _is_on_cpu(node))
        and node.target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not written_arguments(node)
        and _yields_tensors(node)
    )


def _is_on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, Tensor) and first.device.type == "cpu"


def _yields_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))


# What a library computes with or without a compiler (aten names).
_IN_A_LIBRARY = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})


def _is_fusible(node: fx.Node) -> bool:
    """A pointwise operator, a reduction or a copy: not a view, not a call into a library."""
    if not isinstance(node.target, OpOverload) or returns_alias(node.target):
        return False
    name = node.target.overloadpacket.__name__
    return name not in _IN_A_LIBRARY and "scaled_dot_product" not in name and not name.startswith("empty")


def _join_getitems(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.meta.get("val"), tuple | list):
            taken = [user for user in node.users if nodes.is_getitem(user)]
            for user in reversed(taken):
                node.append(user)


def cut_out(members: Sequence[fx.Node]) -> Island:
    """A graph of these nodes; it shares nothing with the one they stand in."""
    inside = set(members)
    inputs = list(dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside))
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{number}")
        copies[node].meta["val"] = node.meta["val"]
    for number, node in enumerate(members):
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"value{number}")
        copies[node].meta["val"] = node.meta["val"]
    graph.output(tuple(copies[node] for node in outputs))
    return Island(tuple(members), tuple(inputs), tuple(outputs), fx.GraphModule({}, graph))
