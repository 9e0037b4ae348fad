"""Merges the collectives of a bucket into one collective."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx

from zgraph.dialect.grouped_gathers import wait_group_op
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.operator_arguments import DequantizeArgs, QuantizeArgs
from zgraph.passes.common.replicated_gradients import ReplicatedReduction
from zgraph.runtime.chunks import Chunk
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, grouped_gather_op, reduce_scatter_op, wait_op

aten = torch.ops.aten
Mode = Literal["flat", "coalesced", "sequential"]


@dataclass(frozen=True)
class Bucket:
    """Collectives to merge.

    Attributes:
        starts: start nodes of the collectives, in program order.
        anchor: node before which the merged collective starts.
    """

    starts: tuple[fx.Node, ...]
    anchor: fx.Node


def merge(graph: fx.Graph, bucket: Bucket, mode: Mode = "flat") -> None:
    """Replace the collectives of a bucket by one collective; the caller restores the order of nodes.

    Args:
        graph: graph to change.
        bucket: collectives to merge.
        mode: "flat": concatenate the tensors. Gathers of parameters also allow "coalesced", which gathers each tensor
            into a storage of its own, and "sequential", which merges nothing but moves each gather to its first reader.
    """
    if mode == "sequential":
        for start in bucket.starts:
            put_at_use(start)
        return
    order = nodes.order_of(graph)
    for start in bucket.starts:
        _bring_before(start.all_input_nodes[0], bucket.anchor, order)
    with graph.inserting_before(bucket.anchor):
        if is_compressed(bucket.starts[0]):
            old = _merge_compressed(graph, bucket.starts)
        elif nodes.is_quantized_gather(bucket.starts[0]) and mode == "flat":
            old = _merge_quantized_gathers(graph, bucket.starts)
        elif nodes.is_all_reduce(bucket.starts[0]):
            old = _merge_all_reduces(graph, bucket.starts)
        elif not nodes.is_all_gather(bucket.starts[0]):
            found = [one for start in bucket.starts if (one := ReplicatedReduction.of(start)) is not None]
            alike = len(found) == len(bucket.starts) and all(one.policy == found[0].policy for one in found)
            old = _merge_replicated(graph, found) if alike else _merge_reductions(graph, bucket.starts)
        elif mode == "coalesced":
            old = _group_gathers(graph, bucket.starts)
        else:
            old = _merge_gathers(graph, bucket.starts)
    edits.erase_dead(graph, old)


def put_at_use(start: fx.Node) -> None:
    """Move a gather, its wait and the views of its result to just before the first reader, and pin them there."""
    wait = cast(fx.Node, nodes.wait_of(start))
    for node in (start, wait):
        meta.tag_at_use(node)
    chain = dict.fromkeys([start, *dataflow.reshaped_values(wait)])
    readers = [user for node in chain for user in node.users if user not in chain]
    if readers:
        anchor = min(readers)  # nodes compare by their place in the graph
        for node in sorted(chain):
            edits.move_before(node, anchor)


def result_of(start: fx.Node) -> fx.Node | None:
    """Return the node with a collective's final value: the sum over ranks for a reduction, otherwise the wait.

    Returns None for an all_to_all whose result is not summed.
    """
    wait = nodes.wait_of(start)
    if wait is None or not nodes.is_reduction(start):
        return wait
    users = list(wait.users)
    sums = len(users) == 1 and (nodes.is_sum_ranks(users[0]) or nodes.is_dequantize_sum(users[0]))
    return users[0] if sums else None if nodes.is_all_to_all(start) else wait


def is_compressed(start: fx.Node) -> bool:
    """Return whether a collective exchanges gradients as codes, given its start node."""
    result = result_of(start) if nodes.is_all_to_all(start) else None
    return result is not None and nodes.is_dequantize_sum(result)


def _bring_before(node: fx.Node, anchor: fx.Node, order: dict[fx.Node, int]) -> None:
    if order[node] < order[anchor]:
        return
    for source in node.all_input_nodes:
        _bring_before(source, anchor, order)
    edits.move_before(node, anchor)


def _merge_gathers(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Concatenate the shards and gather them once; copy each member's columns out of the result [N, total]."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    world = cast(int, starts[0].args[1])
    sent = [start.all_input_nodes[0] for start in starts]
    sizes = [math.prod(meta.tensor_value(node).shape) for node in sent]
    flat = [_flat(graph, node, [size], start) for node, size, start in zip(sent, sizes, starts, strict=True)]
    packed = meta.create(graph, aten.cat.default, (flat,))
    name = _name("all_gather_bucket", starts)
    start = meta.create(graph, starts[0].target, (packed, *starts[0].args[1:]), like=starts[0], name=name)
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    rows = meta.create(graph, aten.view.default, (wait, [world, sum(sizes)]))
    _work_for(starts, packed, start, wait, rows)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    offset = 0
    for old, size in zip(waits, sizes, strict=True):
        columns = meta.create(graph, aten.slice.Tensor, (rows, 1, offset, offset + size), like=old)
        copied = meta.create(
            graph, aten.clone.default, (columns,), {"memory_format": torch.contiguous_format}, like=old
        )
        whole = meta.create(graph, aten.view.default, (copied, list(meta.tensor_value(old).shape)), like=old)
        old.replace_all_uses_with(whole)
        offset += size
    return [*starts, *waits]


def _merge_quantized_gathers(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Quantize all shards into one payload and gather it once; decode each parameter where it is read."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    codes = [start.all_input_nodes[0] for start in starts]
    shards, numels = ([item for node in codes for item in cast("list[Any]", node.args[place])] for place in (0, 2))
    _, method, _, rank = codes[0].args
    name = _name("quantize_bucket", starts)
    payload = meta.create(graph, codes[0].target, (shards, method, numels, rank), name=name)
    name = _name("all_gather_bucket", starts)
    start = meta.create(graph, starts[0].target, (payload, *starts[0].args[1:]), like=starts[0], name=name)
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    _work_for(starts, payload, start, wait)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    decoded: list[fx.Node] = []
    offset = 0
    for code, old in zip(codes, waits, strict=True):
        for reader in list(old.users):
            _, _, numel, within, *others = reader.args
            args = (wait, method, numel, offset + cast(int, within), *others)
            part = meta.create(graph, reader.target, args, like=reader, name=reader.name)
            reader.replace_all_uses_with(part)
            decoded.append(reader)
        offset += meta.tensor_value(code).shape[0]
    return [*starts, *waits, *codes, *decoded]


def _group_gathers(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Replace gathers by one coalesced gather, with one wait and a separate result for each member."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    sent = [start.all_input_nodes[0] for start in starts]
    sent, replaced = _cast_all(graph, starts, sent)
    name = _name("all_gather_group", starts)
    start = meta.create(graph, grouped_gather_op(), (sent, *starts[0].args[1:]), like=starts[0], name=name)
    wait = meta.create(graph, wait_group_op(), (start,), like=starts[0], name=_name("wait_group", starts))
    _work_for(starts, start, wait)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    for place, old in enumerate(waits):
        old.replace_all_uses_with(meta.create(graph, operator.getitem, (wait, place), like=old))
    return [*starts, *waits, *replaced]


def _cast_all(graph: fx.Graph, starts: Sequence[fx.Node], sent: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Merge the casts of all shards into one node; return the tensors to send, and the replaced nodes."""
    chains = {place: chain for place, node in enumerate(sent) if (chain := _source_cast(node))}
    if len(chains) < 2:
        return sent, []
    shards = [chain[-1].all_input_nodes[0] for chain in chains.values()]
    chunks = [meta.tensor_value(sent[place]) for place in chains]
    members = [starts[place] for place in chains]
    args = (shards, [chunk.shape[0] for chunk in chunks], chunks[0].dtype)
    cast_shards = meta.create(graph, torch.ops.zgraph.cast_shards.default, args, name=_name("cast_group", members))
    _work_for(members, cast_shards)
    found = list(sent)
    for number, place in enumerate(chains):
        found[place] = meta.create(graph, operator.getitem, (cast_shards, number), like=starts[place])
    return found, [node for chain in chains.values() for node in chain]


