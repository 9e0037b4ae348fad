"""Splits a graph into two graphs that run one after the other; each computes some of the outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.graph import edits, meta, nodes
from zgraph.torch_compat.aot import aot_input_index, is_tangent
from zgraph.torch_compat.modules import lazy_graph_module
from zgraph.torch_compat.operators import written_arguments


@dataclass(frozen=True)
class Halves:
    """The two graphs that result from a split.

    Attributes:
        first: graph that returns the early outputs, then the values that the second graph needs.
        second: graph that returns the late outputs.
        first_inputs, second_inputs: inputs of the whole graph that each half takes, as indices.
        early, late: outputs of the whole graph that each half returns, as indices. Outputs in neither tuple are None.
        outputs: number of outputs of the whole graph.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    first_inputs: tuple[int, ...]
    second_inputs: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]
    outputs: int


def split_graph(gm: fx.GraphModule, late: Iterable[int]) -> Halves | None:
    """Split a graph into a first half with everything that early outputs need, and a second half with the rest.

    Nodes keep their order. Each half waits for the collectives that it starts.

    Args:
        gm: a final graph, which is not changed.
        late: indices of the outputs that the second half returns.

    Returns:
        Both halves. The second half takes inputs of the whole graph, then the additional values that the first half
        returns. None if a node writes to a value that the other half reads.
    """
    returned = nodes.returned_by(gm.graph)
    late_places = [place for place in sorted(set(late)) if isinstance(returned[place], fx.Node)]
    early_places = [
        place for place, node in enumerate(returned) if isinstance(node, fx.Node) and place not in late_places
    ]
    needed = _needed(returned[place] for place in early_places)
    if _written_across(gm.graph, needed):
        return None
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    rest = [node for node in gm.graph.nodes if node.op == "call_function" and node not in needed]
    read = dict.fromkeys(source for node in rest for source in node.all_input_nodes)
    read |= dict.fromkeys(returned[place] for place in late_places)
    handed = sorted(node for node in needed if node in read and node.op == "call_function")
    first = _graph_of(gm, [node for node in inputs if node in needed], sorted(needed), early_places, returned, handed)
    taken = [node for node in inputs if node in read]
    second = _graph_of(gm, [*taken, *handed], rest, late_places, returned, [])
    return Halves(
        first=first,
        second=second,
        first_inputs=tuple(place for place, node in enumerate(inputs) if node in needed),
        second_inputs=tuple(place for place, node in enumerate(inputs) if node in read),
        early=tuple(early_places),
        late=tuple(late_places),
        outputs=len(returned),
    )


def early_first(graph: fx.Graph, late: Iterable[int]) -> int:
    """Move inputs, and all nodes that early outputs need, to a graph's front; return the number of these nodes.

    Args:
        graph: the graph, changed in place.
        late: indices of all other outputs.
    """
    returned, late_places = nodes.returned_by(graph), set(late)
    needed = _needed(
        node for place, node in enumerate(returned) if isinstance(node, fx.Node) and place not in late_places
    )
    front = [node for node in graph.nodes if node.op in ("placeholder", "get_attr") or node in needed]
    ahead = dict.fromkeys(front)
    edits.relink([*front, *(node for node in graph.nodes if node not in ahead)])
    return len(front)


def weight_gradients(joint: fx.Graph, forward_outputs: int) -> tuple[tuple[int, ...], tuple[int | None, ...]] | None:
    """Find the outputs of a joint graph that are reduced parameter gradients.

    Args:
        joint: joint graph of forward and backward, with its `zgraph::reduce_grad` nodes.
        forward_outputs: number of outputs of the forward, which come first.

    Returns:
        Two tuples. The first has the indices of the reduced gradients among all gradients. The second has, for each
        gradient, the index of its input among the graph's tensor inputs; None if the input is a number. None in place
        of both tuples if no gradient is reduced, or if several inputs are parts of one tensor, such as a DTensor.
    """
    inputs = [node for node in joint.find_nodes(op="placeholder") if not is_tangent(node)]
    grads = nodes.returned_by(joint)[forward_outputs:]
    sources = [index for node in inputs if (index := aot_input_index(node)) is not None]
    if len(grads) != len(inputs) or len(set(sources)) != len(sources):
        return None
    reduced: dict[fx.Node, None] = {}
    for node in joint.nodes:
        if nodes.is_reduce_grad(node) or (node.op != "output" and any(one in reduced for one in node.all_input_nodes)):
            reduced[node] = None
    late = tuple(place for place, node in enumerate(grads) if node in reduced)
    tensors: list[int | None] = []
    for node in inputs:
        is_tensor = isinstance(meta.value(node), Tensor)
        tensors.append(sum(place is not None for place in tensors) if is_tensor else None)
    return (late, tuple(tensors)) if late else None


def _needed(outputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the outputs and the nodes that they depend on, and every wait and selected result of such a node."""
    found: dict[fx.Node, None] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        waiting += node.all_input_nodes
        if nodes.is_start(node):
            waiting += nodes.waits_of(node)
        if node.op == "call_function" and not isinstance(meta.value(node), Tensor | torch.SymInt | torch.SymFloat):
            waiting += [user for user in node.users if nodes.is_getitem(user)]
    return found


def _written_across(graph: fx.Graph, needed: dict[fx.Node, None]) -> bool:
    """Return whether a node writes to a value that a node of the other half reads."""
    return any(
        (user in needed) != (node in needed)
        for node in graph.nodes
        for written in written_arguments(node)
        for user in written.users
        if user.op == "call_function"
    )


def _graph_of(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    members: Sequence[fx.Node],
    places: Sequence[int],
    returned: Sequence[Any],
    handed: Sequence[fx.Node],
) -> fx.GraphModule:
    """Create one half of a split graph; nodes keep their names.

    Args:
        gm: graph that is split.
        inputs: nodes that become inputs of the half.
        members: nodes of the half.
        places: indices of the whole graph's outputs that the half returns.
        returned: outputs of the whole graph.
        handed: nodes whose values the half returns after the outputs at `places`.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    read = {source for member in members for source in member.all_input_nodes}
    for node in gm.graph.find_nodes(op="get_attr"):
        if node in read:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in members:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in [*(returned[place] for place in places), *handed]))
    output.meta = {}
    return lazy_graph_module(gm, graph)
