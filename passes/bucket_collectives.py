"""Merge small collectives into buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from zgraph import meta, nodes
from zgraph.graph_pass import Fact, GraphPass, PassContext
from zgraph.torch_compat import wait_op

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class BucketCollectives(GraphPass):
    """Let neighbouring collectives of one kind, group and dtype share one, up to a number of bytes.

    A gather bucket stands where its first member stood, a reduction bucket where its last did. The order of summation
    over ranks does not change: a bucket is summed element by element, like its members.
    Leaves alone: collectives larger than a bucket, those that depend on one another, and gathers that a window keeps:
    they run once for several forwards, straight into what is kept.

    Attributes:
        bucket_bytes: the most that one collective carries, counted on whole parameters and gradients.
    """

    bucket_bytes: int

    name: ClassVar[str] = "bucket_collectives"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.STARTS_HOISTED, Fact.OVERLAP_SCHEDULED})

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(
                f"bucket_collectives: bucket_bytes={self.bucket_bytes} holds nothing; write a positive number of "
                "bytes, or leave the pass out of the pipeline."
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        # Gathers first: what remains of the replicated gradients' means is a gather too, and is bucketed after the
        # exchange that it depends on.
        buckets = 0
        for predicate in (nodes.is_all_gather, nodes.is_all_to_all, nodes.is_reduce_scatter, nodes.is_all_gather):
            plan = plan_buckets(gm.graph, predicate, self.bucket_bytes)
            for bucket in plan:
                merge(gm.graph, bucket)
            # What reshapes a member's result may stand before the bucket, whose place is that of its last member.
            nodes.restore_order(gm.graph)
            buckets += len(plan)
        if not buckets:
            found = any(nodes.is_start(node) for node in gm.graph.nodes)
            fitting = f"no two neighbouring collectives fit into {self.bucket_bytes} bytes"
            ctx.note(self, fitting if found else "no collectives here")
        return buckets > 0


@dataclass(frozen=True)
class Bucket:
    """Starts to be merged, and the node before which the merged one goes."""

    starts: tuple[fx.Node, ...]
    anchor: fx.Node


def plan_buckets(graph: fx.Graph, predicate: Any, bucket_bytes: int) -> list[Bucket]:
    """Fill buckets greedily in program order; only buckets of two or more are returned."""
    order = nodes.order_of(graph)
    open_buckets: dict[tuple[object, ...], list[fx.Node]] = {}
    closed: list[list[fx.Node]] = []
    for start in nodes.call_functions(graph, predicate):
        key = _key(start)
        if key is None:
            continue
        members = open_buckets.setdefault(key, [])
        full = sum(map(nodes.whole_bytes, [*members, start])) > bucket_bytes
        if members and (full or _anchor([*members, start], order) is None):
            closed.append(members)
            members = open_buckets[key] = []
        members.append(start)
    closed.extend(open_buckets.values())
    # Merging one bucket moves no member of another, so the anchors found here stay valid.
    return [
        Bucket(tuple(members), anchor)
        for members in closed
        if len(members) > 1 and (anchor := _anchor(members, order)) is not None
    ]


def _key(start: fx.Node) -> tuple[object, ...] | None:
    """Equal for collectives that one can replace; None for those whose result is used in a way we do not know."""
    wait = nodes.wait_of(start)
    if wait is None or len(start.users) != 1 or not meta.parameters(start):
        return None
    sent = meta.tensor_value(start.all_input_nodes[0])
    if any(not isinstance(size, int) for size in sent.shape):
        return None
    from_inputs = nodes.copy_in(start) is not None
    saved = meta.is_tagged_saved(start)
    key: tuple[object, ...] = (start.target, nodes.group_of(start), sent.dtype, from_inputs, saved)
    if nodes.is_all_to_all(start):
        total = _sum_of(wait)
        return None if total is None else (*key, *total.args[1:])
    return (*key, start.args[1:])


def _sum_of(wait: fx.Node) -> fx.Node | None:
    users = list(wait.users)
    return users[0] if len(users) == 1 and nodes.is_sum_ranks(users[0]) else None


def _anchor(members: Sequence[fx.Node], order: dict[fx.Node, int]) -> fx.Node | None:
    """Before which node the merged collective can go, or None where its members depend on one another."""
    last = members[-1]
    results = [cast(fx.Node, nodes.wait_of(start)) for start in members]
    if all(order[user] > order[last] for wait in results[:-1] for user in _readers(wait)):
        return last
    first = members[0]
    if all(_can_precede(start.all_input_nodes[0], first, order) for start in members):
        return first
    return None


def _readers(wait: fx.Node) -> list[fx.Node]:
    """Who computes with the result; sums over ranks, copies and further collectives only carry it on."""
    pending, found = dict.fromkeys(wait.users), dict[fx.Node, None]()
    while pending:
        user = pending.popitem()[0]
        if nodes.is_communication(user):
            pending.update(dict.fromkeys(user.users))
        else:
            found[user] = None
    return list(found)


def _can_precede(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether node is there before anchor, or is a copy of inputs that can be moved there."""
    if order[node] < order[anchor]:
        return True
    if nodes.is_start(node) or nodes.is_wait(node) or not (nodes.is_communication(node) or nodes.is_reshaping(node)):
        return False
    return all(_can_precede(source, anchor, order) for source in node.all_input_nodes)


