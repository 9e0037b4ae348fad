"""Formulas for the bytes that collectives send and receive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx

from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.runtime.chunks import Chunk, chunk_rows, payload_bytes
from zgraph.runtime.groups import group_size
from zgraph.runtime.owned_matrices import ORTHOGONAL_DTYPE
from zgraph.runtime.window_state import OPEN


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective of a graph, with its bytes.

    Attributes:
        kind: name of the operator, such as "all_gather_into_tensor".
        group_name, group_size: name of the process group, and number of its ranks.
        dtype: dtype of the sent tensors.
        payload_bytes: size of this rank's input.
        sent_bytes: bytes that this rank sends: exact for all_to_all, a lower bound for other kinds. An
            "all_gather_kept" sends them only once in an accumulation window.
        parameters: names of the parameters that the collective gathers or reduces.
        methods: compression methods as text, see `zgraph.compression.method_text.to_text`.
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
        """Bytes that this rank receives: as many as it sends, because all ranks send chunks of equal length."""
        return self.sent_bytes


def transfers(graph: fx.Graph) -> Iterator[Transfer]:
    """Yield every collective of a graph, in program order."""
    for node in nodes.call_functions(graph, _communicates):
        yield from transfers_of(node)


def _communicates(node: fx.Node) -> bool:
    return nodes.is_collective(node) or nodes.is_marker(node) or nodes.is_orthogonalize(node)


def transfers_of(node: fx.Node) -> Iterator[Transfer]:
    """Yield the collectives that a node runs: a marker may run several, or none."""
    if nodes.is_unshard(node):
        yield from _unshard_transfers(node)
    elif nodes.is_reduce_grad(node):
        yield from _reduce_transfers(node)
    elif nodes.is_orthogonalize(node):
        yield from _orthogonalize_transfers(node)
    else:
        yield _start_transfer(node)


def _start_transfer(node: fx.Node) -> Transfer:
    sent = [meta.tensor_value(source) for source in nodes.sent_by(node)]
    group_name, dtype = nodes.group_of(node), sent[0].dtype
    payload = sum(payload_bytes(tensor.shape, tensor.dtype) for tensor in sent)
    transfer = _transfer(node, _kind(node), group_name, dtype, payload)
    splits = cast("list[list[int]]", list(node.args[1:3])) if nodes.is_all_to_all(node) else []
    if splits and all(sum(map(bool, one)) == 1 for one in splits):  # all of it goes to one rank, and comes from one
        return replace(transfer, sent_bytes=payload)
    return transfer


def _kind(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _unshard_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = operator_arguments.UnshardArgs.of(node)
    layout = args.layout
    if layout.is_gathered:
        kind = "all_gather_kept" if layout.keeps_gathered(args.window) else "all_gather_into_tensor"
        payload = layout.param_chunk.numel() * args.dtype.itemsize
        yield _transfer(node, kind, layout.gather_group, args.dtype, payload)


def _reduce_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = operator_arguments.ReduceArgs.of(node)
    layout = args.layout
    waits = layout.gradients_wait(args.window)
    if not layout.is_reduced or (waits and args.window == OPEN):
        return
    grad_dtype = args.dtype if waits else meta.tensor_value(args.grad).dtype
    wire = wire_dtype_of(grad_dtype, args.wire_dtype)
    mean = mean_dtype_of(grad_dtype, args.dtype, args.wire_dtype, args.mean_dtype)

    def exchange(chunk: Chunk, dtype: torch.dtype) -> Transfer:
        group_name = chunk.group_names[-1]
        payload = group_size(group_name) * chunk.numel() * dtype.itemsize
        return _transfer(node, "all_to_all_single", group_name, dtype, payload)

    def gather(chunk: Chunk) -> Transfer:
        payload = chunk.numel() * mean.itemsize
        return _transfer(node, "all_gather_into_tensor", chunk.group_names[-1], mean, payload)

    if layout.world > 1:
        yield exchange(layout.grad_chunk, wire)
    if layout.num_replicas > 1:
        yield exchange(layout.replica_chunk, wire_dtype_of(accumulate_dtype(wire), args.wire_dtype))
        yield gather(layout.replica_chunk)
    if layout.world > 1 and not layout.is_sharded:
        yield gather(layout.grad_chunk)


def _orthogonalize_transfers(node: fx.Node) -> Iterator[Transfer]:
    args = operator_arguments.OrthogonalizeArgs.of(node)
    world = group_size(args.group_name)
    if args.is_sharded and world > 1:
        rows, columns = args.shape
        payload = chunk_rows(rows, world) * columns * ORTHOGONAL_DTYPE.itemsize
        yield _transfer(node, "all_gather_into_tensor", args.group_name, ORTHOGONAL_DTYPE, payload)


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
        methods=operator_arguments.methods_of(node) if nodes.is_collective(node) else (),
    )
