"""Builds low-rank (PowerSGD) reductions: each bucket of gradients is sent as two small factors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from zgraph.compiler.graph_pass import PassContext
from zgraph.compression.low_rank import FACTOR_DTYPE, LowRank, matrix_shape
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.runtime.chunks import Chunk
from zgraph.runtime.window_state import ALONE
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten
# Extra bytes that a rank may send to save a second exchange: the next bucket's compute hides this amount, but not the
# latency of an exchange that starts when its result is needed.
SPARED_BYTES = 512 * 1024


def plan_low_rank_buckets(markers: Sequence[fx.Node], bucket_bytes: int) -> list[list[fx.Node]]:
    """Group reductions over the same ranks into buckets of up to `bucket_bytes` in fp32, ordered by last member."""
    buckets: list[list[fx.Node]] = []
    filled: dict[tuple[object, ...], tuple[list[fx.Node], int]] = {}
    for marker in markers:
        args = ReduceArgs.of(marker)
        layout, grad = args.layout, meta.tensor_value(args.grad)
        key = (layout.gather_group, layout.replica_group, args.reduction, args.window, args.dtype, grad.device)
        size = grad.numel() * FACTOR_DTYPE.itemsize
        bucket, held = filled.get(key, ([], 0))
        if not bucket or held + size > bucket_bytes:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(marker)
        filled[key] = bucket, held + size
    places = {marker: place for place, marker in enumerate(markers)}
    return sorted(buckets, key=lambda bucket: places[bucket[-1]])


def build_low_rank(graph: fx.Graph, markers: Sequence[fx.Node], ctx: PassContext, method: LowRank) -> None:
    """Replace reduce_grad nodes (markers) with low-rank reductions, bucket by bucket.

    To overlap exchanges with compute, the second (right) factor of a bucket is sent together with the first (left)
    factor of the next bucket. The means of a bucket are rebuilt when the following exchange has started:

        left 0 ... right 0, left 1 ... right 1, left 2, means 0 ... right 2, means 1, means 2

    In the graph of a whole training step, all means of a backward are rebuilt before any is read, because readers may
    write to them, and because the next backward needs the updated error feedback. Every rank gathers and sums the small
    factors; larger factors get new reduce_grad nodes, which `LowerReductions` lowers.
    """
    order = nodes.order_of(graph)
    parts = _parts(markers) if ctx.direction == "step" else [markers] if markers else []
    ends = [*(found[0] for found in parts[1:]), nodes.output_of(graph)]
    for found, end in zip(parts, ends, strict=False):
        if ctx.direction == "step":
            end = min([end, *_readers_behind(found, order)], key=order.__getitem__)
        buckets = [_Bucket(graph, one, ctx, method) for one in plan_low_rank_buckets(found, method.bucket_bytes)]
        for place, bucket in enumerate(buckets):
            with graph.inserting_before(bucket.markers[-1]):
                if place >= 1:
                    buckets[place - 1].exchange_right()
                bucket.exchange_left()
                if place >= 2:
                    buckets[place - 2].rebuild()
        with graph.inserting_before(end):
            buckets[-1].exchange_right()
            for bucket in buckets[-2:]:
                bucket.rebuild()
    # Nodes that reshape a gradient may still be where its own reduction was.
    edits.restore_order(graph)
    grads = [ReduceArgs.of(marker).grad for marker in markers]
    edits.erase_dead(graph, dict.fromkeys([*markers, *grads]))


def _parts(markers: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Group reduce_grad nodes (markers) by the backward in which they run."""
    found: dict[int | None, list[fx.Node]] = {}
    for marker in markers:
        found.setdefault(meta.part(marker), []).append(marker)
    return list(found.values())


