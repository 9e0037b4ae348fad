"""Merge small collectives into buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import fx

from zgraph.analysis.cost import CostModel, NodeCost
from zgraph.analysis.liveness import curve_of
from zgraph.analysis.storages import storages_of
from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext
from zgraph.errors import check_bytes, check_choice
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.traffic import transfers_of
from zgraph.passes.common.bucket_costs import GatherQueue, Member, ReductionQueue, link_bytes
from zgraph.passes.common.merge_collectives import Bucket, Mode, is_compressed, merge, result_of
from zgraph.passes.common.replicated_gradients import ReplicatedReduction
from zgraph.runtime.chunks import MIB
from zgraph.tiers.devices import kind_of_backend
from zgraph.tiers.lanes import COMPUTE

Gathers = Literal["auto", Mode]
ETHERNET_BYTES = 2 * MIB  # large enough that latency on Ethernet is a small part
# For unknown links: in a ring of eight, the transfer takes fifteen times the latency over NVLink and three hundred
# times over a 200 Gbit/s port; a layer of a large model still makes a few buckets.
NCCL_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class BucketCollectives(GraphPass):
    """Merge neighbouring collectives of the same kind, process group and dtype into buckets of limited size.

    A bucket of gathers runs where its first member was, a bucket of reductions where its last member was. Each element
    is still summed over the ranks in the same order.

    A bucket of replicated gradients (ZeRO stage 0) is one flat vector, padded once at the end. Bucketing may change
    which rank sums an element; with `LowerReductions` summing in rank order, results stay bitwise equal. The averaged
    gradients are views of one storage. Buckets of sharded gradients, of hybrid sharding and of compressed gradients
    keep the chunks of their members separate.

    Leaves alone: collectives larger than a bucket; collectives that depend on each other; gathers whose result is kept
    for several forwards of a `no_sync` window.

    Attributes:
        bucket_bytes: maximum bytes per collective, counted on unsharded parameters and gradients without padding.
            None: the size that suits the link of the target's hardware, see `link_bytes`. In addition, a collective
            then stays out of a bucket if waiting for it costs more time than the saved latency; the estimate assumes
            that gathers and reductions do not share a link.
            "auto": on NCCL as for None; by the preset for these GPUs if the target has no hardware, and 64 MiB without
            a preset. On other backends 2 MiB, large enough to make Ethernet latency negligible.
        gathers: how the parameters of a bucket are gathered.
            "flat": through one flat buffer, from which each parameter is copied, or decoded if it was quantized.
            "coalesced": each parameter directly into a storage of its own. NCCL launches these gathers as one; other
            backends run them one after another.
            "sequential": each parameter separately, just before its first reader, without prefetch. Few parameters
            are then unsharded at a time. A parameter that is read twice stays unsharded in between.
            "auto": with a target, the faster of "flat" and "coalesced" that fits the budget, or else "sequential";
            without a target, "coalesced" on NCCL and "flat" on other backends.
        latency_share: with bucket_bytes=None, a bucket is large enough when latency is this share of its transfer.
    """

    bucket_bytes: int | Literal["auto"] | None
    gathers: Gathers = "auto"
    latency_share: float = 0.02

    name: ClassVar[str] = "bucket_collectives"
    requires: ClassVar[frozenset[str]] = frozenset({Fact.GATHERS_LOWERED, Fact.REDUCTIONS_LOWERED})
    provides: ClassVar[frozenset[str]] = frozenset({Fact.COLLECTIVES_BUCKETED})
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.WAITS_SUNK, Fact.STARTS_HOISTED, Fact.OVERLAP_SCHEDULED})

    def __post_init__(self) -> None:
        if self.bucket_bytes not in (None, "auto"):
            others = ', None for what suits the link, "auto", or leave the pass out of the pipeline'
            check_bytes("bucket_collectives", others, bucket_bytes=self.bucket_bytes)
        check_choice("bucket_collectives", ("auto", *get_args(Mode)), gathers=self.gathers)
        if not 0 < self.latency_share <= 1:
            raise ValueError(
                f"bucket_collectives: latency_share={self.latency_share} is the part of a transfer that its latency "
                "may take; write a number above 0, up to 1."
            )

    @property
    def needs_target(self) -> bool:
        return self.bucket_bytes is None

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if self.bucket_bytes == "auto":
            chosen, known = self._chosen(gm.graph, ctx)
            return chosen.run(gm, known)
        graph = gm.graph
        counts = Counter[Mode]()
        merged = 0
        # Gathers of parameters first: gathers of replicated gradients' means are bucketed with the exchanges that they
        # depend on.
        exchanges = (nodes.is_all_to_all, nodes.is_reduce_scatter, nodes.is_all_reduce)
        for predicate in (nodes.is_all_gather, *exchanges, nodes.is_all_gather):
            limits = self._by_link(graph, ctx) if self.bucket_bytes is None else self._by_bytes
            plan = plan_buckets(graph, predicate, limits, one_by_one=self.gathers == "sequential")
            modes = plan_modes(graph, plan, self.gathers, ctx)
            for bucket, mode in zip(plan, modes, strict=True):
                merge(graph, bucket, mode)
            # Nodes that reshape a member's result may come before the bucket, which takes its last member's place.
            edits.restore_order(graph)
            merged += len(plan)
            counts += Counter(
                mode for bucket, mode in zip(plan, modes, strict=True) if gathers_parameter(bucket.starts[0])
            )
        if self.gathers == "auto" and counts:
            ctx.note(self, "gathers: " + ", ".join(f"{count} {mode}" for mode, count in sorted(counts.items())))
        if not merged:
            found = any(map(nodes.is_collective, graph.nodes))
            size = "a bucket that pays" if self.bucket_bytes is None else f"{self.bucket_bytes} bytes"
            ctx.note(self, f"no two neighbouring collectives fit into {size}" if found else "no collectives here")
        return merged > 0

    def _chosen(self, graph: fx.Graph, ctx: PassContext) -> tuple[BucketCollectives, PassContext]:
        """Replace bucket_bytes="auto" by the backend's value; return the new pass and a context with hardware costs."""
        start = next(nodes.call_functions(graph, nodes.is_collective), None)
        sent = [] if start is None else nodes.sent_by(start)
        device = meta.tensor_value(sent[0]).device if sent else torch.device("cpu")
        if start is None or not kind_of_backend(ctx.group_backend(nodes.group_of(start), device)).is_gpu:
            return replace(self, bucket_bytes=ETHERNET_BYTES), ctx
        machine = ctx.hardware or ctx.machine
        if machine is None:
            return replace(self, bucket_bytes=NCCL_BYTES), ctx
        known = replace(ctx, hardware=machine, cost_of=ctx.cost_of or CostModel(machine).cost)  # notes are shared
        return replace(self, bucket_bytes=None), known

    def _by_bytes(self, starts: Sequence[fx.Node]) -> Filling:
        assert isinstance(self.bucket_bytes, int)
        return Filling(self.bucket_bytes)

    def _by_link(self, graph: fx.Graph, ctx: PassContext) -> Callable[[Sequence[fx.Node]], Filling]:
        compute_us = compute_ahead(graph, cast("Callable[[fx.Node], NodeCost]", ctx.cost_of))
        all_us = compute_us[nodes.output_of(graph)]

        def limits(starts: Sequence[fx.Node]) -> Filling:
            sent = [next(transfers_of(start)) for start in starts]
            kind, group_name = sent[0].kind, sent[0].group_name
            latency_us = ctx.collective_us(kind, 0, group_name)
            members = [
                Member(compute_us[start], ctx.collective_us(kind, one.sent_bytes, group_name) - latency_us)
                for start, one in zip(starts, sent, strict=True)
            ]
            latency_us += ctx.sharing.issue_us
            limit_bytes = link_bytes(
                total_bytes=sum(map(carried_bytes, starts)),
                latency_us=latency_us,
                transfer_us=sum(member.transfer_us for member in members),
                compute_us=all_us,
                latency_share=self.latency_share,
            )
            if len(starts) > 1:
                ctx.note(
                    self,
                    f"{kind} on group {group_name}: up to {limit_bytes} bytes each, for {latency_us:.1f} us latency",
                )
            queue = GatherQueue if gathers_parameter(starts[0]) else ReductionQueue
            return Filling(limit_bytes, queue(members, latency_us, all_us))

        return limits


