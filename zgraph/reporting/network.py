"""`zgraph.graph_of`: converts a compiled graph to a networkx graph, for searching, drawing and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.compiler.graph_pass import PassContext
from zgraph.graph import meta, nodes, traits
from zgraph.graph.sizes import tensor_bytes, tensors_of
from zgraph.graph.text import dtype_text, safely, target_text, value_text
from zgraph.scheduling.simulate import simulate
from zgraph.scheduling.timeline import Timeline
from zgraph.torch_compat.operators import written_arguments

if TYPE_CHECKING:
    import networkx


def graph_of(gm: fx.GraphModule, ctx: PassContext | None = None) -> networkx.DiGraph[str]:
    """Convert an FX graph, such as the graph that a pass rewrites, to an independent `networkx.DiGraph`.

    Nodes keep their names and order. Attributes are strings, ints, floats and bools, which every file format supports.
    Unknown attributes are left out:

        op, target, value   as shown in dumps: "call_function", "aten.mm", "f32[4, 8]"
        shape, dtype        of the result
        bytes               total size of the result's tensors; symbolic sizes count by their hints
        position            index in the program
        parameters          names of the parameters that the node works for
        module, source      path of the user's module, and line of code, that the node comes from
        lane, us            lane on which the node runs, and its duration; only if ctx has costs
        begin_us, end_us    simulated begin and end; only if ctx has costs
        exposed_us          simulated time for which compute waits for the node
        critical            whether the node is on the critical path of the simulation

    Each edge has an attribute `kind`: "data"; "wait", from a collective's start to its wait; or "order", between nodes
    whose order matters without a data dependency: a read and an overwrite of a value, or consecutive collectives of a
    group.

    Args:
        gm: graph whose nodes have fake values.
        ctx: context of a pass, which provides costs; None: no costs.
    """
    costs = timeline = None
    if ctx is not None and ctx.cost_of is not None:
        costs = {node: ctx.cost_of(node) for node in nodes.call_functions(gm.graph, lambda _: True)}
        timeline = simulate(list(gm.graph.nodes), costs, ctx.sharing)
    return network_of(gm.graph, costs, timeline)


def network_of(
    graph: fx.Graph, costs: Mapping[fx.Node, NodeCost] | None, timeline: Timeline | None
) -> networkx.DiGraph[str]:
    """Convert a graph as `graph_of` does, with given costs and a given timeline."""
    import networkx  # costs 0.2 s, and is rarely needed

    network: Any = networkx.DiGraph()
    critical = dict.fromkeys(() if timeline is None else timeline.critical_path())
    for position, node in enumerate(graph.nodes):
        about = {"position": position, **_about(node)}
        if costs is not None and node in costs:
            about |= _cost(costs[node])
        if timeline is not None:
            span = timeline.spans[node]
            about |= {"begin_us": span.begin_us, "end_us": span.end_us, "critical": node in critical}
            if node in timeline.exposed_us:
                about["exposed_us"] = timeline.exposed_us[node]
        network.add_node(node.name, **about)
    for before, after, kind in _edges(graph):
        if not network.has_edge(before.name, after.name):
            network.add_edge(before.name, after.name, kind=kind)
    return network


def _about(node: fx.Node) -> dict[str, Any]:
    tensors = tensors_of(node)
    found: dict[str, Any] = {
        "op": node.op,
        "target": plain_text(target_text(node.target)),
        "value": plain_text(value_text(meta.value(node))),
        "shape": ", ".join(f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors),
        "dtype": ", ".join(dtype_text(tensor.dtype) for tensor in tensors),
        "bytes": sum(tensor_bytes(tensor) for tensor in tensors),
        "parameters": plain_text(", ".join(meta.parameters(node))),
        "module": plain_text(meta.module_path(node)),
        "source": plain_text(meta.source_line(node)),
    }
    return {name: value for name, value in found.items() if value != ""}


def _cost(cost: NodeCost) -> dict[str, Any]:
    return {} if cost.lane is None else {"lane": str(cost.lane), "us": float(cost.us)}


def _edges(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, str]]:
    """Yield edges as (source, target, kind).

    If two nodes have several edges, the caller keeps the first; so data edges come first.
    """
    last_of_group: dict[str, fx.Node] = {}
    order = nodes.order_of(graph)
    for node in graph.nodes:
        for source in node.all_input_nodes:
            yield source, node, "wait" if nodes.is_wait(node) and nodes.is_start(source) else "data"
        for written in written_arguments(node):
            for user in (user for alias in _aliases(written) for user in alias.users):
                if user is not node:
                    yield (user, node, "order") if order[user] < order[node] else (node, user, "order")
        if nodes.is_collective(node):
            group_name = nodes.group_of(node)
            if group_name in last_of_group:
                yield last_of_group[group_name], node, "order"
            last_of_group[group_name] = node


def _aliases(value: fx.Node) -> Iterator[fx.Node]:
    """Yield every node whose result shares the storage of `value`, including the value itself."""
    while traits.is_view(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        pending.extend(user for user in value.users if traits.is_view(user) and user.all_input_nodes[0] is value)


def plain_text(text: str) -> str:
    """Escape unprintable characters, which XML cannot represent."""

    def show() -> str:
        if text.isprintable():  # fast path for nearly every text
            return text
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)

    return safely(show, "?")
