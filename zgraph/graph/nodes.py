"""Predicates and pairs over graph nodes: markers, collectives, waits, views, first users."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph import dialect as dialect  # registers the operators that are asked for here
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
from zgraph.torch_compat.operators import returns_alias

aten, prims = torch.ops.aten, torch.ops.prims


def is_unshard(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.unshard.default


def is_reduce_grad(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.reduce_grad.default


def is_marker(node: fx.Node) -> bool:
    return is_unshard(node) or is_reduce_grad(node)


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


def is_low_rank(node: fx.Node) -> bool:
    """Whether the node computes with the factors of low-rank reductions."""
    return is_low_rank_left(node) or is_low_rank_right(node) or node.target is torch.ops.zgraph.low_rank_means.default


def is_quantize_shards(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.quantize_shards.default


def is_dequantize_shards(node: fx.Node) -> bool:
    return node.target is torch.ops.zgraph.dequantize_shards.default


def is_start(node: fx.Node) -> bool:
    """Whether the node starts a collective whose result needs a wait."""
    return node.op == "call_function" and (is_functional_collective(node.target) or is_kept_gather(node))


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one of several results of a call."""
    return node.target is operator.getitem


def is_wait(node: fx.Node) -> bool:
    return node.target is wait_op() or is_group_wait(node)


def is_group_wait(node: fx.Node) -> bool:
    """Whether the node makes all results of a grouped gather usable, which are then taken one by one."""
    return node.target is torch.ops.zgraph.wait_group.default


def is_all_gather(node: fx.Node) -> bool:
    return node.target is all_gather_op()


def is_kept_gather(node: fx.Node) -> bool:
    """Whether the node gathers only what the window has not gathered yet."""
    return node.target is torch.ops.zgraph.all_gather_kept.default


def is_grouped_gather(node: fx.Node) -> bool:
    """Whether the node gathers several tensors side by side, for which there is one wait."""
    return node.target is grouped_gather_op()


def is_gather(node: fx.Node) -> bool:
    return is_all_gather(node) or is_kept_gather(node) or is_grouped_gather(node)


def gathers_addends(node: fx.Node) -> bool:
    """Whether each rank sends the whole of something, of which all ranks make the sum."""
    return is_all_gather(node) and any(chunk.group_names == ("",) for chunk in meta.chunks(node))


def is_quantized_gather(node: fx.Node) -> bool:
    """Whether the node gathers the codes of parameters."""
    return is_gather(node) and any(is_quantize_shards(sent) for sent in sent_by(node))


def is_cast_shards(node: fx.Node) -> bool:
    """Whether the node casts, and pads, all members of a grouped gather."""
    return node.target is torch.ops.zgraph.cast_shards.default


def is_decoding(node: fx.Node) -> bool:
    """Whether the node turns the codes of a gathered parameter, its first argument, into values."""
    return is_dequantize_shards(node) or node.target is torch.ops.zgraph.add_difference.default


def is_packing(node: fx.Node) -> bool:
    """Whether the node makes, of rows of which ranks hold different numbers, what is alike on all of them."""
    if is_getitem(node):
        return is_cast_shards(node.all_input_nodes[0])
    return node.target in (
        aten.cat.default,
        torch.ops.zgraph.cast_shards.default,
        torch.ops.zgraph.quantize_shards.default,
        torch.ops.zgraph.weight_difference.default,
    )


def is_all_to_all(node: fx.Node) -> bool:
    return node.target is all_to_all_op()


def is_reduce_scatter(node: fx.Node) -> bool:
    return node.target is reduce_scatter_op()


def is_all_reduce(node: fx.Node) -> bool:
    return node.target is all_reduce_op()


def is_reduction(node: fx.Node) -> bool:
    """Whether the node starts a collective whose result is a sum over ranks, or is summed on arrival."""
    return is_all_to_all(node) or is_reduce_scatter(node) or is_all_reduce(node)


def is_communication(node: fx.Node) -> bool:
    """Starts, waits, and the copies in and out of their buffers: what carries a parameter but computes nothing."""
    # What forward has saved is an input of backward, and still says for whom it was gathered.
    if node.op != "call_function":
        return False
    return is_start(node) or is_wait(node) or (bool(meta.parameters(node)) and not is_marker(node))


def group_of(start: fx.Node) -> str:
    """Group name of a collective's start, which every one of them takes last."""
    return str(start.args[-1])


