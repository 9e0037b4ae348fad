"""Turn `zgraph::unshard` into a cast, an all_gather and its wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class LowerGathers(GraphPass):
    """Lower each `unshard`: cast the local shard, gather it just before its first use, and remove the padding.

    If `unshard` or all of its readers cast to a narrower dtype, as under autocast, the cast is done before the gather,
    so that fewer bytes are sent. A replicated parameter, or a group of one rank, needs no collective.
    Leaves alone: nothing.
    """

    name: ClassVar[str] = "lower_gathers"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        _read_after_dependences(gm.graph)
        markers = list(nodes.call_functions(gm.graph, nodes.is_unshard))
        for marker in markers:
            _lower(gm.graph, marker)
        if not markers:
            ctx.note(self, "nothing is gathered here")
        return bool(markers)


def _read_after_dependences(graph: fx.Graph) -> None:
    """Move views of a unit's parameters after the unit's `depend` node, which reads all parameters of the unit.

    A unit is a module that gathers its parameters together. Each gather is placed before its first reader. A view
    before the `depend` node, such as a weight transposed for backward, would order the gathers differently from rank to
    rank.
    """
    for node in list(nodes.call_functions(graph, lambda node: node.target is torch.ops.zgraph.depend.default)):
        order = nodes.order_of(graph)
        markers = [source for source in node.all_input_nodes if nodes.is_unshard(source)]
        early = [view for marker in markers for view in dataflow.reshaped_values(marker) if order[view] < order[node]]
        moved = {view for view in early if view not in markers}
        # A view that is already used in computation before the node, as outside of the unit, stays where it is.
        while kept := {
            view for view in moved if any(order[user] < order[node] and user not in moved for user in view.users)
        }:
            moved -= kept
        last = node
        for view in sorted(moved, key=order.__getitem__):
            last.append(view)
            last = view


def plan_narrow_cast(marker: fx.Node) -> torch.dtype | None:
    """Return the narrower dtype to which every reader casts the gathered parameter; None if there is none."""
    casts = [traits.cast_dtype(user) for user in marker.users]
    if not casts or casts[0] is None or any(cast != casts[0] for cast in casts):
        return None
    return casts[0] if casts[0].itemsize < UnshardArgs.of(marker).dtype.itemsize else None


def _lower(graph: fx.Graph, marker: fx.Node) -> None:
    narrow = plan_narrow_cast(marker)
    returned = nodes.returned_by(graph)
    escapes = any(part in returned for part in dataflow.reshaped_values(marker))
    replace_marker(graph, marker, narrow, lambda: _gathered(graph, marker, narrow, must_copy=escapes))


def replace_marker(graph: fx.Graph, marker: fx.Node, narrow: torch.dtype | None, build: Callable[[], fx.Node]) -> None:
    """Replace an unshard with nodes built just before its first reader.

    Args:
        graph, marker: the graph and the unshard node in it.
        narrow: dtype to which every reader casts. The built nodes replace the casts or, if this is None, the marker.
        build: builds the nodes at the graph's insertion point, and returns the one with the result.
    """
    replaced = list(marker.users) if narrow is not None else [marker]
    readers = [user for node in replaced for user in node.users]
    anchor = min(readers, default=marker.next)  # nodes compare by their place in the graph
    with graph.inserting_before(anchor):
        whole = build()
    for node in replaced:
        node.replace_all_uses_with(whole)
    edits.erase_dead(graph, dict.fromkeys([*replaced, marker, UnshardArgs.of(marker).shard]))


def _gathered(graph: fx.Graph, marker: fx.Node, narrow: torch.dtype | None, *, must_copy: bool) -> fx.Node:
    args = UnshardArgs.of(marker)
    label = meta.label(marker)
    shard = chunk = dataflow.without_views(args.shard)
    for dtype in (args.dtype, narrow):
        if dtype is not None:
            chunk = meta.create_cast(graph, chunk, dtype, like=marker)
    if not meta.tensor_value(chunk).is_contiguous():
        chunk = meta.create(
            graph, aten.clone.default, (chunk,), {"memory_format": torch.contiguous_format}, like=marker
        )
    layout = args.layout
    if not layout.is_gathered:
        if must_copy and chunk is shard:
            # A graph must not return an alias of its input if the trace promised a new tensor.
            chunk = meta.create(graph, aten.clone.default, (chunk,), like=marker)
        return chunk
    missing = layout.chunk_rows - meta.tensor_value(chunk).shape[0]
    if missing:
        padding = [0, 0] * (len(layout.shape) - 1) + [0, missing]
        chunk = meta.create(graph, aten.constant_pad_nd.default, (chunk, padding), like=marker)
    target, arguments = all_gather_op(), (chunk, layout.world, layout.gather_group)
    if layout.keeps_gathered(args.window):
        target = torch.ops.zgraph.all_gather_kept.default
        arguments = (chunk, args.handle, layout.world, args.window, layout.gather_group)
    start = meta.create(graph, target, arguments, like=marker, name=f"all_gather_{label}")
    meta.set_chunks(start, [layout.param_chunk])
    whole = meta.create(graph, wait_op(), (start,), like=marker, name=f"wait_{label}")
    if layout.padded_rows != layout.shape[0]:
        whole = meta.create(graph, aten.slice.Tensor, (whole, 0, 0, layout.shape[0]), like=marker)
    return whole