def _bring_before(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> None:
    if order[node] < order[anchor]:
        return
    for source in node.all_input_nodes:
        _bring_before(source, anchor, order)
    nodes.move_before(node, anchor)


def merge(graph: fx.Graph, bucket: Bucket) -> None:
    """Replace the members by one collective over their concatenation; the order of nodes is restored later."""
    order = nodes.order_of(graph)
    for start in bucket.starts:
        _bring_before(start.all_input_nodes[0], bucket.anchor, order)
    with graph.inserting_before(bucket.anchor):
        if nodes.is_all_gather(bucket.starts[0]):
            old = _merge_gathers(graph, bucket.starts)
        else:
            old = _merge_reductions(graph, bucket.starts)
    nodes.erase_dead(graph, old)


def _merge_gathers(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """cat of the flat chunks, one gather, and for each member its columns of [N, total], made contiguous."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    world = cast(int, starts[0].args[1])
    sent = [start.all_input_nodes[0] for start in starts]
    sizes = [math.prod(meta.tensor_value(node).shape) for node in sent]
    flat = [_flat(graph, node, [size], start) for node, size, start in zip(sent, sizes, starts, strict=True)]
    packed = meta.create(graph, aten.cat.default, (flat,))
    name = _name("all_gather_bucket", starts)
    start = meta.create(graph, starts[0].target, (packed, *starts[0].args[1:]), like=starts[0], name=name)
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    rows = meta.create(graph, aten.view.default, (wait, [world, sum(sizes)]))
    _work_for(starts, packed, start, wait, rows)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    offset = 0
    for old, size in zip(waits, sizes, strict=True):
        columns = meta.create(graph, aten.slice.Tensor, (rows, 1, offset, offset + size), like=old)
        copied = meta.create(
            graph, aten.clone.default, (columns,), {"memory_format": torch.contiguous_format}, like=old
        )
        whole = meta.create(graph, aten.view.default, (copied, list(meta.tensor_value(old).shape)), like=old)
        old.replace_all_uses_with(whole)
        offset += size
    return [*starts, *waits]


def _merge_reductions(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """cat of the [N, n] chunks along n, one exchange and one sum; each member's mean is a view of the result."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    exchange = nodes.is_all_to_all(starts[0])
    sums = [cast(fx.Node, _sum_of(wait)) for wait in waits] if exchange else waits
    world = cast(int, sums[0].args[1] if exchange else starts[0].args[2])
    sent = [start.all_input_nodes[0] for start in starts]
    sizes = [math.prod(meta.tensor_value(node).shape) // world for node in sent]
    chunks = [_flat(graph, node, [world, size], start) for node, size, start in zip(sent, sizes, starts, strict=True)]
    packed = meta.create(graph, aten.cat.default, (chunks, 1))
    flat = meta.create(graph, aten.view.default, (packed, [world * sum(sizes)]))
    args: tuple[Any, ...] = (
        ([sum(sizes)] * world, [sum(sizes)] * world, starts[0].args[3]) if exchange else starts[0].args[1:]
    )
    kind = "all_to_all_bucket" if exchange else "reduce_scatter_bucket"
    start = meta.create(graph, starts[0].target, (flat, *args), name=_name(kind, starts))
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    total = wait
    if exchange:
        total = meta.create(graph, sums[0].target, (wait, *sums[0].args[1:]))
    _work_for(starts, packed, flat, start, wait, total)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    offset = 0
    for old, size in zip(sums, sizes, strict=True):
        part = meta.create(graph, aten.slice.Tensor, (total, 0, offset, offset + size), like=old)
        shaped = meta.create(graph, aten.view.default, (part, list(meta.tensor_value(old).shape)), like=old)
        old.replace_all_uses_with(shaped)
        offset += size
    return [*starts, *waits, *sums] if exchange else [*starts, *waits]


def _flat(graph: fx.Graph, node: fx.Node, shape: list[int], start: fx.Node) -> fx.Node:
    if not meta.tensor_value(node).is_contiguous():
        node = meta.create(graph, aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, like=start)
    return meta.create(graph, aten.view.default, (node, shape), like=start)


def _work_for(starts: Sequence[fx.Node], *made: fx.Node) -> None:
    names = [name for start in starts for name in meta.parameters(start)]
    handles = [handle for start in starts for handle in meta.handles(start)]
    for node in made:
        meta.set_parameters(node, names, handles)


def _name(kind: str, starts: Sequence[fx.Node]) -> str:
    return f"{kind}_{meta.label(starts[0])}_{len(starts)}"