def whole_bytes(start: fx.Node) -> int:
    """Bytes of the whole tensor a collective works on: what a gather yields, what a reduction takes."""
    whole = meta.value(start) if is_gather(start) else meta.tensor_value(start.all_input_nodes[0])
    members: Iterable[Tensor] = whole if isinstance(whole, list | tuple) else [whole]
    return sum(payload_bytes(member.shape, member.dtype) for member in members)


def sent_by(start: fx.Node) -> list[fx.Node]:
    """The tensors that a collective sends: one, or each member of a grouped one."""
    if is_grouped_gather(start):
        return list(cast("list[fx.Node]", start.args[0]))
    return start.all_input_nodes[:1] if is_kept_gather(start) else start.all_input_nodes


def started_by(start: fx.Node) -> list[fx.Node]:
    """What is to be waited for: the start, or each result of a coalesced one of the model's own."""
    taken = [user for user in start.users if is_getitem(user)]
    return taken or [start]


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits that make a start's results usable, in program order."""
    return sorted(user for started in started_by(start) for user in started.users if is_wait(user))


def wait_of(start: fx.Node) -> fx.Node | None:
    """The wait that makes a start's result usable, of several results the first one's."""
    return next(iter(waits_of(start)), None)


def results_of(wait: fx.Node) -> list[fx.Node]:
    """What there is to be read after a wait: the wait itself, or each result that is taken from it."""
    return [user for user in wait.users if is_getitem(user)] if is_group_wait(wait) else [wait]


def start_of(wait: fx.Node) -> fx.Node:
    """The start that a wait belongs to."""
    started = cast(fx.Node, wait.args[0])
    return cast(fx.Node, started.args[0]) if is_getitem(started) else started


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


def first_user(node: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    return min(node.users, key=order.__getitem__, default=None)


def output_of(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def returned_by(graph: fx.Graph) -> list[Any]:
    """What the graph returns, in order; values that are not nodes included."""
    returned = output_of(graph).args[0]
    return list(cast("list[Any]", returned)) if isinstance(returned, list | tuple) else [returned]


def call_functions(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Matching nodes in program order; the list is taken beforehand, so the loop may rewrite the graph."""
    yield from [node for node in graph.nodes if node.op == "call_function" and predicate(node)]


# Ops with one tensor input whose result is a view, a cast or a copy of it: following a gathered weight through them
# still finds the gathered weight.
_RESHAPING = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten._to_copy.default,
        prims.convert_element_type.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
    }
)


def is_reshaping(node: fx.Node) -> bool:
    """Whether the node is a view, cast or copy of its only tensor input, or decodes it."""
    if node.target in _RESHAPING or is_decoding(node) or getattr(node.target, "__name__", "") == "getitem":
        return True
    return len(node.all_input_nodes) == 1 and returns_alias(node.target)


def reshaped_values(node: fx.Node) -> Iterator[fx.Node]:
    """The node and everything that is only a view, cast or copy of its result."""
    pending = [node]
    while pending:
        value = pending.pop()
        yield value
        pending.extend(user for user in value.users if is_reshaping(user))


def without_views(node: fx.Node) -> fx.Node:
    """The node behind views that change nothing, such as the view that `DTensor.to_local` leaves."""
    while node.target is aten.view.default:
        source = cast(fx.Node, node.args[0])
        if not meta.same_layout(meta.value(source), meta.value(node)):
            break
        node = source
    return node


def is_cast(node: fx.Node) -> torch.dtype | None:
    """The target dtype of a node that only casts, else None.

    Eager torch records `aten._to_copy`; Inductor's decompositions, and passes, `prims.convert_element_type`.
    """
    if node.target is prims.convert_element_type.default:
        return cast("torch.dtype", node.args[1])
    # The cast that autograd writes for autocast repeats the layout and device that the value has anyway.
    if node.target is not aten._to_copy.default or set(node.kwargs) - {"dtype", "layout", "device"}:
        return None
    source, found = meta.tensor_value(node.all_input_nodes[0]), meta.tensor_value(node)
    if (source.layout, source.device) != (found.layout, found.device):
        return None
    return cast("torch.dtype | None", node.kwargs.get("dtype"))


def copy_in(start: fx.Node) -> list[fx.Node] | None:
    """The casts, pads and packing between the graph's inputs and a start; None where anything else is between."""
    found: dict[fx.Node, None] = {}
    pending = list(start.all_input_nodes)
    for node in pending:
        if node.op in ("placeholder", "get_attr") or node in found:
            continue
        if is_start(node) or is_wait(node) or not (is_communication(node) or is_reshaping(node)):
            return None
        found[node] = None
        pending.extend(node.all_input_nodes)
    return list(found)
