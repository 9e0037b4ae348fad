"""Predicates on nodes, and functions that relate a collective's start, its waits and its results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph import dialect as dialect  # registers the operators used here
from zgraph.graph import meta
from zgraph.runtime.chunks import payload_bytes
from zgraph.torch_compat.collectives import (
    all_gather_op,
    all_reduce_op,
    all_to_all_op,
    grouped_gather_op,
    is_functional_collective,
    reduce_scatter_op,
    wait_op,
)


def is_unshard(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.unshard.default


def is_reduce_grad(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.reduce_grad.default


def is_marker(node: fx.Node) -> bool:
    return is_unshard(node) or is_reduce_grad(node)


def is_orthogonalize(node: fx.Node) -> bool:
    """Whether the node orthogonalizes a matrix on all its ranks, until a pass gives the matrix an owner."""
    return node.target is torch.ops.zgraph.orthogonalize.default


def is_for_owners(node: fx.Node) -> bool:
    """Whether the node packs matrices for their owners, or orthogonalizes the matrices of this rank."""
    ops, target = torch.ops.zgraph, node.target
    return (
        target is ops.send_to_owners.default
        or target is ops.orthogonalize_owned.default
        or target is ops.orthogonalize_whole.default
    )


def is_sum_ranks(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.sum_ranks.default


def is_quantize(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.quantize_grads.default


def is_dequantize_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.dequantize_sum.default


def is_low_rank_left(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.low_rank_left.default


def is_low_rank_right(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.low_rank_right.default


def low_rank_handles(node: fx.Node) -> list[fx.Node]:
    """Return the handles (graph inputs that identify parameters) of a low-rank operator; [] for other operators."""
    return cast("list[fx.Node]", node.args[1 if is_low_rank_left(node) else 2]) if is_low_rank(node) else []


def is_low_rank(node: fx.Node) -> bool:
    """Whether the node is one of the three operators of low-rank gradient compression."""
    return is_low_rank_left(node) or is_low_rank_right(node) or node.target is torch.ops.zgraph.low_rank_means.default


def is_quantize_shards(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.quantize_shards.default


def is_dequantize_shards(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.dequantize_shards.default


def reads_codes(node: fx.Node) -> bool:
    """Whether the node reads a weight as codes, and does not decode all of it."""
    return node.target in (torch.ops.zgraph.multiply_codes.default, torch.ops.zgraph.lookup_codes.default)


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective, or a copy between memory spaces; its result needs a wait."""
    return is_collective(node) or is_copy_start(node)


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return is_functional_collective(node.target) or is_kept_gather(node)


def is_offload(node: fx.Node) -> bool:
    """Whether the node starts a copy from the device to the host."""
    return node.target is torch.ops.zgraph.offload_start.default


def is_reload(node: fx.Node) -> bool:
    """Whether the node starts a copy from the host to the device."""
    return node.target is torch.ops.zgraph.reload_start.default


def is_store(node: fx.Node) -> bool:
    """Whether the node starts a copy from the device that overwrites a tensor in another memory space."""
    return node.target is torch.ops.zgraph.store_start.default


def is_spill(node: fx.Node) -> bool:
    """Whether the node starts a copy from the device to a new tensor on disk."""
    return node.target is torch.ops.zgraph.spill_start.default


def is_return(node: fx.Node) -> bool:
    """Whether the node starts a copy from the host that overwrites a device tensor."""
    return node.target is torch.ops.zgraph.return_start.default


def is_copy_start(node: fx.Node) -> bool:
    """Whether the node starts a copy between memory spaces."""
    ops, target = torch.ops.zgraph, node.target  # no helper calls: this runs many times for every node
    return (
        target is ops.offload_start.default
        or target is ops.reload_start.default
        or target is ops.store_start.default
        or target is ops.spill_start.default
        or target is ops.return_start.default
    )


def is_update_wait(node: fx.Node) -> bool:
    """Whether the node waits for an asynchronous optimizer update."""
    return node.target is torch.ops.zgraph.wait_update.default


def is_copy_wait(node: fx.Node) -> bool:
    """Whether the node waits for a copy between memory spaces."""
    return node.target is torch.ops.zgraph.wait_copy.default


def is_getitem(node: fx.Node) -> bool:
    """Whether the node selects one of several results of another node."""
    return node.target is operator.getitem


def is_wait(node: fx.Node) -> bool:
    ops, target = torch.ops.zgraph, node.target
    return target is wait_op() or target is ops.wait_group.default or target is ops.wait_copy.default


def is_group_wait(node: fx.Node) -> bool:
    """Whether the node waits for a grouped gather; its results are then selected one by one."""
    return node.target is torch.ops.zgraph.wait_group.default


def is_all_gather(node: fx.Node) -> bool:
    return node.target is all_gather_op()


