"""Turn `zgraph::unshard` into a cast, an all_gather and its wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.dialect.window_ops import keeps_gathered
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.runtime.chunks import Chunk, chunk_rows
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class LowerGathers(GraphPass):
    """Cast the local shard, gather it just before its first use, and cut the padding off.

    The cast comes before the gather, so that narrow types travel: the marker's own, and one that every reader applies,
    as under autocast. A replicated parameter, or a group of one, needs no collective.
    Leaves alone: nothing; every marker is lowered.
    """

    name: ClassVar[str] = "lower_gathers"
    provides: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        markers = list(nodes.call_functions(gm.graph, nodes.is_unshard))
        for marker in markers:
            _lower(gm.graph, marker, ctx)
        if not markers:
            ctx.note(self, "nothing is gathered here")
        return bool(markers)


def plan_narrow_cast(marker: fx.Node) -> torch.dtype | None:
    """The dtype that every reader casts the gathered parameter to, where that makes it narrower."""
    casts = [nodes.is_cast(user) for user in marker.users]
    if not casts or casts[0] is None or any(cast != casts[0] for cast in casts):
        return None
    return casts[0] if casts[0].itemsize < UnshardArgs.of(marker).dtype.itemsize else None


def _lower(graph: fx.Graph, marker: fx.Node, ctx: PassContext) -> None:
    narrow = plan_narrow_cast(marker)
    returned = nodes.returned_by(graph)
    escapes = any(part in returned for part in nodes.reshaped_values(marker))
    replace_marker(graph, marker, narrow, lambda: _gathered(graph, marker, narrow, ctx, must_copy=escapes))


def replace_marker(graph: fx.Graph, marker: fx.Node, narrow: torch.dtype | None, build: Callable[[], fx.Node]) -> None:
    """Let the readers of an unshard read something else, made just before the first of them.

    Args:
        graph, marker: the unshard.
        narrow: the result stands for the cast to this dtype, which every reader applies; None: for the marker itself.
        build: makes the result, at the graph's insertion point.
    """
    replaced = list(marker.users) if narrow is not None else [marker]
    readers = [user for node in replaced for user in node.users]
    anchor = min(readers, default=marker.next)  # nodes compare by their place in the graph
    with graph.inserting_before(anchor):
        whole = build()
    for node in replaced:
        node.replace_all_uses_with(whole)
    edits.erase_dead(graph, dict.fromkeys([*replaced, marker, UnshardArgs.of(marker).shard]))


def _gathered(
    graph: fx.Graph, marker: fx.Node, narrow: torch.dtype | None, ctx: PassContext, *, must_copy: bool
) -> fx.Node:
    args = UnshardArgs.of(marker)
    label = meta.label(marker)
    shard = chunk = nodes.without_views(args.shard)
    for dtype in (args.dtype, narrow):
        if dtype is not None:
            chunk = meta.create_cast(graph, chunk, dtype, like=marker)
    if not meta.tensor_value(chunk).is_contiguous():
        chunk = meta.create(
            graph, aten.clone.default, (chunk,), {"memory_format": torch.contiguous_format}, like=marker
        )
    world = ctx.group_size(args.group_name)
    if args.zero_stage == 0 or world == 1:
        if must_copy and chunk is shard:
            # A graph must not return an alias of its input where the trace promised a new tensor.
            chunk = meta.create(graph, aten.clone.default, (chunk,), like=marker)
        return chunk
    rows = args.shape[0]
    missing = chunk_rows(rows, world) - meta.tensor_value(chunk).shape[0]
    if missing:
        padding = [0, 0] * (len(args.shape) - 1) + [0, missing]
        chunk = meta.create(graph, aten.constant_pad_nd.default, (chunk, padding), like=marker)
    target, arguments = all_gather_op(), (chunk, world, args.group_name)
    if keeps_gathered(args.zero_stage, args.window):
        target = torch.ops.zgraph.all_gather_kept.default
        arguments = (chunk, args.handle, world, args.window, args.group_name)
    start = meta.create(graph, target, arguments, like=marker, name=f"all_gather_{label}")
    meta.set_chunks(start, [Chunk(rows, math.prod(args.shape[1:]), (args.group_name,))])
    whole = meta.create(graph, wait_op(), (start,), like=marker, name=f"wait_{label}")
    if world * chunk_rows(rows, world) != rows:
        whole = meta.create(graph, aten.slice.Tensor, (whole, 0, 0, rows), like=marker)
    return whole
