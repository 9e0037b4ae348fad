"""Lowers `zgraph::reduce_grad`: ranks exchange and sum chunks; for replicated parameters they also gather the means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from zgraph.compiler.graph_pass import PassContext
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of
from zgraph.graph import meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.passes.common.reduction_algorithms import Algorithm, travelling
from zgraph.runtime.chunks import Chunk, chunk_rows
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.collectives import all_gather_op, all_reduce_op, all_to_all_op, reduce_scatter_op, wait_op
from zgraph.torch_compat.operators import OpOverload

aten = torch.ops.aten


class ReductionBuilder:
    """Builds the nodes that replace one reduce_grad node, at the graph's insertion point.

    Args:
        graph: graph to change.
        marker: the reduce_grad node.
        ctx: context of the pass, which knows the process groups.
        algorithms: reduction algorithm by group name; groups that are not listed use all_to_all.
    """

    def __init__(
        self, graph: fx.Graph, marker: fx.Node, ctx: PassContext, algorithms: Mapping[str, Algorithm] | None = None
    ) -> None:
        self.graph = graph
        self.marker = marker
        self.args = ReduceArgs.of(marker)
        self.layout = self.args.layout
        self.ctx = ctx
        self.label = meta.label(marker)
        self.divisor = self.layout.divisor(self.args.reduction)
        self.algorithms = algorithms or {}

    def node(self, target: object, *args: object, name: str | None = None, **kwargs: object) -> fx.Node:
        return meta.create(self.graph, target, args, kwargs, like=self.marker, name=name)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return meta.create_cast(self.graph, node, dtype, like=self.marker)

    def build(self) -> fx.Node:
        """Build the nodes that compute the reduced gradient, and return the last; the marker stays in the graph."""
        args, layout = self.args, self.layout
        if not layout.is_reduced:
            if self.divisor > 1:
                wide = self.cast(args.grad, args.dtype)
                return self.node(torch.ops.zgraph.sum_ranks.default, wide, 1, self.divisor, args.dtype)
            return self.own(args.grad)
        grad = args.grad
        if layout.gradients_wait(args.window):
            waiting = (grad, args.handle, args.dtype, layout.zero_stage)
            if waits_in_grad(self.marker):
                return self.own(grad)
            if args.window == OPEN:
                return self.node(torch.ops.zgraph.accumulate_grad.default, *waiting, layout.local_rows)
            grad = self.node(torch.ops.zgraph.add_accumulated.default, *waiting)
        mean_dtype = self.mean_dtype(meta.tensor_value(grad).dtype) if layout.gathers_mean else args.dtype
        wire = self.on_the_wire(grad) if layout.world > 1 else grad
        if not meta.tensor_value(wire).is_contiguous():
            wire = self.node(aten.clone.default, wire, memory_format=torch.contiguous_format)
        shape, chunk = list(layout.shape), layout.grad_chunk
        if not layout.is_sharded:
            wire = self.node(aten.view.default, wire, [layout.numel])
        if not layout.is_sharded and layout.num_replicas == 1:
            return self.node(aten.view.default, self.mean(wire, chunk, mean_dtype, args.dtype), shape)
        pieces = self.padded(wire, layout.world)
        if layout.num_replicas == 1:
            total = self.sum(pieces, chunk, self.divisor, mean_dtype)
        else:
            partial = self.sum(pieces, chunk, 1, accumulate_dtype(meta.tensor_value(pieces).dtype))
            total = self.all_reduce(partial, layout.replica_chunk, mean_dtype)
        if not layout.is_sharded:
            return self.node(aten.view.default, self.gathered(total, chunk, layout.numel, args.dtype), shape)
        rows = layout.local_rows
        return total if rows == layout.chunk_rows else self.node(aten.slice.Tensor, total, 0, 0, rows)

    def own(self, grad: fx.Node) -> fx.Node:
        """Return the gradient in its final dtype and in contiguous memory of its own, copied if needed.

        Autograd keeps it as .grad and adds to it later: an alias of another gradient would be clipped twice, and fused
        optimizers do not look at strides. A gradient that has such memory gets a node of its own all the same, because
        that node names the parameter.
        """
        wide = self.cast(grad, self.args.dtype)
        is_own = wide is not grad or has_own_storage(grad, self.marker)
        if is_own and meta.tensor_value(wide).is_contiguous():
            return self.node(aten.alias.default, wide)
        return self.node(aten.clone.default, wide, memory_format=torch.contiguous_format)

    def on_the_wire(self, grad: fx.Node) -> fx.Node:
        """Cast the gradient to the dtype in which it is sent, or undo a widening cast that does not change the sum."""
        source, dtype = travelling(grad, self.args.wire_dtype)
        return self.cast(source, dtype)

    def mean_dtype(self, grad: torch.dtype) -> torch.dtype:
        """Return the dtype in which averaged gradients are gathered, for gradients of dtype `grad`."""
        return mean_dtype_of(grad, self.args.dtype, self.args.wire_dtype, self.args.mean_dtype)

    def padded(self, pieces: fx.Node, world: int) -> fx.Node:
        shape = meta.tensor_value(pieces).shape
        missing = world * chunk_rows(shape[0], world) - shape[0]
        if not missing:
            return pieces
        return self.node(aten.constant_pad_nd.default, pieces, [0, 0] * (len(shape) - 1) + [0, missing])

    def sum(self, pieces: fx.Node, chunk: Chunk, divisor: int, dtype: torch.dtype) -> fx.Node:
        """Reduce-scatter `pieces` over N ranks and divide by `divisor`: [N * chunk, ...] -> [chunk, ...]."""
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
        """Average partial sums over the replicas of a shard (hybrid sharding)."""
        found = meta.tensor_value(partial)
        numel = math.prod(found.shape)
        flat = self.on_the_wire(self.node(aten.view.default, partial, [numel]))
        dtype = mean_dtype if not self.layout.is_sharded and self.layout.world > 1 else self.args.dtype
        return self.node(aten.view.default, self.mean(flat, chunk, mean_dtype, dtype), list(found.shape))

    def mean(self, flat: fx.Node, chunk: Chunk, mean_dtype: torch.dtype, dtype: torch.dtype) -> fx.Node:
        """Average `flat` [numel] over all ranks; each rank gets the complete mean [numel] in `dtype`."""
        group_name = chunk.group_names[-1]
        numel = meta.tensor_value(flat).shape[0]
        if self.algorithms.get(group_name) != "all_reduce":
            pieces = self.padded(flat, self.ctx.group_size(group_name))
            return self.gathered(self.sum(pieces, chunk, self.divisor, mean_dtype), chunk, numel, dtype)
        wide = self.cast(flat, accumulate_dtype(meta.tensor_value(flat).dtype))
        start = self.node(all_reduce_op(), wide, "sum", group_name, name=f"all_reduce_{self.label}")
        return self.divided(self.node(wait_op(), start, name=f"wait_grad_{self.label}"), self.divisor, dtype)

    def divided(self, total: fx.Node, divisor: int, dtype: torch.dtype) -> fx.Node:
        """Divide a sum that the backend has computed by `divisor`, and cast it to `dtype`."""
        if divisor == 1 and meta.tensor_value(total).dtype == dtype:
            return total
        return self.node(torch.ops.zgraph.sum_ranks.default, total, 1, divisor, dtype)

    def gathered(self, piece: fx.Node, chunk: Chunk, numel: int, dtype: torch.dtype) -> fx.Node:
        """Gather the `piece` of every rank, cast to `dtype`, and cut the concatenation to `numel` elements."""
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


def waits_in_grad(marker: fx.Node) -> bool:
    """Return whether a gradient is accumulated unreduced in `.grad` until the end of its `no_sync` window."""
    args = ReduceArgs.of(marker)
    layout = args.layout
    return layout.is_reduced and layout.zero_stage == 0 and args.window == OPEN and layout.gradients_wait(args.window)


def has_own_storage(node: fx.Node, reader: fx.Node) -> bool:
    """Return whether a node's value has a storage of its own, and `reader` is the node's only reader."""
    numel = meta.tensor_value(node).numel()
    while list(node.users) == [reader] and node.op == "call_function" and isinstance(node.target, OpOverload):
        shared = traits.shared_arguments(node)
        if shared[:1] in ((), (None,)):
            is_new = node.target.namespace in ("aten", "prims") and not traits.of(node).may_copy
            return is_new and not nodes.is_communication(node) and meta.tensor_value(node).numel() == numel
        node, reader = cast(fx.Node, node.args[0]), node
    return False
