"""Finds the updates in a whole training step: all computation on reduced gradients, from clipping to the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from zgraph.analysis.hazards import hazards
from zgraph.graph import meta, nodes, traits
from zgraph.runtime.chunks import MIB, payload_bytes

aten = torch.ops.aten

# Bytes of gradients that are updated together if nothing is reduced. On a CPU, or with state on the host or on disk, a
# small update frees or copies memory early and costs nothing. A fused update on a GPU gives 2**16 elements to a block:
# with less, most of its processors idle, and small updates cut the compute between them into many islands.
BUCKET_BYTES = 2 * MIB
GPU_BUCKET_BYTES = 128 * MIB


@dataclass(frozen=True)
class Updates:
    """Nodes of a training step's updates, and when the gradients they need arrive.

    Attributes:
        reading: nodes that depend on a reduced gradient, through their inputs or through earlier writes.
        preparing: nodes that use only graph inputs and serve only `reading` nodes, such as the next step count.
        before: for each node of the graph, the nodes that must precede it, besides its inputs.
        arrival: for each node that depends on reductions, the position where the last of these reductions starts. On a
            single rank nothing is reduced; gradients then count as arriving in buckets.
    """

    reading: Mapping[fx.Node, None]
    preparing: Mapping[fx.Node, None]
    before: Mapping[fx.Node, Sequence[fx.Node]]
    arrival: Mapping[fx.Node, int]

    @classmethod
    def of(cls, order: Sequence[fx.Node]) -> Updates:
        before = dict(hazards(order))
        for wait, start in _started_before(order):
            before[wait] = [*before.get(wait, ()), start]
        alone = _arrivals_alone(order)
        arrival: dict[fx.Node, int] = {}
        reading: dict[fx.Node, None] = {}
        for position, node in enumerate(order):
            reductions = [arrival[source] for source in node.all_input_nodes if source in arrival]
            if carries_parameter(node):
                if nodes.is_start(node) and (reductions or nodes.is_exchange(node)):
                    arrival[node] = position
                elif reductions:
                    arrival[node] = max(reductions)
                elif node in alone:
                    arrival[node] = alone[node]
            elif node.op != "output":
                reductions += [arrival[source] for source in before.get(node, ()) if source in reading]
                if reductions:
                    arrival[node] = max(reductions)
                    reading[node] = None
        return cls(reading, _preparing(order, before, reading), before, arrival)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self.reading or node in self.preparing

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """Return all nodes that must precede a node."""
        return [*node.all_input_nodes, *self.before.get(node, ())]

    def may_come_last(self, order: Iterable[fx.Node]) -> bool:
        """Return whether all updates may move to the end of the step, because no other node depends on them."""
        others = (node for node in order if node not in self and node.op != "output")
        return not any(source in self for node in others for source in self.needs(node))

    def homes(self) -> dict[fx.Node, int]:
        """Map each parameter's values, such as Adam moments, to where the reduction of the parameter's gradient starts.

        Values belong to the same parameter if they have the same index in the lists of a call such as `_foreach_mul_`,
        or if one is computed from the other and neither is a scalar.
        """
        family = _Families()
        for node in [*self.reading, *self.preparing]:
            lists = lists_of(node)
            results = {user.args[1]: user for user in node.users if nodes.is_getitem(user)}
            for place in range(len(lists[0]) if lists else 0):
                family.unite([*(members[place] for members in lists), results.get(place)])
            if not lists and _is_of_one_parameter(node):
                family.unite([node, *filter(_has_elements, node.all_input_nodes)])
        found: dict[fx.Node, int] = {}
        for node in family.members():
            if node in self.arrival and node not in self.reading:
                root = family.root(node)
                found[root] = max(found.get(root, -1), self.arrival[node])
        return {node: found[family.root(node)] for node in family.members() if family.root(node) in found}


def carries_parameter(node: fx.Node) -> bool:
    """Return whether a node belongs to the communication of a parameter or its gradient."""
    return nodes.is_communication(node) and bool(meta.parameters(node))


def _started_before(order: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each wait for a collective of the step's own lines, with the last such collective that starts before it.

    A wait that was placed after the start of another collective, to overlap them, stays after it.
    """
    last: fx.Node | None = None
    own = (node for node in order if node.op == "call_function" and not meta.parameters(node))
    for node in own:
        if nodes.is_collective(node):
            last = node
        elif last is not None and nodes.is_wait(node):
            start = nodes.start_of(node)
            if start is not last and nodes.is_collective(start) and not meta.parameters(start):
                yield node, last


