"""Islands: runs of compute between nodes whose order was planned, each copied into a graph of its own.

A scheduled graph, where c is compute, and S and W start and wait for a collective, has three islands:

    c c c S c c c W c c        ->        [ccc] S [ccc] W [cc]

The compiler may reorder nodes inside an island. All other nodes keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zgraph.graph import meta, nodes, traits
from zgraph.tiers.tier import HOST
from zgraph.torch_compat.fake_values import resolved_size, size_symbols, unknown_number
from zgraph.torch_compat.operators import OpOverload, written_arguments

LEAST_FUSIBLE = 2  # fusing needs at least two


@dataclass(frozen=True)
class Island:
    """A run of compute nodes as a graph of its own.

    Attributes:
        members: the nodes of the original graph, in order.
        inputs: nodes outside the island that members read, ordered by first read, then nodes that give a value to
            symbols in their sizes; the placeholders of `gm`.
        outputs: members that are read outside the island, in order; `gm` returns them as a tuple.
        gm: the new graph. Its names are numbers, so that islands that compute the same have equal code.
    """

    members: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gm: fx.GraphModule


def find_islands(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the runs of compute nodes that are worth compiling, in order.

    Moves each `getitem` up to the call whose result it selects; the graph is not changed otherwise.
    """
    _join_getitems(graph)
    found: list[list[fx.Node]] = []
    run: list[fx.Node] = []
    for node in graph.nodes:
        if is_compute(node):
            run.append(node)
        elif node.op not in ("placeholder", "get_attr"):  # these do not end a run
            found.append(run)
            run = []
    return [run for run in found if sum(map(traits.is_fusible, run)) >= LEAST_FUSIBLE]


def is_compute(node: fx.Node) -> bool:
    """Return whether the compiler may compile a node together with its neighbours, and reorder them.

    False for communication and other operators of zgraph, operators that write to their inputs, random operators (which
    must draw in program order) and, in graphs for a GPU, views of tensors on the host. On CPU, also False for copies in
    and out of collectives' buffers: compiling does not make the copies faster. Strides differ between buckets, so a
    kernel fused with such a copy would be compiled again for each bucket, at two seconds of C++.
    """
    if nodes.is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_compute(source)
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and not (nodes.is_communication(node) and _is_on_cpu(node))
        and meta.space(node) != HOST
        and node.target.namespace in ("aten", "prims")
        and not traits.is_random(node)
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


def _join_getitems(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if isinstance(node.meta.get("val"), tuple | list):
            taken = [user for user in node.users if nodes.is_getitem(user)]
            for user in reversed(taken):
                node.append(user)


def cut_out(members: Sequence[fx.Node]) -> Island:
    """Copy a run of nodes into a new graph that shares nothing with the old one; return it as an island."""
    inside = set(members)
    inputs = list(dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside))
    inputs += _sizes_of(inputs, members[0].graph)
    outputs = [node for node in members if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{number}")
        copies[node].meta["val"] = _value_inside(node.meta["val"])
    for number, node in enumerate(members):
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"value{number}")
        copies[node].meta["val"] = node.meta["val"]
    graph.output(tuple(copies[node] for node in outputs))
    return Island(tuple(members), tuple(inputs), tuple(outputs), fx.GraphModule({}, graph))


def _sizes_of(inputs: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """Return inputs of the whole graph that give a value to each symbol which `inputs` have only in an expression.

    A cache of s + 1 tokens, for example, does not tell the compiler what s is.
    """
    found = [size_symbols(meta.value(node)) for node in inputs]
    unknown = set[object]().union(*(used for _, used in found)) - set[object]().union(*(known for known, _ in found))
    sizes: list[fx.Node] = []
    for node in graph.find_nodes(op="placeholder") if unknown else ():
        known, _ = size_symbols(meta.value(node))
        if known & unknown:
            sizes.append(node)
            unknown -= known
    return sizes


def _value_inside(value: Any) -> Any:
    """Return the fake value of an island's input, with an unknown number in place of a symbolic float."""
    if isinstance(value, torch.SymInt):
        return resolved_size(value)
    return unknown_number(value) if isinstance(value, torch.SymFloat) else value
