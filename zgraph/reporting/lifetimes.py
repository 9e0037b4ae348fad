"""How often each parameter of a compiled frame is gathered, and how long the gathered parameter is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

from torch import fx

from zgraph.compiler.graph_pass import Direction
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.graph.traffic import transfers_of


class Lifetime(StrEnum):
    """How often a frame gathers a parameter, and how long the gathered parameter is kept."""

    REPLICATED = "never gathered"
    WINDOW = "gathered once per window"
    SAVED = "gathered once, kept for backward"
    REGATHERED = "gathered again in backward"
    FORWARD = "gathered in forward alone"
    BACKWARD = "gathered in backward alone"
    INFERENCE = "gathered for this forward"


def lifetimes_of(
    graphs: Mapping[Direction, fx.Graph], parameters: Iterable[str], user_outputs: int | None = None
) -> dict[str, Lifetime]:
    """Return the lifetime of each of a frame's parameters, by name.

    Args:
        graphs: final graphs of the frame: forward and backward, or a single graph of inference or of a whole step.
        parameters: names of all parameters that the frame reads.
        user_outputs: number of the forward's outputs that the user gets; the others are saved for backward.
    """
    gathered = {direction: dict(_gathered_in(graph)) for direction, graph in graphs.items()}
    forward = graphs.get("forward")
    saved = {} if forward is None else dict.fromkeys(_saved_by(forward, user_outputs))
    if "step" in graphs:
        counts = Counter(name for name, _ in _gathered_in(graphs["step"]))
        # Gathered once, it is kept from its first reader to its last.
        kinds = (Lifetime.REPLICATED, Lifetime.SAVED, Lifetime.REGATHERED)
        return {name: kinds[min(counts[name], 2)] for name in parameters}
    return {name: _lifetime(name, gathered, saved) for name in parameters}


def _lifetime(name: str, gathered: Mapping[str, Mapping[str, bool]], saved: Mapping[str, object]) -> Lifetime:
    found = [direction for direction, names in gathered.items() if name in names]
    if not found:
        return Lifetime.REPLICATED
    if any(gathered[direction][name] for direction in found):
        return Lifetime.WINDOW
    if "inference" in found:
        return Lifetime.INFERENCE
    if "forward" not in found:
        return Lifetime.BACKWARD
    if "backward" in found:
        return Lifetime.REGATHERED
    return Lifetime.SAVED if name in saved else Lifetime.FORWARD


def _gathered_in(graph: fx.Graph) -> Iterator[tuple[str, bool]]:
    """Yield (name, is_kept) of each parameter that the graph gathers.

    `is_kept` tells whether the gathered parameter is kept for the other forwards of the accumulation window.
    """
    for node in graph.nodes:
        if nodes.is_unshard(node):
            for transfer in transfers_of(node):
                yield from ((name, transfer.kind == "all_gather_kept") for name in transfer.parameters)
        # Gathers of computed values assemble the mean of a replicated gradient.
        elif nodes.is_gather(node) and dataflow.copy_in(node) is not None:
            yield from ((name, nodes.is_kept_gather(node)) for name in meta.parameters(node))


def _saved_by(forward: fx.Graph, user_outputs: int | None) -> Iterator[str]:
    for out in nodes.returned_by(forward)[user_outputs:]:
        names: tuple[str, ...] = ()
        node: fx.Node | None = out if isinstance(out, fx.Node) else None
        while node is not None:
            names = names or meta.parameters(node)  # the nearest: a bucket's wait works for all its members
            if nodes.is_wait(node) or nodes.is_unshard(node):
                yield from names
                break
            node = node.all_input_nodes[0] if traits.is_reshaping(node) and node.all_input_nodes else None
