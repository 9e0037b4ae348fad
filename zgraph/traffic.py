"""What a graph's collectives send: the one place that knows the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from zgraph import meta, nodes
from zgraph.ops import chunk_rows, payload_bytes, wire_dtype_of
from zgraph.torch_compat import resolve_group


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of a graph.

    Attributes:
        kind: the op's name, such as "all_gather_into_tensor"; a marker counts as the collectives of its eager kernel.
        group_name, group_size: whom it talks to.
        dtype: on the wire.
        payload_bytes: what this rank hands in.
        sent_bytes: what it sends, (N-1)/N of the whole: exact for all_to_all, the bandwidth optimum for the others.
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
            sent = [meta.tensor_value(source) for source in node.all_input_nodes]
            payload = sum(payload_bytes(tensor.shape, tensor.dtype) for tensor in sent)
            yield _transfer(node, _kind(node), nodes.group_of(node), sent[0].dtype, payload)


def _kind(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _unshard_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = nodes.UnshardArgs.of(node)
    world = dist.get_world_size(resolve_group(args.group_name))
    if args.zero_stage > 0 and world > 1:
        shape = (chunk_rows(args.shape[0], world), *args.shape[1:])
        payload = payload_bytes(shape, args.dtype)
        yield _transfer(node, "all_gather_into_tensor", args.group_name, args.dtype, payload)


def _reduce_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = nodes.ReduceArgs.of(node)
    world = dist.get_world_size(resolve_group(args.group_name))
    if world == 1:
        return
    grad = meta.tensor_value(args.grad)
    wire = wire_dtype_of(grad.dtype, args.wire_dtype)
    if args.zero_stage == 0:
        chunk = chunk_rows(grad.numel(), world)
        yield _transfer(node, "all_to_all_single", args.group_name, wire, world * chunk * wire.itemsize)
        yield _transfer(node, "all_gather_into_tensor", args.group_name, args.dtype, chunk * args.dtype.itemsize)
    else:
        shape = (world * chunk_rows(grad.shape[0], world), *grad.shape[1:])
        yield _transfer(node, "all_to_all_single", args.group_name, wire, payload_bytes(shape, wire))


def _transfer(node: fx.Node, kind: str, group_name: str, dtype: torch.dtype, payload: int) -> Transfer:
    world = dist.get_world_size(resolve_group(group_name))
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
