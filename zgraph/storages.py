"""The storages a graph allocates: how many bytes each, and between which nodes it is alive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zgraph import meta, nodes
from zgraph.ops import payload_bytes
from zgraph.torch_compat import hint_of, returns_alias

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
        nbytes: its size.
        first: the node that allocates it; an input of the graph that dies inside is there from the beginning.
        readers: nodes that read it, through views as well; it is released behind the last of them.
        outlives: whether the graph's caller holds it, so that it is not released at all.
    """

    nbytes: int
    first: fx.Node
    readers: tuple[fx.Node, ...]
    outlives: bool = False


def storages_of(order: Iterable[fx.Node], *, inputs_die: bool = False) -> list[Storage]:
    """Every storage that the nodes allocate, views counted as what they look at.

    A collective in flight holds what it reads up to its wait, and fills its result from its start on.

    Args:
        order: all nodes of a graph.
        inputs_die: whether inputs that no parameter's communication reads end with their last reader, as what
            forward has saved does in backward. All others are held elsewhere and not counted.
    """
    order = list(order)
    behind: dict[fx.Node, list[_Open]] = {}  # what a value lies in; several where it is a tuple
    found: list[_Open] = []
    for node in order:
        sources = [storage for source in node.all_input_nodes for storage in behind.get(source, [])]
        for storage in sources:
            storage.readers[node] = None
        if node.op == "output":
            for storage in sources:
                storage.outlives = True
            continue
        if nodes.is_wait(node):
            for storage in _held_in_flight(node, behind):
                storage.readers[node] = None
        if _is_view(node):
            behind[node] = _part(node, behind.get(node.all_input_nodes[0], []))
        elif node.op == "call_function" or (node.op == "placeholder" and inputs_die and not _feeds_parameter(node)):
            behind[node] = [_Open(size, node) for size in _sizes(meta.value(node))]
            found += behind[node]
    return [Storage(each.nbytes, each.first, tuple(each.readers), each.outlives) for each in found if each.nbytes]


def rows_of_its_own(order: Iterable[fx.Node]) -> list[fx.Node]:
    """Copies of this rank's rows on their way into a gather.

    Ranks hold different numbers of rows, and pad them or not. What they have packed, or send, is alike again.
    """
    found: dict[fx.Node, None] = {}
    for start in order:
        if _gathers_parameters(start):
            copies = nodes.copy_in(start) or []
            packed = dict.fromkeys(node for node in copies if node.target is aten.cat.default)
            found |= dict.fromkeys(node for node in copies if node not in packed)
    return list(found)


def agreed_storages(order: Sequence[fx.Node], own: Sequence[fx.Node], *, inputs_die: bool) -> list[Storage]:
    """What a graph allocates, as all ranks count it: of own rows the chunk that a gather sends, copied or not."""
    left_out = set(own)
    found = [one for one in storages_of(order, inputs_die=inputs_die) if one.first not in left_out]
    for start in order:
        for sent in nodes.sent_by(start) if _gathers_parameters(start) else ():
            if sent in left_out or sent.op == "placeholder":
                chunk = meta.tensor_value(sent)
                found.append(Storage(payload_bytes(chunk.shape, chunk.dtype), start, tuple(nodes.waits_of(start))))
    return found


def _gathers_parameters(node: fx.Node) -> bool:
    return nodes.is_gather(node) and bool(meta.parameters(node)) and nodes.wait_of(node) is not None


class _Open:
    """A storage whose readers are still being collected."""

    def __init__(self, nbytes: int, first: fx.Node) -> None:
        self.nbytes = nbytes
        self.first = first
        self.readers: dict[fx.Node, None] = {}
        self.outlives = False


def _is_view(node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    # `_unsafe_view` and `wait_tensor` return what they were given, whatever their schemas say.
    return (
        nodes.is_getitem(node)
        or nodes.is_wait(node)
        or node.target is aten._unsafe_view.default
        or returns_alias(node.target)
    )


def _part(node: fx.Node, whole: list[_Open]) -> list[_Open]:
    """What a view looks at: of a tuple of tensors with a storage each, the one that is taken."""
    position = node.args[1] if nodes.is_getitem(node) else None
    return [whole[position]] if isinstance(position, int) and len(whole) > 1 else whole


def _held_in_flight(wait: fx.Node, behind: dict[fx.Node, list[_Open]]) -> list[_Open]:
    start = wait.all_input_nodes[0]
    if nodes.is_getitem(start):  # of a coalesced one
        start = start.all_input_nodes[0]
    return [storage for source in start.all_input_nodes for storage in behind.get(source, [])]


def _feeds_parameter(placeholder: fx.Node) -> bool:
    """Whether the input is a parameter's shard or handle, which the model holds."""
    return any(nodes.is_communication(user) for user in placeholder.users)


def _sizes(value: object) -> list[int]:
    if isinstance(value, Tensor):
        return [math.prod(hint_of(size) or 0 for size in value.shape) * value.dtype.itemsize]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [size for part in value for size in (_sizes(part) or [0])]
    return []