def is_kept_gather(node: fx.Node) -> bool:
    """Whether the node gathers once per accumulation window and keeps the result for the window's other forwards."""
    return node.target is torch.ops.zgraph.all_gather_kept.default


def is_grouped_gather(node: fx.Node) -> bool:
    """Whether the node gathers several tensors into separate storages, with a single wait for all of them."""
    return node.target is grouped_gather_op()


def is_gather(node: fx.Node) -> bool:
    return is_all_gather(node) or is_kept_gather(node) or is_grouped_gather(node)


def gathers_addends(node: fx.Node) -> bool:
    """Whether the node gathers one addend from each rank, so that every rank can compute the sum by itself."""
    return is_all_gather(node) and any(chunk.group_names == ("",) for chunk in meta.chunks(node))


def is_quantized_gather(node: fx.Node) -> bool:
    """Whether the node gathers the codes of quantized parameters."""
    return is_gather(node) and any(is_quantize_shards(sent) for sent in sent_by(node))


def is_cast_shards(node: fx.Node) -> bool:
    """Whether the node casts and pads all shards of a grouped gather."""
    return node.target is torch.ops.zgraph.cast_shards.default


def is_all_to_all(node: fx.Node) -> bool:
    return node.target is all_to_all_op()


def is_reduce_scatter(node: fx.Node) -> bool:
    return node.target is reduce_scatter_op()


def is_all_reduce(node: fx.Node) -> bool:
    return node.target is all_reduce_op()


def is_reduction(node: fx.Node) -> bool:
    """Whether the node starts a collective that can sum over ranks: all_to_all, reduce_scatter or all_reduce."""
    return is_all_to_all(node) or is_reduce_scatter(node) or is_all_reduce(node)


def is_exchange(node: fx.Node) -> bool:
    """Whether the node starts the reduction of a parameter's gradient; False for the model's own collectives."""
    return (is_reduction(node) or gathers_addends(node)) and bool(meta.parameters(node))


def is_communication(node: fx.Node) -> bool:
    """Whether the node belongs to communication: a start, a wait, or a copy into or out of a collective's buffers."""
    # A saved parameter is an input of backward, whose meta still names the parameter.
    if node.op != "call_function":
        return False
    return is_start(node) or is_wait(node) or (bool(meta.parameters(node)) and not is_marker(node))


def group_of(start: fx.Node) -> str:
    """Return the name of a collective's process group: the last argument of its start."""
    return str(start.args[-1])


def unsharded_bytes(start: fx.Node) -> int:
    """Return the bytes of the larger side of a collective: the result of a gather, or the input of a reduction.

    For a copy between memory spaces, return the bytes that are copied.
    """
    whole = meta.value(start) if is_gather(start) else meta.tensor_value(start.all_input_nodes[0])
    members: Iterable[Tensor] = whole if isinstance(whole, list | tuple) else [whole]
    return sum(payload_bytes(member.shape, member.dtype) for member in members)


def sent_by(start: fx.Node) -> list[fx.Node]:
    """Return the tensors that a collective sends: one, or one for each tensor of a grouped gather."""
    if is_grouped_gather(start):
        return list(cast("list[fx.Node]", start.args[0]))
    return start.all_input_nodes[:1] if is_kept_gather(start) else start.all_input_nodes


def started_by(start: fx.Node) -> list[fx.Node]:
    """Return the nodes that are waited for: the start itself, or the selected results of a coalesced start."""
    taken = [user for user in start.users if is_getitem(user)]
    return taken or [start]


def waits_of(start: fx.Node) -> list[fx.Node]:
    """Return the waits for a start's results, in program order."""
    return sorted(user for started in started_by(start) for user in started.users if is_wait(user))


def wait_of(start: fx.Node) -> fx.Node | None:
    """Return the first wait for a start's results; None if there is no wait."""
    return next(iter(waits_of(start)), None)


def results_of(wait: fx.Node) -> list[fx.Node]:
    """Return the nodes that hold what a wait returns: the wait itself, or the selected results of a group wait."""
    return [user for user in wait.users if is_getitem(user)] if is_group_wait(wait) else [wait]


def start_of(wait: fx.Node) -> fx.Node:
    """Return the start of the collective or copy that a wait waits for."""
    started = cast(fx.Node, wait.args[0])
    return cast(fx.Node, started.args[0]) if is_getitem(started) else started


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def output_of(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def returned_by(graph: fx.Graph) -> list[Any]:
    """Return the outputs of a graph in order; some may be None or numbers instead of nodes."""
    returned = output_of(graph).args[0]
    return list(cast("list[Any]", returned)) if isinstance(returned, list | tuple) else [returned]


def call_functions(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the calls that satisfy `predicate`, in program order; the graph may be changed during the loop."""
    yield from [node for node in graph.nodes if node.op == "call_function" and predicate(node)]
