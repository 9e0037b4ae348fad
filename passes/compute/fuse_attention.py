"""Replace hand-written attention with one operator that does not keep the attention probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from zgraph.compiler.graph_pass import Fact, GraphPass, PassContext, Phase
from zgraph.graph import dataflow, edits, meta, nodes, traits
from zgraph.graph.sizes import size_hint
from zgraph.torch_compat.inductor import fuse_attention

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class FuseAttention(GraphPass):
    """Replace `softmax(q @ k.T / sqrt(d) + mask) @ v` with `scaled_dot_product_attention`, in forward and backward.

    The patterns are Inductor's own, which `torch.compile` applies to its joint graph. Backward then needs q, k, v and
    one number per row instead of the probabilities, whose size grows with the square of the sequence length. Results
    are as close to eager torch as those of `torch.compile`, but not bitwise equal.

    This pass is not in `presets.default()`, because it may make a step slower. Put it first in the list:

        zgraph.PassList([FuseAttention(), *presets.default()])

    It pays on CPUs if memory is scarce, and for long sequences in fp32. Step time and bytes saved for backward of
    `torch.compile` without -> with the patterns (eight heads of 64, batch 8, no mask, one thread of an AMD EPYC):

        length 1,024, fp32    1844 -> 1320 ms    337 -> 97 MiB
        length 1,024, bf16     837 ->  962 ms    168 -> 49 MiB
        length 256, bf16       107 ->  145 ms    18.5 -> 12.6 MiB

    The pass has not been measured on GPUs.

    Leaves alone: graphs of the lowering "fx", which must be bitwise equal to eager torch; attention with active
    dropout, for which the fused operator draws other masks; attention that matches none of the patterns. The pass
    notes the reason in dumps.
    """

    name: ClassVar[str] = "fuse_attention"
    phase: ClassVar[Phase] = "joint"
    conflicts: ClassVar[frozenset[str]] = frozenset({Fact.LIFETIMES_CHOSEN})  # chosen by the memory of these nodes

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        if not ctx.decomposed:
            ctx.note(self, "results are to be those of eager torch bit for bit")
            return False
        device = device_of_products(gm.graph)
        if device is None:
            ctx.note(self, "no attention is written by hand")
            return False
        tried = edits.copy_of(gm)  # the search itself drops views and copies that change nothing
        before = {node: _values_read(node) for node in tried.graph.nodes}
        found = fuse_attention(tried, device)
        ctx.note(self, f"{found} fused")
        if not found:
            return False
        edits.restore_order(tried.graph)
        _restore_layouts(tried.graph, before)
        gm.graph = tried.graph
        return True


def device_of_products(graph: fx.Graph) -> torch.device | None:
    """Return the device of a graph's batched matrix products; None if the graph cannot contain attention."""
    products = graph.find_nodes(op="call_function", target=aten.bmm.default, sort=False)
    if len(products) < 2 or not graph.find_nodes(op="call_function", target=aten.exp.default, sort=False):
        return None
    return meta.tensor_value(next(iter(products))).device


def _values_read(node: fx.Node) -> list[Any]:
    return [meta.value(read) for read in _reads(node)]


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a node's arguments, in order and with duplicates."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _restore_layouts(graph: fx.Graph, before: Mapping[fx.Node, Sequence[Any]]) -> None:
    """Give new nodes fake values; where strides differ from the traced ones, let old readers read a copy."""
    new = [node for node in graph.nodes if node not in before]
    for node in new:
        meta.set_value(node, meta.evaluate(node))
    for node in new:
        traced = _traced_value(node, before)
        if traced is not None and not meta.same_layout(traced, meta.value(node)):
            _read_a_copy(node, [user for user in node.users if user in before], traced)
    for node in nodes.call_functions(graph, before.__contains__):
        if not meta.same_layout(before[node], _values_read(node)):  # strides of a dim of size 1 may still differ
            meta.set_value(node, meta.evaluate(node))


def _traced_value(node: fx.Node, before: Mapping[fx.Node, Sequence[Any]]) -> Tensor | None:
    """Return the fake value with which old readers of a new node were traced; None if it has no old readers."""
    for user in node.users:
        if user in before:
            return cast(Tensor, before[user][_reads(user).index(node)])
    return None


def _read_a_copy(node: fx.Node, readers: Sequence[fx.Node], traced: Tensor) -> None:
    """Let `readers` read a copy of `node` with the strides of `traced`; readers that copy anyway still read `node`."""
    order = sorted(range(traced.dim()), key=lambda dim: size_hint(traced.stride(dim)), reverse=True)
    back = [order.index(dim) for dim in range(traced.dim())]
    with node.graph.inserting_before(node.next):
        copied = _permuted(node, order)
        copied = _created(copied, aten.clone.default, (copied,), {"memory_format": torch.contiguous_format})
        copied = _permuted(copied, back)
    for reader in readers:
        reader.replace_input_with(node, copied)
    for copy in _copies(copied):
        _spare(copy, copied, node)
    edits.erase_dead(node.graph, [*dataflow.reshaped_values(node)][1:])


def _copies(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the clones of a node and of its views."""
    for user in list(node.users):
        if user.target is aten.clone.default:
            yield user
        elif _is_view(user):
            yield from (copy for copy in user.users if copy.target is aten.clone.default)


def _spare(copy: fx.Node, copied: fx.Node, node: fx.Node) -> None:
    """Bypass `copy`, a clone of `copied` or of its view, if `node` (or its view) already has the strides of `copy`."""
    source = copy.all_input_nodes[0]
    direct = node
    if source is not copied:
        with node.graph.inserting_before(source):
            direct = _created(node, source.target, (node, *source.args[1:]), source.kwargs)
    if meta.same_layout(meta.value(copy), meta.value(direct)) and not _is_returned(copy):
        copy.replace_all_uses_with(direct)


def _permuted(node: fx.Node, order: Sequence[int]) -> fx.Node:
    if list(order) == sorted(order):
        return node
    return _created(node, aten.permute.default, (node, list(order)))


def _created(like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    made = meta.create(like.graph, target, args, kwargs, like=like)
    meta.inherit_lifetime(made, like)
    return made


def _is_view(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1 and traits.is_view(node)


def _is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns a node or a view of it."""
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users)