def _arrivals_alone(order: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Map each gradient that is not reduced (on a single rank) to the position of the last gradient of its bucket."""
    found: dict[fx.Node, int] = {}
    bucket: dict[fx.Node, None] = {}
    held = 0
    rests = any(meta.space(node) is not None for node in order if node.op == "placeholder")
    for position, node in enumerate(order):
        if node.target not in (aten.alias.default, aten.clone.default) or not carries_parameter(node):
            continue
        source = node.all_input_nodes[0]
        is_computed = not nodes.is_communication(source) or traits.cast_dtype(source) is not None
        if not is_computed or any(map(nodes.is_communication, node.users)):
            continue
        bucket[node] = None
        gradient = meta.tensor_value(node)
        held += payload_bytes(gradient.shape, gradient.dtype)
        found |= dict.fromkeys(bucket, position)
        if held >= (BUCKET_BYTES if rests or gradient.device.type == "cpu" else GPU_BUCKET_BYTES):
            bucket, held = {}, 0
    return found


def lists_of(node: fx.Node) -> list[Sequence[object]]:
    """Return the list arguments, all of equal length, of a call over many tensors, such as `_fused_adamw_`.

    The result is empty for other calls.
    """
    if not traits.is_over_lists(node):
        return []
    given = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, list | tuple)]
    return [cast("Sequence[object]", argument) for argument in given if argument]


def split_call(node: fx.Node, groups: Sequence[Sequence[int]]) -> list[fx.Node]:
    """Replace a call over lists of tensors with one call for each group of list indices; return the calls."""
    if len(groups) < 2:
        return [node]
    pieces: list[fx.Node] = []
    results = {cast(int, user.args[1]): user for user in node.users}
    value = meta.value(node)
    with node.graph.inserting_before(node):
        for places in groups:
            piece = node.graph.create_node(
                "call_function",
                cast(Any, node.target),
                tuple(_at(argument, places) for argument in node.args),
                {name: _at(argument, places) for name, argument in node.kwargs.items()},
                name=node.name,
            )
            piece.meta = dict(node.meta)
            pieces.append(piece)
            if isinstance(value, list | tuple):
                meta.set_value(piece, _at(value, places))
            for number, place in enumerate(places):
                if place in results:
                    results[place].args = (piece, number)
    node.graph.erase_node(node)
    return pieces


def _at(argument: Any, places: Sequence[int]) -> Any:
    """Return the elements of a list at the given indices; return any other argument unchanged."""
    if not isinstance(argument, list | tuple) or not argument:
        return argument
    return type(argument)(argument[place] for place in places)


def _preparing(
    order: Sequence[fx.Node], before: Mapping[fx.Node, Sequence[fx.Node]], reading: Mapping[fx.Node, None]
) -> dict[fx.Node, None]:
    from_inputs: dict[fx.Node, None] = {}
    for node in order:
        is_input = node.op in ("placeholder", "get_attr")
        if is_input or (
            node.op == "call_function"
            and not nodes.is_communication(node)
            and not nodes.is_marker(node)
            and not traits.is_random(node)
            and all(source in from_inputs for source in node.all_input_nodes)
        ):
            from_inputs[node] = None
    followers: dict[fx.Node, list[fx.Node]] = {}
    for node, earlier in before.items():
        for one in earlier:
            followers.setdefault(one, []).append(node)
    found: dict[fx.Node, None] = {}
    for node in reversed(order):
        if node in from_inputs and node.op not in ("placeholder", "get_attr"):
            # An optimizer's new state is also returned, so the output does not count as a reader.
            later = [one for one in (*node.users, *followers.get(node, ())) if one.op != "output"]
            if later and all(one in reading or one in found for one in later):
                found[node] = None
    return dict.fromkeys(node for node in order if node in found)


def _is_of_one_parameter(node: fx.Node) -> bool:
    """Return whether a call computes a tensor of a single parameter: not a scalar, and without lists of tensors."""
    packs = any(isinstance(argument, list | tuple) and _nodes_in(argument) for argument in node.args)
    return _has_elements(node) and not packs


def _nodes_in(values: Iterable[object]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _has_elements(node: fx.Node) -> bool:
    value = meta.value(node)
    return isinstance(value, torch.Tensor) and value.ndim > 0


class _Families:
    """Sets of values that belong to the same parameter, as a union-find structure."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def unite(self, values: Iterable[object]) -> None:
        found = _nodes_in(values)
        for node in found:
            self._parent.setdefault(node, node)
        for node in found[1:]:
            self._parent[self.root(node)] = self.root(found[0])

    def root(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def members(self) -> list[fx.Node]:
        return list(self._parent)
