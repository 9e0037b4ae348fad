"""What a graph's collectives send: the one place that knows the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.dialect.window_ops import gradients_wait, keeps_gathered
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.runtime.chunks import Chunk, chunk_rows, payload_bytes
from zgraph.runtime.groups import group_size, reduction_group
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.fake_values import size_expression


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of a graph.

    Attributes:
        kind: the op's name, such as "all_gather_into_tensor"; a marker counts as the collectives of its eager kernel.
        group_name, group_size: whom it talks to.
        dtype: on the wire.
        payload_bytes: what this rank hands in.
        sent_bytes: what it sends, (N-1)/N of the whole: exact for all_to_all, the bandwidth optimum for the others.
            Of an "all_gather_kept" only the first of a window sends it.
        parameters: whom it works for.
        methods: by which what it sends was compressed, see `zgraph.compression.methods.to_text`.
    """

    kind: str
    group_name: str
    group_size: int
    dtype: torch.dtype
    payload_bytes: int
    sent_bytes: int
    parameters: tuple[str, ...]
    methods: tuple[str, ...] = ()

    @property
    def received_bytes(self) -> int:
        """As many as it sends: chunks are padded to one size, and a ring hands on what it takes in."""
        return self.sent_bytes


SizeOf = Callable[[str], Any]


def transfers(graph: fx.Graph) -> Iterator[Transfer]:
    """Every collective of a graph, in program order."""
    for node in nodes.call_functions(graph, lambda node: nodes.is_start(node) or nodes.is_marker(node)):
        yield from transfers_of(node)


def transfers_of(node: fx.Node, size_of: SizeOf = group_size) -> Iterator[Transfer]:
    """The collectives that a start, or a marker's own kernel, runs.

    Args:
        node: a start or a marker.
        size_of: ranks of a group by its name. Where it gives symbols, sizes are expressions: exact for collectives
            whose `meta.chunks` are known, right up to padding for others that carry parameters.
    """
    if nodes.is_unshard(node):
        yield from _unshard_transfers(node, size_of)
    elif nodes.is_reduce_grad(node):
        yield from _reduce_transfers(node, size_of)
    else:
        yield _start_transfer(node, size_of)


def _start_transfer(node: fx.Node, size_of: SizeOf) -> Transfer:
    sent = [meta.tensor_value(source) for source in nodes.sent_by(node)]
    group_name, dtype = nodes.group_of(node), sent[0].dtype
    payload: Any = sum(payload_bytes(tensor.shape, tensor.dtype) for tensor in sent)
    if size_of is not group_size:
        payload = size_expression(payload)
        world, found = size_of(group_name), meta.chunks(node)
        if found:
            payload = sum(chunk.numel(size_of) for chunk in found) * dtype.itemsize
            payload = payload if nodes.is_gather(node) else payload * world
        elif nodes.is_gather(node) and meta.parameters(node):
            payload = payload * group_size(group_name) / world
    return _transfer(node, _kind(node), group_name, dtype, payload, size_of)


def _kind(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _unshard_transfers(node: fx.Node, size_of: SizeOf) -> Iterator[Transfer]:
    args = operator_arguments.UnshardArgs.of(node)
    if args.zero_stage > 0 and group_size(args.group_name) > 1:
        shape = (chunk_rows(args.shape[0], size_of(args.group_name)), *args.shape[1:])
        kind = "all_gather_kept" if keeps_gathered(args.zero_stage, args.window) else "all_gather_into_tensor"
        yield _transfer(node, kind, args.group_name, args.dtype, payload_bytes(shape, args.dtype), size_of)


def _reduce_transfers(node: fx.Node, size_of: SizeOf) -> Iterator[Transfer]:
    args = operator_arguments.ReduceArgs.of(node)
    args = replace(args, group_name=reduction_group(args.group_name))
    world, num_replicas = group_size(args.group_name), group_size(args.replicas)
    waits = gradients_wait(args.zero_stage, args.window)
    if world * num_replicas == 1 or (waits and args.window == OPEN):
        return
    grad = meta.tensor_value(args.grad)
    grad_dtype = args.dtype if waits else grad.dtype
    wire = wire_dtype_of(grad_dtype, args.wire_dtype)
    mean = mean_dtype_of(grad_dtype, args.dtype, args.wire_dtype, args.mean_dtype)
    rows = grad.numel() if args.zero_stage == 0 else grad.shape[0]
    chunk = Chunk(rows, grad.numel() // max(1, rows), (args.group_name,))

    def exchange(chunk: Chunk, dtype: torch.dtype) -> Transfer:
        group_name = chunk.group_names[-1]
        payload = size_of(group_name) * chunk.numel(size_of) * dtype.itemsize
        return _transfer(node, "all_to_all_single", group_name, dtype, payload, size_of)

    def gather(chunk: Chunk) -> Transfer:
        payload = chunk.numel(size_of) * mean.itemsize
        return _transfer(node, "all_gather_into_tensor", chunk.group_names[-1], mean, payload, size_of)

    if world > 1:
        yield exchange(chunk, wire)
    if num_replicas > 1:
        piece = replace(chunk, group_names=(args.group_name, args.replicas))
        yield exchange(piece, wire_dtype_of(accumulate_dtype(wire), args.wire_dtype))
        yield gather(piece)
    if args.zero_stage == 0 and world > 1:
        yield gather(chunk)


def _transfer(node: fx.Node, kind: str, group_name: str, dtype: torch.dtype, payload: Any, size_of: SizeOf) -> Transfer:
    world = size_of(group_name)
    if kind.startswith("all_gather"):
        sent = payload * (world - 1)
    elif kind.startswith("all_reduce"):
        sent = 2 * payload * (world - 1) // world
    else:
        sent = payload * (world - 1) // world
    return Transfer(
        kind=kind,
        group_name=group_name,
        group_size=world,
        dtype=dtype,
        payload_bytes=payload,
        sent_bytes=sent,
        parameters=meta.parameters(node),
        methods=operator_arguments.methods_of(node) if nodes.is_start(node) else (),
    )