@dataclass(frozen=True)
class Filling:
    """Limits for filling buckets with collectives.

    Attributes:
        limit_bytes: maximum bytes of a bucket.
        queue: decides from predicted times whether a collective joins the open bucket; None: it joins if it fits.
    """

    limit_bytes: int
    queue: GatherQueue | ReductionQueue | None = None


def plan_buckets(
    graph: fx.Graph,
    predicate: Callable[[fx.Node], bool],
    limits: Callable[[Sequence[fx.Node]], Filling],
    *,
    one_by_one: bool = False,
) -> list[Bucket]:
    """Fill buckets greedily in program order; return the buckets with at least two members.

    Args:
        graph: graph to search.
        predicate: whether to consider a collective, given its start node.
        limits: returns the limits for filling buckets with the given collectives, all of which can be merged.
        one_by_one: put each gather of a parameter into a bucket of its own, and return these buckets as well.
    """
    order = nodes.order_of(graph)
    compatible: dict[tuple[object, ...], list[fx.Node]] = {}
    exchanges = nodes.call_functions(graph, nodes.is_reduction)
    # Gathers of means are merged only together with their exchanges: otherwise each mean would have to be copied out.
    means = [found.gather for start in exchanges if (found := ReplicatedReduction.of(start)) is not None]
    for start in nodes.call_functions(graph, predicate):
        key = None if start in means else _key(start)
        if key is not None:
            compatible.setdefault(key, []).append(start)
    buckets: list[list[fx.Node]] = []
    for starts in compatible.values():
        if one_by_one and gathers_parameter(starts[0]):
            buckets += [[start] for start in starts]
        else:
            buckets += [members for members in _fill(starts, limits(starts), order) if len(members) > 1]
    # Merging one bucket moves no member of another, so the anchors found here stay valid.
    return [Bucket(tuple(members), anchor) for members in buckets if (anchor := _anchor(members, order)) is not None]


