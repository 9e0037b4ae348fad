"""What a `zgraph::reduce_grad` becomes: an exchange and a sum in rank order, and for replicated parameters a gather."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from zgraph.analysis.sizes import size_hint
from zgraph.compiler.graph_pass import PassContext
from zgraph.dialect.window_ops import gradients_wait
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.reduction_algorithms import Algorithm, Reduction, choose_algorithm
from zgraph.runtime.chunks import Chunk, chunk_rows, local_rows
from zgraph.runtime.groups import group_stride, reduction_group
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.collectives import all_gather_op, all_reduce_op, all_to_all_op, reduce_scatter_op, wait_op

aten = torch.ops.aten


class ReductionBuilder:
    """Builds what one reduce_grad becomes, at the graph's insertion point.

    Args:
        graph, marker: the reduce_grad.
        ctx: which groups there are.
        algorithms: by name of a group; where it is not listed, an all_to_all.
    """

    def __init__(
        self, graph: fx.Graph, marker: fx.Node, ctx: PassContext, algorithms: Mapping[str, Algorithm] | None = None
    ) -> None:
        self.graph = graph
        self.marker = marker
        given = ReduceArgs.of(marker)
        self.args = replace(given, group_name=reduction_group(given.group_name))
        self.ctx = ctx
        self.label = meta.label(marker)
        self.world = ctx.group_size(self.args.group_name)
        self.num_replicas = ctx.group_size(self.args.replicas)
        self.divisor = self.world * self.num_replicas if self.args.reduction == "mean" else 1
        self.rank = ctx.group_rank(self.args.group_name)
        self.algorithms = algorithms or {}

    def node(self, target: object, *args: object, name: str | None = None, **kwargs: object) -> fx.Node:
        return meta.create(self.graph, target, args, kwargs, like=self.marker, name=name)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return meta.create_cast(self.graph, node, dtype, like=self.marker)

    def build(self) -> fx.Node:
        """The node whose value the marker stands for; the marker itself stays."""
        args = self.args
        if self.world * self.num_replicas == 1:
            # Always a new contiguous tensor, as the marker returns: autograd keeps it as .grad, where an alias of
            # another gradient would be clipped twice, and fused optimizers do not look at strides.
            wide = self.cast(args.grad, args.dtype)
            return self.node(aten.clone.default, wide, memory_format=torch.contiguous_format)
        shape = meta.tensor_value(args.grad).shape
        rows = local_rows(shape[0], self.world, self.rank) if args.zero_stage > 0 else 0
        grad = args.grad
        if gradients_wait(args.zero_stage, args.window):
            if args.window == OPEN:
                accumulate = torch.ops.zgraph.accumulate_grad.default
                return self.node(accumulate, grad, args.handle, args.dtype, args.zero_stage, rows)
            grad = self.node(torch.ops.zgraph.add_accumulated.default, grad, args.handle, args.dtype, args.zero_stage)
        is_gathered = self.num_replicas > 1 or (args.zero_stage == 0 and self.world > 1)
        mean_dtype = self.mean_dtype(meta.tensor_value(grad).dtype) if is_gathered else args.dtype
        wire = self.on_the_wire(grad) if self.world > 1 else grad
        if not meta.tensor_value(wire).is_contiguous():
            wire = self.node(aten.clone.default, wire, memory_format=torch.contiguous_format)
        numel = math.prod(shape)
        if args.zero_stage == 0:
            wire = self.node(aten.view.default, wire, [numel])
        split = numel if args.zero_stage == 0 else shape[0]
        chunk = Chunk(split, numel // max(1, split), (args.group_name,))
        if args.zero_stage == 0 and self.num_replicas == 1:
            return self.node(aten.view.default, self.mean(wire, chunk, mean_dtype, args.dtype), list(shape))
        pieces = self.padded(wire, self.world)
        if self.num_replicas == 1:
            total = self.sum(pieces, chunk, self.divisor, mean_dtype)
        else:
            partial = self.sum(pieces, chunk, 1, accumulate_dtype(meta.tensor_value(pieces).dtype))
            total = self.all_reduce(partial, replace(chunk, group_names=(args.group_name, args.replicas)), mean_dtype)
        if args.zero_stage == 0:
            return self.node(aten.view.default, self.gathered(total, chunk, numel, args.dtype), list(shape))
        held = meta.tensor_value(total).shape[0]
        return total if rows == held else self.node(aten.slice.Tensor, total, 0, 0, rows)

    def on_the_wire(self, grad: fx.Node) -> fx.Node:
        """The gradient in the dtype to send it in, without any widening that changes no bit of the sum."""
        source, dtype = _travelling(grad, self.args.wire_dtype)
        return self.cast(source, dtype)

    def mean_dtype(self, grad: torch.dtype) -> torch.dtype:
        """The dtype in which the parts of a mean are gathered, of a gradient of this dtype."""
        return mean_dtype_of(grad, self.args.dtype, self.args.wire_dtype, self.args.mean_dtype)

    def padded(self, pieces: fx.Node, world: int) -> fx.Node:
        shape = meta.tensor_value(pieces).shape
        missing = world * chunk_rows(shape[0], world) - shape[0]
        if not missing:
            return pieces
        return self.node(aten.constant_pad_nd.default, pieces, [0, 0] * (len(shape) - 1) + [0, missing])

    def sum(self, pieces: fx.Node, chunk: Chunk, divisor: int, dtype: torch.dtype) -> fx.Node:
        """[N * chunk, ...] of every rank -> the sum of this rank's [chunk, ...], divided."""
        group_name = chunk.group_names[-1]
        world = self.ctx.group_size(group_name)
        if world == 1:
            return self.node(torch.ops.zgraph.sum_ranks.default, pieces, 1, divisor, dtype)
        algorithm = self.algorithms.get(group_name, "all_to_all")
        if algorithm == "all_to_all":
            splits = [meta.tensor_value(pieces).shape[0] // world] * world
            start = self.node(all_to_all_op(), pieces, splits, splits, group_name, name=f"all_to_all_{self.label}")
            meta.set_chunks(start, [chunk])
            received = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
            return self.node(torch.ops.zgraph.sum_ranks.default, received, world, divisor, dtype)
        if algorithm != "narrow_reduce_scatter":
            pieces = self.cast(pieces, accumulate_dtype(meta.tensor_value(pieces).dtype))
        start = self.node(reduce_scatter_op(), pieces, "sum", world, group_name, name=f"reduce_scatter_{self.label}")
        meta.set_chunks(start, [chunk])
        return self.divided(self.node(wait_op(), start, name=f"wait_grad_{self.label}"), divisor, dtype)

    def all_reduce(self, partial: fx.Node, chunk: Chunk, mean_dtype: torch.dtype) -> fx.Node:
        """The sum of this shard's partial sums over its replicas; in the dtype of a mean that is gathered once more."""
        found = meta.tensor_value(partial)
        numel = math.prod(found.shape)
        flat = self.on_the_wire(self.node(aten.view.default, partial, [numel]))
        dtype = mean_dtype if self.args.zero_stage == 0 and self.world > 1 else self.args.dtype
        return self.node(aten.view.default, self.mean(flat, chunk, mean_dtype, dtype), list(found.shape))

    def mean(self, flat: fx.Node, chunk: Chunk, mean_dtype: torch.dtype, dtype: torch.dtype) -> fx.Node:
        """[numel] of every rank -> their mean, whole, on each; [numel] in `dtype`."""
        group_name = chunk.group_names[-1]
        numel = meta.tensor_value(flat).shape[0]
        if self.algorithms.get(group_name) != "all_reduce":
            pieces = self.padded(flat, self.ctx.group_size(group_name))
            return self.gathered(self.sum(pieces, chunk, self.divisor, mean_dtype), chunk, numel, dtype)
        wide = self.cast(flat, accumulate_dtype(meta.tensor_value(flat).dtype))
        start = self.node(all_reduce_op(), wide, "sum", group_name, name=f"all_reduce_{self.label}")
        return self.divided(self.node(wait_op(), start, name=f"wait_grad_{self.label}"), self.divisor, dtype)

    def divided(self, total: fx.Node, divisor: int, dtype: torch.dtype) -> fx.Node:
        """What a backend has summed, by the operator that divides everywhere."""
        if divisor == 1 and meta.tensor_value(total).dtype == dtype:
            return total
        return self.node(torch.ops.zgraph.sum_ranks.default, total, 1, divisor, dtype)

    def gathered(self, piece: fx.Node, chunk: Chunk, numel: int, dtype: torch.dtype) -> fx.Node:
        """[n] of every rank -> [numel], the first of them all, cast on arrival."""
        group_name = chunk.group_names[-1]
        world = self.ctx.group_size(group_name)
        if world > 1:
            start = self.node(all_gather_op(), piece, world, group_name, name=f"all_gather_grad_{self.label}")
            meta.set_chunks(start, [chunk])
            piece = self.node(wait_op(), start, name=f"wait_grad_{self.label}")
        piece = self.cast(piece, dtype)
        if meta.tensor_value(piece).shape[0] != numel:
            piece = self.node(aten.slice.Tensor, piece, 0, 0, numel)
        return piece


def plan_algorithms(
    markers: Sequence[fx.Node], ctx: PassContext, algorithm: Algorithm
) -> dict[fx.Node, dict[str, Algorithm]]:
    """How each reduce_grad is reduced over each of its groups.

    One choice for all gradients that may share collectives, as if one carried them all: gradients that are reduced in
    different ways cannot.

    Returns:
        By marker, and name of the group.
    """
    hops = {marker: _hops_of(marker, ctx) for marker in markers}
    alike: dict[tuple[object, ...], list[Reduction]] = {}
    for marker, found in hops.items():
        for group_name, reduction in found.items():
            alike.setdefault(_kind(marker, group_name, reduction), []).append(reduction)
    chosen: dict[tuple[object, ...], Algorithm] = {}
    for key, members in alike.items():
        group_name, device, *_ = cast("tuple[str, torch.device]", key)
        together = replace(members[0], numel=sum(member.numel for member in members))
        chosen[key] = (
            choose_algorithm(
                together,
                backend=ctx.group_backend(group_name, device),
                world=ctx.group_size(group_name),
                stride=group_stride(group_name),
                hardware=ctx.hardware or ctx.machine,
            )
            if algorithm == "auto"
            else algorithm
        )
    return {
        marker: {name: chosen[_kind(marker, name, reduction)] for name, reduction in found.items()}
        for marker, found in hops.items()
    }


def _kind(marker: fx.Node, group_name: str, reduction: Reduction) -> tuple[object, ...]:
    return group_name, meta.tensor_value(ReduceArgs.of(marker).grad).device, replace(reduction, numel=0)


def _hops_of(marker: fx.Node, ctx: PassContext) -> dict[str, Reduction]:
    """What a reduce_grad reduces over which group; nothing where no sum travels."""
    given = ReduceArgs.of(marker)
    args = replace(given, group_name=reduction_group(given.group_name))
    world, num_replicas = ctx.group_size(args.group_name), ctx.group_size(args.replicas)
    waits = gradients_wait(args.zero_stage, args.window)
    if world * num_replicas == 1 or (waits and args.window == OPEN):
        return {}
    grad = meta.tensor_value(args.grad)
    dtype = args.dtype if waits else grad.dtype
    wire = wire_dtype_of(dtype, args.wire_dtype) if waits else _travelling(args.grad, args.wire_dtype)[1]
    wide, mean = accumulate_dtype(wire), mean_dtype_of(dtype, args.dtype, args.wire_dtype, args.mean_dtype)
    numel = size_hint(grad.numel())
    hops: dict[str, Reduction] = {}
    if world > 1:
        ends = num_replicas == 1
        gathered = mean if ends and args.zero_stage == 0 else None
        hops[args.group_name] = Reduction(numel=numel, wire=wire, mean=gathered, result=args.dtype if ends else wide)
    if num_replicas > 1:
        wire = wire_dtype_of(wide, args.wire_dtype)
        hops[args.replicas] = Reduction(numel=-(-numel // world), wire=wire, mean=mean, result=args.dtype)
    return hops


def _travelling(grad: fx.Node, asked: torch.dtype | None) -> tuple[fx.Node, torch.dtype]:
    """What is sent of a gradient, and in which dtype: of one that was only widened, what it was before."""
    dtype = meta.tensor_value(grad).dtype
    if nodes.is_cast(grad) == torch.float32 and wire_dtype_of(dtype, asked) == dtype:
        source = grad.all_input_nodes[0]
        narrow = meta.tensor_value(source).dtype
        if narrow in (torch.bfloat16, torch.float16):
            return source, narrow
    return grad, wire_dtype_of(dtype, asked)
