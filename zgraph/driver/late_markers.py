"""Lets AOTAutograd trace a frame as if its inputs were unsharded parameters, and inserts the markers afterwards.

Tracing a marker takes as long as ten operators of torch: both are custom operators with an autograd function in Python.
In the graph that AOTAutograd receives, the input `shard` therefore stands for `unshard(shard, handle, ...)`:

    unshard(shard) -> mm -> ...  =>  shard -> mm -> ...  =traced=>  the same, and mm_1, the gradient of the input

The traced graph then gets `unshard` before the first reader of the input, and `reduce_grad` after its gradient.
AOTAutograd passes on whatever tensors it is called with, and these are the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.graph import meta, nodes
from zgraph.torch_compat.aot import aot_input_index, belongs_to_backward
from zgraph.torch_compat.dynamo import dynamo_fake
from zgraph.torch_compat.fake_values import fake_storage_key


@dataclass(frozen=True)
class _Late:
    """A marker that was removed: its arguments except for shard and handle, and its origin."""

    shard: Tensor
    handle: int  # index among the frame's inputs
    arguments: tuple[Any, ...]
    origin: fx.Node


class LateMarkers:
    """The markers that were removed from one frame.

    Args:
        gm: Dynamo's graph, on local shards; changed in place.
        inputs: example inputs of the graph.
        skipped: indices of inputs whose markers remain.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], skipped: Mapping[int, object]) -> None:
        self.inputs = list(inputs)
        self._late: dict[int, _Late] = {}
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        returned = _storages(nodes.returned_by(gm.graph))
        for node in nodes.call_functions(gm.graph, nodes.is_unshard):
            shard, handle, *arguments = node.args
            value = dynamo_fake(node)
            if shard not in places or handle not in places or len(shard.users) > 1 or places[shard] in skipped:
                continue
            # A returned parameter would be returned as it is passed in.
            if not isinstance(value, Tensor) or fake_storage_key(value) in returned:
                continue
            place = places[shard]
            self._late[place] = _Late(self.inputs[place], places[handle], tuple(arguments), node)
            with torch.no_grad():
                self.inputs[place] = value.new_empty(value.shape).requires_grad_(value.requires_grad)
            node.replace_all_uses_with(shard)
            gm.graph.erase_node(node)
        if self._late:
            gm.recompile()

    def insert(self, graph: fx.Graph, outputs: int | None = None) -> None:
        """Insert the markers into the traced graph.

        Args:
            graph: joint graph, or graph of an inference.
            outputs: number of outputs of a joint graph that are not gradients; None: the graph has no gradients.
        """
        if not self._late:
            return
        inputs = {aot_input_index(node): node for node in graph.find_nodes(op="placeholder")}
        given = [node for node in graph.find_nodes(op="placeholder") if aot_input_index(node) is not None]
        if outputs is not None:
            returned = nodes.returned_by(graph)
            for number, node in enumerate(given, outputs):
                late = self._late.get(aot_input_index(node))
                grad = returned[number]
                if late is not None and isinstance(grad, fx.Node):
                    returned[number] = _reduced(grad, inputs[late.handle], late)
            nodes.output_of(graph).args = (tuple(returned),)
        order, last = nodes.order_of(graph), next(reversed(graph.find_nodes(op="placeholder")))
        before = nodes.output_of(graph)
        # In the order of forward, however parameters of a module are read.
        for place, late in reversed(self._late.items()):
            node = inputs[place]
            if node.users:
                before = min(before, *node.users, key=order.__getitem__)
                _gather(node, inputs[late.handle], late, before)


def _storages(returned: Sequence[Any]) -> set[int]:
    values = [dynamo_fake(node) for node in returned if isinstance(node, fx.Node)]
    return {fake_storage_key(value) for value in values if isinstance(value, Tensor)}


def _gather(node: fx.Node, handle: fx.Node, late: _Late, before: fx.Node) -> None:
    value = meta.tensor_value(node)
    with node.graph.inserting_before(before):
        arguments = (node, handle, *late.arguments)
        marker = node.graph.create_node("call_function", torch.ops.zgraph.unshard.default, arguments, name="unshard")
    node.replace_all_uses_with(marker, delete_user_cb=lambda user: user is not marker)
    meta.set_value(marker, value)
    meta.set_value(node, _like_shard(value, late))
    meta.copy_origin(marker, late.origin)


def _reduced(grad: fx.Node, handle: fx.Node, late: _Late) -> fx.Node:
    _, _, *policy = late.arguments
    arguments = (grad, handle, late.shard.dtype, *policy)
    after = grad if grad.op != "placeholder" else next(reversed(grad.graph.find_nodes(op="placeholder")))
    with grad.graph.inserting_after(after):
        operator = torch.ops.zgraph.reduce_grad.default
        marker = grad.graph.create_node("call_function", operator, arguments, name="reduce_grad")
    meta.set_value(marker, _like_shard(meta.tensor_value(grad), late))
    meta.copy_origin(marker, late.origin)
    belongs_to_backward(marker)
    return marker


def _like_shard(whole: Tensor, late: _Late) -> Tensor:
    """Return a fake shard in the fake mode of the traced graph, which is not that of Dynamo's graph."""
    return whole.new_empty(late.shard.shape, dtype=late.shard.dtype)
