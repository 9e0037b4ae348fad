"""Recomputes values in the backward of a whole training step, instead of keeping them alive."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from zgraph.graph import dataflow, edits, meta


def repeat_in_backward(graph: fx.Graph, repeated: Iterable[tuple[fx.Node, fx.Node]]) -> None:
    """Copy nodes of each forward into the following backward, which then reads the copies.

    Originals without remaining readers are erased.

    Args:
        graph: graph of a whole training step.
        repeated: pairs (node to repeat, backward node before which to put the copy), in program order. The inputs of
            each node must be alive there, or be repeated by an earlier pair.
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
