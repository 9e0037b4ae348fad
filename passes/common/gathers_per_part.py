"""How often a parameter is gathered: once for all reads in a forward or backward, and again in each backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from torch import fx

from zgraph.graph import dataflow, edits, meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs


def share_gathers(graph: fx.Graph) -> int:
    """Let all reads of a parameter share one gather; in a whole training step, all reads in one forward or backward.

    Reads in different dtypes, and reads before and after an update, do not share. Parameters of stages 1 and 2 are
    gathered once for all forwards and backwards.

    Returns:
        The number of gathers that were removed.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    writes: Counter[fx.Node] = Counter()
    removed = 0
    for node in list(graph.nodes):
        writes.update(dataflow.written_sources(node))
        if not nodes.is_unshard(node):
            continue
        args = UnshardArgs.of(node)
        part = meta.part(node) if args.layout.zero_stage in (0, 3) else None
        shard = dataflow.without_views(args.shard)
        kept = first.setdefault((replace(args, shard=shard), writes[shard], part), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            edits.erase_dead(graph, [node, args.shard])
            removed += 1
    return removed


def repeat_gathers(graph: fx.Graph, kept: Collection[fx.Node] = ()) -> int:
    """Give each forward and each backward its own gather of every stage 0 or 3 parameter that it reads.

    Views and casts of a gathered parameter, such as its transpose, are repeated with its gather.

    Args:
        graph: graph of a whole training step.
        kept: gathers not to repeat; later forwards and backwards continue to read their results.

    Returns:
        The number of added gathers.
    """
    added = 0
    order = nodes.order_of(graph)
    originals: dict[fx.Node, fx.Node] = {}
    for marker in nodes.call_functions(graph, nodes.is_unshard):
        if UnshardArgs.of(marker).layout.zero_stage not in (0, 3) or marker in kept:
            continue
        values = dict.fromkeys(dataflow.reshaped_values(marker))
        readers: dict[int, list[fx.Node]] = {}
        for node in sorted(dict.fromkeys(user for value in values for user in value.users), key=order.__getitem__):
            part = meta.part(node)
            if part is not None and part != meta.part(marker) and node.op == "call_function":
                readers.setdefault(part, []).append(node)
        for part, found in readers.items():
            _repeat(graph, values, found, part, originals)
            added += 1
    return added


def _repeat(
    graph: fx.Graph,
    values: dict[fx.Node, None],
    readers: list[fx.Node],
    part: int,
    originals: dict[fx.Node, fx.Node],
) -> None:
    """Let the `readers` in one part of a step (a forward or a backward) read a new gather of a parameter.

    The gather and each repeated view are placed just before their own first readers. An earlier view would change the
    order in which the parameters of a module are gathered.

    Args:
        values: the gathered parameter and its views, in all parts.
        readers: nodes of the part that read any of `values`.
        part: number of the part.
        originals: maps each copied node to its original; new copies are added.
    """
    copies: dict[fx.Node, fx.Node] = {}

    def copy(value: fx.Node) -> fx.Node:
        value = originals.get(value, value) if meta.part(value) != part else value
        if value not in values or meta.part(value) == part:
            return value
        if value not in copies:
            sources = {source: copy(source) for source in value.all_input_nodes}
            copies[value] = graph.node_copy(value, sources.__getitem__)
            originals[copies[value]] = value
            meta.set_part(copies[value], part)
        return copies[value]

    for reader in readers:
        with graph.inserting_before(reader):
            for source in reader.all_input_nodes:
                copied = copy(source)
                if copied is not source:
                    reader.replace_input_with(source, copied)