def _fill(starts: Sequence[fx.Node], filling: Filling, order: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    buckets: list[list[fx.Node]] = []
    sizes = {start: carried_bytes(start) for start in starts}
    for start in starts:
        candidate = [*buckets[-1], start] if buckets else []
        size = sum(map(sizes.__getitem__, candidate))
        joins = (
            bool(candidate)
            and size <= filling.limit_bytes
            and _anchor(candidate, order) is not None
            and (meta.is_tagged_awaited(start) or not meta.is_tagged_awaited(candidate[-2]))
            and (filling.queue is None or filling.queue.should_join())
        )
        if joins:
            buckets[-1].append(start)
        else:
            buckets.append([start])
        if filling.queue is not None:
            filling.queue.add(joins=joins)
    return buckets


def carried_bytes(start: fx.Node) -> int:
    """Return the bytes of a collective's unsharded tensor.

    A replicated gradient, which is reduced and then gathered, counts in the wider dtype of the two collectives.
    """
    found = None if nodes.is_gather(start) else ReplicatedReduction.of(start)
    return nodes.unsharded_bytes(start) if found is None else found.carried_bytes


def gathers_parameter(start: fx.Node) -> bool:
    """Return whether a collective gathers a parameter, as opposed to an averaged gradient."""
    return nodes.is_all_gather(start) and dataflow.copy_in(start) is not None


def compute_ahead(graph: fx.Graph, cost_of: Callable[[fx.Node], NodeCost]) -> dict[fx.Node, float]:
    """Return the microseconds of compute before each node.

    Copies into and out of collective buffers do not count, because their times may differ between ranks.
    """
    ahead: dict[fx.Node, float] = {}
    spent = 0.0
    for node in graph.nodes:
        ahead[node] = spent
        if node.op == "call_function" and not nodes.is_communication(node):
            cost = cost_of(node)
            spent += cost.us if cost.lane == COMPUTE else 0.0
    return ahead


# --- modes ----------------------------------------------------------------------------------------------------------


def plan_modes(graph: fx.Graph, plan: Sequence[Bucket], gathers: Gathers, ctx: PassContext) -> list[Mode]:
    """Return for each bucket the mode in which its members are merged: "flat", "coalesced" or "sequential"."""
    alive_bytes: list[int] | None = None
    modes: list[Mode] = []
    for bucket in plan:
        if not gathers_parameter(bucket.starts[0]):
            modes.append("flat")
        elif gathers != "auto":
            modes.append(gathers)
        elif ctx.plan_bytes is None:
            modes.append(_cheaper_mode(bucket, ctx))
        else:
            alive_bytes = alive_bytes or _alive_bytes(graph, inputs_die=ctx.direction == "backward")
            modes.append(_fitting_mode(bucket, ctx, ctx.plan_bytes - _highest(graph, bucket, alive_bytes)))
    return modes


def _cheaper_mode(bucket: Bucket, ctx: PassContext) -> Mode:
    """Return the faster mode for a bucket of gathers: "coalesced" costs launches, "flat" costs copies."""
    first = bucket.starts[0]
    if nodes.is_quantized_gather(first):
        return "flat"  # codes are written to the flat buffer, and decoded from it, without copies
    if ctx.hardware is None:
        device = meta.tensor_value(nodes.sent_by(first)[0]).device
        backend = ctx.group_backend(nodes.group_of(first), device)
        return "coalesced" if kind_of_backend(backend).groups_launches else "flat"
    more = 0 if kind_of_backend(ctx.hardware.backend).groups_launches else len(bucket.starts) - 1
    launch_us = ctx.collective_us(next(transfers_of(first)).kind, 0, nodes.group_of(first)) + ctx.sharing.issue_us
    launches_us = more * launch_us
    dtype = meta.tensor_value(first).dtype
    copied = [*map(nodes.unsharded_bytes, bucket.starts)]
    copied.append(sum(copied) // ctx.group_size(nodes.group_of(first)))
    copies_us = sum(ctx.hardware.compute_us(0, 2 * size, dtype) for size in copied)
    return "coalesced" if launches_us < copies_us else "flat"


def _fitting_mode(bucket: Bucket, ctx: PassContext, room_bytes: int) -> Mode:
    """Return the first mode that fits in `room_bytes`: the faster one, then "coalesced", then "sequential"."""
    sizes = [*map(nodes.unsharded_bytes, bucket.starts)]
    needed: dict[Mode, int] = {"flat": sum(sizes), "coalesced": sum(sizes) - min(sizes), "sequential": 0}
    options: tuple[Mode, ...] = (_cheaper_mode(bucket, ctx), "coalesced")
    for mode in options:
        if needed[mode] <= room_bytes:
            return mode
    return "sequential"


def _alive_bytes(graph: fx.Graph, *, inputs_die: bool) -> list[int]:
    """Return the bytes alive while each node runs, equal on all ranks."""
    order = list(graph.nodes)
    return list(curve_of(order, storages_of(order, inputs_die=inputs_die, agreed=True)).bytes_during)


def _highest(graph: fx.Graph, bucket: Bucket, alive_bytes: Sequence[int]) -> int:
    """Return the peak of `alive_bytes` between a bucket's position in the graph and the last reader of its results."""
    order = nodes.order_of(graph)
    results = [cast(fx.Node, nodes.wait_of(start)) for start in bucket.starts]
    readers = [order[user] for result in results for node in dataflow.reshaped_values(result) for user in node.users]
    return max(alive_bytes[order[bucket.anchor] : 1 + max(readers, default=order[bucket.anchor])])


# --- what can be merged ---------------------------------------------------------------------------------------------


def _key(start: fx.Node) -> tuple[object, ...] | None:
    """Return a key that is equal for collectives that can be merged; None if the collective cannot be merged."""
    wait = nodes.wait_of(start)
    if wait is None or len(start.users) != 1 or not meta.parameters(start) or meta.is_tagged_at_use(start):
        return None
    sent = meta.tensor_value(start.all_input_nodes[0])
    if any(isinstance(size, torch.SymInt) for size in cast("tuple[Any, ...]", sent.shape)):
        return None
    from_inputs = dataflow.copy_in(start) is not None
    saved = meta.is_tagged_saved(start)
    addends = nodes.gathers_addends(start)
    # In a whole step, a bucket of two backwards would hold the gradients of the first until the second.
    part, skipped = meta.part(start), meta.is_tagged_skipped(start)
    key: tuple[object, ...] = (start.target, nodes.group_of(start), sent.dtype, from_inputs, saved, addends, part)
    key += (skipped,)
    if nodes.is_all_to_all(start):
        total = result_of(start)
        if total is None:
            return None
        if not is_compressed(start):
            return (*key, *total.args[1:])
        quantized = start.all_input_nodes[0].all_input_nodes[0]
        return (*key, *quantized.args[2:4], *quantized.args[5:], *total.args[4:])
    if nodes.is_quantized_gather(start):
        if not all(map(nodes.is_dequantize_shards, wait.users)):
            return None
        _, method, _, rank = start.all_input_nodes[0].args
        return (*key, start.args[1:], method, rank)
    total = wait if nodes.is_gather(start) else result_of(start)
    return (*key, start.args[1:]) if total is wait or total is None else (*key, start.args[1:], total.args[1:])


def _anchor(members: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> fx.Node | None:
    """Return the node before which the merged collective can run; None if members depend on each other."""
    last = members[-1]
    results = [cast(fx.Node, nodes.wait_of(start)) for start in members]
    if all(order[user] > order[last] for wait in results[:-1] for user in _readers(wait)):
        return last
    first = members[0]
    if all(_can_precede(start.all_input_nodes[0], first, order) for start in members):
        return first
    return None


def _readers(wait: fx.Node) -> list[fx.Node]:
    """Return the compute nodes that read a wait's result, directly or through sums, copies and other collectives."""
    pending, found = dict.fromkeys(wait.users), dict[fx.Node, None]()
    while pending:
        user = pending.popitem()[0]
        if nodes.is_communication(user):
            pending.update(dict.fromkeys(user.users))
        else:
            found[user] = None
    return list(found)


def _can_precede(node: fx.Node, anchor: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Return whether a node runs before the anchor, or can be moved there because it only copies earlier values."""
    if order[node] < order[anchor]:
        return True
    if nodes.is_start(node) or nodes.is_wait(node) or not (nodes.is_communication(node) or traits.is_reshaping(node)):
        return False
    return all(_can_precede(source, anchor, order) for source in node.all_input_nodes)
