"""Lets AOTAutograd trace a frame as if its inputs were unsharded parameters, and inserts the markers afterwards.

A marker takes as long to trace as ten operators of torch, because it is a custom operator with an autograd function in
Python. In the graph that AOTAutograd traces, an input `shard` therefore represents `unshard(shard, handle, ...)`:

    unshard(shard) -> mm -> ...    becomes    shard -> mm -> ...

The traced graph then gets `unshard` before the first reader of the input, and `reduce_grad` after its gradient.
AOTAutograd does not look at its inputs at run time, so these can be the shards.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.graph import meta, nodes
from zgraph.torch_compat.aot import aot_input_index, belongs_to_backward, gradient_indices
from zgraph.torch_compat.dynamo import dynamo_fake, is_autograd_function
from zgraph.torch_compat.fake_values import fake_storage_key


@dataclass(frozen=True)
class _Marker:
    """A marker that was removed.

    Attributes:
        shard: fake shard, in the fake mode of Dynamo's graph.
        handle: index of the handle among the frame's inputs.
        arguments: arguments after shard and handle.
        origin: the removed node.
    """

    shard: Tensor
    handle: int
    arguments: tuple[Any, ...]
    origin: fx.Node

    def like_shard(self, known: Tensor) -> Tensor:
        """Return a fake shard in the fake mode of `known`."""
        return known.new_empty(self.shard.shape, dtype=self.shard.dtype)


class LateMarkers:
    """The markers that were removed from one frame.

    Args:
        gm: Dynamo's graph, on local shards; changed in place.
        inputs: example inputs of the graph.
        kept: indices of inputs whose markers remain.

    Attributes:
        inputs: example inputs of the changed graph.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], kept: Container[int]) -> None:
        self.inputs = list(inputs)
        self._markers: dict[int, _Marker] = {}  # by index of the shard
        places: dict[Any, int] = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        returned = _storages(nodes.returned_by(gm.graph))
        found = list(nodes.call_functions(gm.graph, nodes.is_unshard))
        if any(is_autograd_function(user) for node in found for user in node.users):
            # Such as that of `reduce_all_params`: what a rank reads must not decide when it reduces.
            return
        for node in found:
            shard, handle, *arguments = node.args
            value = dynamo_fake(node)
            if not isinstance(shard, fx.Node) or shard not in places or handle not in places:
                continue
            # Of several gathers, backward adds the gradients before it reduces them.
            if places[shard] in kept or len(shard.users) > 1 or not isinstance(value, Tensor):
                continue
            if fake_storage_key(value) in returned:  # AOTAutograd would return the shard itself, or a view of it
                continue
            place = places[shard]
            self._markers[place] = _Marker(self.inputs[place], places[handle], tuple(arguments), node)
            with torch.no_grad():
                self.inputs[place] = value.new_empty(value.shape).requires_grad_(value.requires_grad)
            node.replace_all_uses_with(shard)
            gm.graph.erase_node(node)
        if self._markers:
            gm.recompile()

    def facts(self) -> list[tuple[Any, ...]]:
        """Return the removed markers as plain values: input, shape and dtype of the shard, handle and arguments."""
        return [
            (place, tuple(one.shard.shape), one.shard.dtype, one.handle, one.arguments)
            for place, one in self._markers.items()
        ]

    def insert(self, graph: fx.Graph) -> None:
        """Insert the markers into the traced graph, a joint graph or that of an inference."""
        given = {aot_input_index(node): node for node in graph.find_nodes(op="placeholder")}
        self._reduce(graph, given)
        order = nodes.order_of(graph)
        places: list[tuple[int, fx.Node]] = []
        before = nodes.output_of(graph)
        # Gathers keep the order of forward, whichever parameter of a module is read first.
        for place in reversed(self._markers):
            if given[place].users:
                before = min(before, *given[place].users, key=order.__getitem__)
                places.append((place, before))
        for place, before in reversed(places):
            marker = self._markers[place]
            _gather(given[place], given[marker.handle], marker, before)

    def _reduce(self, graph: fx.Graph, given: dict[int | None, fx.Node]) -> None:
        """Insert `reduce_grad` after each gradient; before the output if the gradient is an input of the graph."""
        returned, indices = nodes.returned_by(graph), gradient_indices(graph)
        numbers = {indices[place]: marker for place, marker in self._markers.items() if place in indices}
        grads = {number: returned[number] for number in numbers if isinstance(returned[number], fx.Node)}
        for number, grad in sorted(grads.items(), key=lambda item: item[1]):
            returned[number] = _reduced(grad, given[numbers[number].handle], numbers[number])
        nodes.output_of(graph).args = (returned,)


def _storages(returned: Sequence[Any]) -> set[int]:
    values = [dynamo_fake(node) for node in returned if isinstance(node, fx.Node)]
    return {fake_storage_key(value) for value in values if isinstance(value, Tensor)}


def _gather(shard: fx.Node, handle: fx.Node, marker: _Marker, before: fx.Node) -> None:
    value = meta.tensor_value(shard)
    with shard.graph.inserting_before(before):
        node = _call(shard.graph, torch.ops.zgraph.unshard.default, (shard, handle, *marker.arguments), "unshard")
    shard.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    meta.set_value(node, value)
    meta.set_value(shard, marker.like_shard(value))
    meta.copy_origin(node, marker.origin)


def _reduced(grad: fx.Node, handle: fx.Node, marker: _Marker) -> fx.Node:
    _, _, *policy = marker.arguments  # without shape and dtype of the parameter
    arguments = (grad, handle, marker.shard.dtype, *policy)
    after = grad if grad.op != "placeholder" else nodes.output_of(grad.graph).prev
    with grad.graph.inserting_after(after):
        node = _call(grad.graph, torch.ops.zgraph.reduce_grad.default, arguments, "reduce_grad")
    meta.set_value(node, marker.like_shard(meta.tensor_value(grad)))
    meta.copy_origin(node, marker.origin)
    belongs_to_backward(node)
    return node


def _call(graph: fx.Graph, operator: Any, arguments: tuple[Any, ...], name: str) -> fx.Node:
    return graph.create_node("call_function", operator, arguments, name=name)