def _source_cast(sent: fx.Node) -> list[fx.Node]:
    """Return the nodes that pad, copy and cast a shard to make the tensor `sent`, last first; [] if nothing is cast."""
    chain = [sent]
    while len(chain[-1].users) == 1:
        node = chain[-1]
        if traits.cast_dtype(node) is not None:
            return chain
        if node.target not in (aten.constant_pad_nd.default, aten.clone.default):
            break
        chain.append(node.all_input_nodes[0])
    return []


def _merge_replicated(graph: fx.Graph, members: Sequence[ReplicatedReduction]) -> list[fx.Node]:
    """Concatenate and pad flat gradients; exchange, sum and gather them once.

    Each member's mean is a view of the gathered result, and keeps the storage of the whole bucket alive.
    """
    starts = [member.steps[0] for member in members]
    world = cast(int, members[0].gather.args[1])
    flat = [member.flat(graph) for member in members]
    numel = sum(member.numel for member in members)
    chunk = Chunk(numel, 1, (nodes.group_of(starts[0]),))
    rows = chunk.numel()
    made: list[fx.Node] = []
    if missing := world * rows - numel:
        made.append(_zeros(graph, missing, meta.tensor_value(flat[0])))
    made.append(meta.create(graph, aten.cat.default, ([*flat, *made],)))
    kinds = {all_to_all_op(): "all_to_all", reduce_scatter_op(): "reduce_scatter", all_gather_op(): "all_gather"}
    for step in members[0].steps:
        args = ([rows] * world, [rows] * world, *step.args[3:]) if nodes.is_all_to_all(step) else step.args[1:]
        kind = "wait" if nodes.is_wait(step) else kinds.get(step.target)
        name = None if kind is None else _name(f"{kind}_bucket", starts)
        made.append(meta.create(graph, step.target, (made[-1], *args), step.kwargs, name=name))
        if nodes.is_start(made[-1]):
            meta.set_chunks(made[-1], [chunk])
    if missing:
        made.append(meta.create(graph, aten.slice.Tensor, (made[-1], 0, 0, numel)))
    _work_for(starts, *made)
    offset = 0
    for member in members:
        old = member.mean
        part = meta.create(graph, aten.slice.Tensor, (made[-1], 0, offset, offset + member.numel), like=old)
        old.replace_all_uses_with(part)
        offset += member.numel
    old = [node for member in members for node in (*member.steps[0].all_input_nodes, *member.steps, member.mean)]
    return list(dict.fromkeys(old))


