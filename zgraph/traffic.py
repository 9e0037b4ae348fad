"""What a graph's collectives send: the one place that knows the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zgraph import meta, nodes
from zgraph.ops import (
    accumulate_dtype,
    chunk_rows,
    gradients_wait,
    group_size,
    keeps_gathered,
    payload_bytes,
    wire_dtype_of,
)
from zgraph.runtime.window import OPEN


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
    """

    kind: str
    group_name: str
    group_size: int
    dtype: torch.dtype
    payload_bytes: int
    sent_bytes: int
    parameters: tuple[str, ...]


def transfers(graph: fx.Graph) -> Iterator[Transfer]:
    """Every collective of a graph, in program order."""
    for node in nodes.call_functions(graph, lambda node: nodes.is_start(node) or nodes.is_marker(node)):
        if nodes.is_unshard(node):
            yield from _unshard_transfers(node)
        elif nodes.is_reduce_grad(node):
            yield from _reduce_transfers(node)
        else:
            # A coalesced one of the model's own has several.
            sources = node.all_input_nodes[:1] if nodes.is_kept_gather(node) else node.all_input_nodes
            sent = [meta.tensor_value(source) for source in sources]
            payload = sum(payload_bytes(tensor.shape, tensor.dtype) for tensor in sent)
            yield _transfer(node, _kind(node), nodes.group_of(node), sent[0].dtype, payload)


def _kind(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _unshard_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = nodes.UnshardArgs.of(node)
    world = group_size(args.group_name)
    if args.zero_stage > 0 and world > 1:
        shape = (chunk_rows(args.shape[0], world), *args.shape[1:])
        kind = "all_gather_kept" if keeps_gathered(args.zero_stage, args.window) else "all_gather_into_tensor"
        yield _transfer(node, kind, args.group_name, args.dtype, payload_bytes(shape, args.dtype))


def _reduce_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = nodes.ReduceArgs.of(node)
    world, copies = group_size(args.group_name), group_size(args.replicas)
    waits = gradients_wait(args.zero_stage, args.window)
    if world * copies == 1 or (waits and args.window == OPEN):
        return
    grad = meta.tensor_value(args.grad)
    wire = wire_dtype_of(args.dtype if waits else grad.dtype, args.wire_dtype)
    if args.zero_stage == 0:
        chunk = chunk_rows(grad.numel(), world)
    else:
        chunk = chunk_rows(grad.shape[0], world) * math.prod(grad.shape[1:])
    if world > 1:
        yield _transfer(node, "all_to_all_single", args.group_name, wire, world * chunk * wire.itemsize)
    if copies > 1:
        partial = wire_dtype_of(accumulate_dtype(wire), args.wire_dtype)
        piece = chunk_rows(chunk, copies)
        yield _transfer(node, "all_to_all_single", args.replicas, partial, copies * piece * partial.itemsize)
        yield _transfer(node, "all_gather_into_tensor", args.replicas, args.dtype, piece * args.dtype.itemsize)
    if args.zero_stage == 0 and world > 1:
        yield _transfer(node, "all_gather_into_tensor", args.group_name, args.dtype, chunk * args.dtype.itemsize)


def _transfer(node: fx.Node, kind: str, group_name: str, dtype: torch.dtype, payload: int) -> Transfer:
    world = group_size(group_name)
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
    )