def _readers_behind(markers: Sequence[fx.Node], order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the nodes after the last marker (reduce_grad node) that compute with reduced gradients."""
    values = [value for marker in markers for value in dataflow.reshaped_values(marker)]
    readers = [user for value in values for user in value.users if not traits.is_reshaping(user)]
    return [user for user in readers if order[user] > order[markers[-1]]]


@dataclass(eq=False)
class _Bucket:
    """Builds the nodes of one bucket's low-rank reduction at the graph's insertion point."""

    graph: fx.Graph
    markers: list[fx.Node]
    ctx: PassContext
    method: LowRank
    deltas: list[fx.Node] = field(default_factory=list[fx.Node])

    def __post_init__(self) -> None:
        self.members = [ReduceArgs.of(marker) for marker in self.markers]
        self.label = f"{meta.label(self.markers[0])}_{len(self.markers)}"
        shapes = [meta.tensor_value(args.grad).shape for args in self.members]
        sizes = [matrix_shape(shape) for shape in shapes]
        self.handles = [args.handle for args in self.members]
        self.sizes = ([rows for rows, _ in sizes], [columns for _, columns in sizes], self.method.rank)

    def exchange_left(self) -> None:
        grads = [self._grad(args, marker) for args, marker in zip(self.members, self.markers, strict=True)]
        made = self._call(torch.ops.zgraph.low_rank_left.default, grads, self.handles, *self.sizes)
        left, *self.deltas = made
        self.left = self._reduced(left)

    def exchange_right(self) -> None:
        made = self._call(torch.ops.zgraph.low_rank_right.default, self.left, self.deltas, self.handles, *self.sizes)
        self.basis, right = made
        self.right = self._reduced(right)

    def rebuild(self) -> None:
        first_rows: list[int] = []
        kept_rows: list[int] = []
        for args, rows in zip(self.members, self.sizes[0], strict=True):
            layout = args.layout
            per_row = rows // layout.shape[0]  # rows of the matrix for each row of the gradient
            first_rows.append(layout.first_row * per_row)
            kept_rows.append(layout.chunk_rows * per_row)
        first = self.members[0]
        means = self._call(
            torch.ops.zgraph.low_rank_means.default,
            *(self.basis, self.right, self.handles, *self.sizes, first_rows, kept_rows, first.dtype, first.window),
        )
        for marker, args, mean in zip(self.markers, self.members, means, strict=True):
            marker.replace_all_uses_with(self._shaped(mean, args, marker))

    def _shaped(self, mean: fx.Node, args: ReduceArgs, marker: fx.Node) -> fx.Node:
        """Give `mean` the shape of the parameter's local shard, without padded rows."""
        layout, rows = args.layout, args.layout.local_rows
        if len(layout.shape) > 2:
            unflattened = [layout.chunk_rows, *layout.shape[1:]]
            mean = meta.create(self.graph, aten.view.default, (mean, unflattened), like=marker)
        if rows == layout.chunk_rows:
            return mean
        return meta.create(self.graph, aten.slice.Tensor, (mean, 0, 0, rows), like=marker)

    def _grad(self, args: ReduceArgs, marker: fx.Node) -> fx.Node:
        """Return the gradient to compress, without a cast to fp32.

        At the end of a `no_sync` window, the accumulated gradients are added.
        """
        if args.layout.gradients_wait(args.window):
            waited = (args.grad, args.handle, args.dtype, args.layout.zero_stage)
            return meta.create(self.graph, torch.ops.zgraph.add_accumulated.default, waited, like=marker)
        if traits.cast_dtype(args.grad) == torch.float32:
            source = args.grad.all_input_nodes[0]
            if meta.tensor_value(source).dtype in (torch.bfloat16, torch.float16):
                return source
        return args.grad

    def _reduced(self, factor: fx.Node) -> fx.Node:
        """Sum or average a factor over all ranks, in rank order."""
        first, layout = self.members[0], self.members[0].layout
        groups = [name for name in (layout.reduce_group, layout.replica_group) if self.ctx.group_size(name) > 1]
        if len(groups) == 1:
            world, size = self.ctx.group_size(groups[0]), meta.tensor_value(factor).nbytes
            if (world - 1) * size - 2 * (world - 1) * size // world <= SPARED_BYTES:
                return self._summed_by_all(factor, groups[0], world)
        # Each rank averages a part, as for the gradient of a replicated parameter.
        sent = replace(
            first, grad=factor, dtype=FACTOR_DTYPE, wire_dtype=None, mean_dtype=None, zero_stage=0, window=ALONE
        )
        return self._communicate(torch.ops.zgraph.reduce_grad.default, *sent.flat())

    def _summed_by_all(self, factor: fx.Node, group_name: str, world: int) -> fx.Node:
        """Gather a factor and let every rank sum it: one exchange instead of two, but more bytes for over two ranks."""
        numel = meta.tensor_value(factor).shape[0]
        start = self._communicate(all_gather_op(), factor, world, group_name, name=f"all_gather_factor_{self.label}")
        meta.set_chunks(start, [Chunk(numel, 1, ("",))])
        received = self._communicate(wait_op(), start, name=f"wait_factor_{self.label}")
        member = self.members[0]
        divisor = member.layout.divisor(member.reduction)
        return self._communicate(torch.ops.zgraph.sum_ranks.default, received, world, divisor, FACTOR_DTYPE)

    def _communicate(self, target: object, *args: object, name: str | None = None) -> fx.Node:
        made = self._of_part(meta.create(self.graph, target, args, name=name))
        names = [name for marker in self.markers for name in meta.parameters(marker)]
        meta.set_parameters(made, names, [handle for marker in self.markers for handle in meta.handles(marker)])
        meta.tag_awaited(made)
        return made

    def _of_part(self, node: fx.Node) -> fx.Node:
        """Mark a node as part of the backward to which the bucket belongs, and return it.

        Only the graph of a whole training step, which has several parts, has such marks.
        """
        part = meta.part(self.markers[0])
        if part is not None:
            meta.set_part(node, part)
        return node

    def _call(self, target: object, *args: object) -> list[fx.Node]:
        """Call an operator that returns a list; return one node for each result.

        No parameters are recorded in the call's meta, so that it counts as compute and is not moved like a copy.
        """
        name = str(target).split(".")[1]
        call = self._of_part(meta.create(self.graph, target, args, name=f"{name}_{self.label}"))
        count = len(meta.value(call))
        return [meta.create(self.graph, operator.getitem, (call, place)) for place in range(count)]
