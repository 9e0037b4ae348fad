"""Rewrites the reductions of a graph's matrices so that low-rank factors travel, bucket by bucket."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zgraph.compiler.graph_pass import PassContext
from zgraph.compression.low_rank import FACTOR_DTYPE, LowRank, matrix_shape
from zgraph.dialect.window_ops import gradients_wait
from zgraph.graph import edits, meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.runtime.chunks import Chunk, chunk_rows, local_rows
from zgraph.runtime.groups import reduction_group
from zgraph.runtime.window_state import ALONE
from zgraph.torch_compat.collectives import all_gather_op, wait_op

aten = torch.ops.aten
# What a rank may send in addition to be spared a second exchange: that much hides behind the next bucket's compute, and
# the latency of an exchange that starts when its result is needed does not.
SPARED_BYTES = 512 * 1024


def plan_low_rank_buckets(markers: Sequence[fx.Node], bucket_bytes: int) -> list[list[fx.Node]]:
    """Reductions over the same ranks, in program order, up to so many bytes of fp32; by their last members' places."""
    buckets: list[list[fx.Node]] = []
    filled: dict[tuple[object, ...], tuple[list[fx.Node], int]] = {}
    for marker in markers:
        args = ReduceArgs.of(marker)
        grad = meta.tensor_value(args.grad)
        key = (args.group_name, args.replicas, args.reduction, args.window, args.dtype, grad.device)
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
    """Replace the markers; the factors become markers of their own, to be lowered like any other.

    So that no exchange is waited for at once, a bucket's second factor sets out when the next bucket's first one does,
    and its means are rebuilt when the one after that has set out:

        left 0 ... right 0, left 1 ... right 1, left 2, means 0 ... right 2, means 1, means 2
    """
    buckets = [_Bucket(graph, members, ctx, method) for members in plan_low_rank_buckets(markers, method.bucket_bytes)]
    for place, bucket in enumerate(buckets):
        with graph.inserting_before(bucket.markers[-1]):
            if place >= 1:
                buckets[place - 1].exchange_right()
            bucket.exchange_left()
            if place >= 2:
                buckets[place - 2].rebuild()
    with graph.inserting_before(nodes.output_of(graph)):
        if buckets:
            buckets[-1].exchange_right()
        for bucket in buckets[-2:]:
            bucket.rebuild()
    # What reshapes a gradient may stand where its own reduction stood.
    edits.restore_order(graph)
    grads = [ReduceArgs.of(marker).grad for marker in markers]
    edits.erase_dead(graph, dict.fromkeys([*markers, *grads]))


@dataclass(eq=False)
class _Bucket:
    """The nodes of one bucket, made at the graph's insertion point."""

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
            ranks, rank, whole = 1, 0, meta.tensor_value(args.grad).shape[0]
            if args.zero_stage > 0:
                ranks, rank = self.ctx.group_size(args.group_name), self.ctx.group_rank(args.group_name)
            kept = chunk_rows(whole, ranks) * (rows // whole)
            first_rows.append(min(rank * kept, rows))
            kept_rows.append(kept)
        first = self.members[0]
        means = self._call(
            torch.ops.zgraph.low_rank_means.default,
            *(self.basis, self.right, self.handles, *self.sizes, first_rows, kept_rows, first.dtype, first.window),
        )
        for marker, args, mean in zip(self.markers, self.members, means, strict=True):
            marker.replace_all_uses_with(self._shaped(mean, args, marker))

    def _shaped(self, mean: fx.Node, args: ReduceArgs, marker: fx.Node) -> fx.Node:
        """[kept rows, columns] as the marker returns it; a chunk is cut to the rows that this rank has."""
        shape = meta.tensor_value(args.grad).shape
        ranks, rank = 1, 0
        if args.zero_stage > 0:
            ranks, rank = self.ctx.group_size(args.group_name), self.ctx.group_rank(args.group_name)
        chunk, rows = chunk_rows(shape[0], ranks), local_rows(shape[0], ranks, rank)
        if len(shape) > 2:
            mean = meta.create(self.graph, aten.view.default, (mean, [chunk, *shape[1:]]), like=marker)
        return mean if rows == chunk else meta.create(self.graph, aten.slice.Tensor, (mean, 0, 0, rows), like=marker)

    def _grad(self, args: ReduceArgs, marker: fx.Node) -> fx.Node:
        """The whole gradient, before any widening; at the end of a window the sum of all that have waited."""
        if gradients_wait(args.zero_stage, args.window):
            waited = (args.grad, args.handle, args.dtype, args.zero_stage)
            return meta.create(self.graph, torch.ops.zgraph.add_accumulated.default, waited, like=marker)
        if nodes.is_cast(args.grad) == torch.float32:
            source = args.grad.all_input_nodes[0]
            if meta.tensor_value(source).dtype in (torch.bfloat16, torch.float16):
                return source
        return args.grad

    def _reduced(self, factor: fx.Node) -> fx.Node:
        """The mean, or sum, of a factor over all ranks, in rank order."""
        args = self.members[0]
        groups = [name for name in (args.group_name, args.replicas) if self.ctx.group_size(name) > 1]
        if len(groups) == 1:
            world, size = self.ctx.group_size(groups[0]), meta.tensor_value(factor).nbytes
            if (world - 1) * size - 2 * (world - 1) * size // world <= SPARED_BYTES:
                return self._summed_by_all(factor, reduction_group(groups[0]), world)
        # Each rank a part of it, as if it were the gradient of a replicated parameter.
        policy = (FACTOR_DTYPE, None, None, 0, args.reduction, ALONE, args.replicas, args.group_name)
        return self._communicate(torch.ops.zgraph.reduce_grad.default, factor, args.handle, *policy)

    def _summed_by_all(self, factor: fx.Node, group_name: str, world: int) -> fx.Node:
        """Sum what all ranks have sent to all: with two ranks as many bytes, and else more, but in one exchange."""
        numel = meta.tensor_value(factor).shape[0]
        start = self._communicate(all_gather_op(), factor, world, group_name, name=f"all_gather_factor_{self.label}")
        meta.set_chunks(start, [Chunk(numel, 1, ("",))])
        received = self._communicate(wait_op(), start, name=f"wait_factor_{self.label}")
        divisor = world if self.members[0].reduction == "mean" else 1
        return self._communicate(torch.ops.zgraph.sum_ranks.default, received, world, divisor, FACTOR_DTYPE)

    def _communicate(self, target: object, *args: object, name: str | None = None) -> fx.Node:
        made = meta.create(self.graph, target, args, name=name)
        names = [name for marker in self.markers for name in meta.parameters(marker)]
        meta.set_parameters(made, names, [handle for marker in self.markers for handle in meta.handles(marker)])
        meta.tag_awaited(made)
        return made

    def _call(self, target: object, *args: object) -> list[fx.Node]:
        """The results of an operator that returns a list.

        It computes, unlike the copies in and out of buffers: without parameters in its meta it stays where it is put.
        """
        name = str(target).split(".")[1]
        call = meta.create(self.graph, target, args, name=f"{name}_{self.label}")
        count = len(meta.value(call))
        return [meta.create(self.graph, operator.getitem, (call, place)) for place in range(count)]
