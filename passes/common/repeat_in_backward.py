"""Values of a whole training step that backward makes again, instead of finding them alive."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from zgraph.graph import dataflow, edits, meta


def repeat_in_backward(graph: fx.Graph, repeated: Iterable[tuple[fx.Node, fx.Node]]) -> None:
    """Copy nodes of forwards into the backwards behind them, which then read the copies.

    Originals that nobody reads any more are erased.

    Args:
        graph: of a whole step.
        repeated: nodes that may run twice, and the node of backward before which each of them runs again; in program
            order. What one of them reads is alive there, or repeated before.
    """
    part = dataflow.parts_of(graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node, anchor in repeated:
        with graph.inserting_before(anchor):
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
        meta.set_part(copies[node], part[anchor])
    for node, copy in copies.items():
        for reader in list(node.users):
            if part.get(reader) == part[node] + 1:
                reader.replace_input_with(node, copy)
    edits.erase_dead(graph, copies)