def _merge_reductions(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Concatenate chunks [N, n] along n; exchange and sum them once. Each member's mean is a view of the result."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    exchange = nodes.is_all_to_all(starts[0])
    sums = [cast(fx.Node, result_of(start)) for start in starts]
    world = cast(int, sums[0].args[1] if exchange else starts[0].args[2])
    sent = [start.all_input_nodes[0] for start in starts]
    sizes = [math.prod(meta.tensor_value(node).shape) // world for node in sent]
    chunks = [_flat(graph, node, [world, size], start) for node, size, start in zip(sent, sizes, starts, strict=True)]
    packed = meta.create(graph, aten.cat.default, (chunks, 1))
    flat = meta.create(graph, aten.view.default, (packed, [world * sum(sizes)]))
    args: tuple[Any, ...] = (
        ([sum(sizes)] * world, [sum(sizes)] * world, starts[0].args[3]) if exchange else starts[0].args[1:]
    )
    kind = "all_to_all_bucket" if exchange else "reduce_scatter_bucket"
    start = meta.create(graph, starts[0].target, (flat, *args), name=_name(kind, starts))
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    total = wait if sums[0] is waits[0] else meta.create(graph, sums[0].target, (wait, *sums[0].args[1:]))
    _work_for(starts, packed, flat, start, wait, total)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    offset = 0
    for old, size in zip(sums, sizes, strict=True):
        part = meta.create(graph, aten.slice.Tensor, (total, 0, offset, offset + size), like=old)
        shaped = meta.create(graph, aten.view.default, (part, list(meta.tensor_value(old).shape)), like=old)
        old.replace_all_uses_with(shaped)
        offset += size
    return list(dict.fromkeys([*starts, *waits, *sums]))


def _merge_all_reduces(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Concatenate flat gradients; all_reduce and divide them once. Each member's mean is a view of the result."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    sums = [cast(fx.Node, result_of(start)) for start in starts]
    sizes = [meta.tensor_value(start).shape[0] for start in starts]
    packed = meta.create(graph, aten.cat.default, ([start.all_input_nodes[0] for start in starts],))
    name = _name("all_reduce_bucket", starts)
    start = meta.create(graph, starts[0].target, (packed, *starts[0].args[1:]), name=name)
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    total = wait if sums[0] is waits[0] else meta.create(graph, sums[0].target, (wait, *sums[0].args[1:]))
    _work_for(starts, packed, start, wait, total)
    offset = 0
    for old, size in zip(sums, sizes, strict=True):
        part = meta.create(graph, aten.slice.Tensor, (total, 0, offset, offset + size), like=old)
        old.replace_all_uses_with(part)
        offset += size
    return list(dict.fromkeys([*starts, *waits, *sums]))


def _zeros(graph: fx.Graph, count: int, like: Tensor) -> fx.Node:
    """Create `count` zeros with dtype and device of `like`, by an operator that Inductor does not decompose."""
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    zeros = graph.create_node("call_function", aten.full.default, ([count], 0), options)
    meta.set_value(zeros, like.new_zeros([count]))  # evaluating it without inputs would make a real tensor
    return zeros


def _merge_compressed(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Quantize all gradients into one payload and exchange once; one operator returns each member's sum."""
    waits = [cast(fx.Node, nodes.wait_of(start)) for start in starts]
    sums = [cast(fx.Node, result_of(start)) for start in starts]
    codes = [start.all_input_nodes[0] for start in starts]
    quantized = [code.all_input_nodes[0] for code in codes]
    members = [QuantizeArgs.of(node) for node in quantized]
    numels = [numel for member in members for numel in member.numels]
    joined = replace(
        members[0],
        grads=[grad for member in members for grad in member.grads],
        handles=[handle for member in members for handle in member.handles],
        errors=[error for member in members for error in member.errors],
        numels=numels,
    )
    args = tuple(getattr(joined, field.name) for field in fields(joined))
    packed = meta.create(graph, quantized[0].target, args, name=_name("quantize_bucket", starts))
    payload = meta.create(graph, operator.getitem, (packed, 0))
    draw = meta.create(graph, operator.getitem, (packed, 1))
    world = len(cast("list[int]", starts[0].args[1]))
    splits = [meta.tensor_value(payload).shape[0] // world] * world
    name = _name("all_to_all_bucket", starts)
    start = meta.create(graph, starts[0].target, (payload, splits, splits, starts[0].args[3]), name=name)
    wait = meta.create(graph, wait_op(), (start,), name=_name("wait_bucket", starts))
    summed = replace(DequantizeArgs.of(sums[0]), received=wait, draw=draw, numels=numels)
    args = tuple(getattr(summed, field.name) for field in fields(summed))
    every = meta.create(graph, sums[0].target, args, name=_name("dequantize_bucket", starts))
    _work_for(starts, packed, payload, draw, start, wait, every)
    meta.set_chunks(start, [chunk for member in starts for chunk in meta.chunks(member)])
    taken: list[fx.Node] = []
    for place, old in enumerate(sums):
        part = meta.create(graph, operator.getitem, (every, place), like=old)
        for user in list(old.users):
            user.replace_all_uses_with(part)
            taken.append(user)
    draws = [user for node in quantized for user in node.users if user not in codes]
    return [*starts, *waits, *sums, *codes, *draws, *quantized, *taken]


def _flat(graph: fx.Graph, node: fx.Node, shape: list[int], start: fx.Node) -> fx.Node:
    if not meta.tensor_value(node).is_contiguous():
        node = meta.create(graph, aten.clone.default, (node,), {"memory_format": torch.contiguous_format}, like=start)
    return meta.create(graph, aten.view.default, (node, shape), like=start)


def _work_for(starts: Sequence[fx.Node], *made: fx.Node) -> None:
    names = [name for start in starts for name in meta.parameters(start)]
    handles = [handle for start in starts for handle in meta.handles(start)]
    part = meta.part(starts[0])
    for node in made:
        meta.set_parameters(node, names, handles)
        if part is not None:
            meta.set_part(node, part)


def _name(kind: str, starts: Sequence[fx.Node]) -> str:
    return f"{kind}_{meta.label(starts[0])}_{len(starts)}"
