"""The storages of a graph: how many bytes each, who makes it, who reads it; in which order nodes run plays no part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.analysis.workspace import remaining_bytes
from zgraph.graph import meta, nodes
from zgraph.runtime.chunks import payload_bytes
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.fake_values import fake_storage_key, hint_of
from zgraph.torch_compat.operators import OpOverload, alias_positions

# By their schema they return a view; they copy where they must, which the fake value tells.
_MAY_COPY = frozenset({"aten.reshape", "aten.contiguous", "aten.to", "aten.flatten", "aten.ravel"})


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation.

    Attributes:
        nbytes: its size.
        first: the node that allocates it, or the input that brings it.
        readers: nodes that read it, through views as well, or whose collective does; it is released behind the last.
        outlives: whether it is not released at all: it is returned, kept for a window, or an input that nobody reads.
        held: somebody else holds it, before, during and after; it costs nothing here.
    """

    nbytes: int
    first: fx.Node
    readers: tuple[fx.Node, ...]
    outlives: bool = False
    held: bool = False


def storages_of(order: Iterable[fx.Node], *, inputs_die: bool = False) -> list[Storage]:
    """Every storage that the nodes of a graph allocate, and none that somebody else holds.

    Args:
        order: all nodes of a graph.
        inputs_die: whether inputs that no parameter's communication reads end with their last reader, as what
            forward has saved does in backward. All others are held elsewhere.
    """
    order = list(order)
    inputs = [node for node in order if node.op == "placeholder"]
    found = Finder()
    found.enter(inputs, owned=frozenset(node for node in inputs if inputs_die and not _feeds_parameter(node)))
    found.run(order)
    for node in order:
        if node.op == "output":
            found.keep(node.all_input_nodes)
    return [storage for storage in found.storages() if storage.nbytes and not storage.held]


def rows_of_its_own(order: Iterable[fx.Node]) -> list[fx.Node]:
    """Copies of this rank's rows on their way into a gather.

    Ranks hold different numbers of rows, and pad them or not. What they have packed, or send, is alike again.
    """
    found: dict[fx.Node, None] = {}
    for start in order:
        if _gathers_parameters(start):
            copies = nodes.copy_in(start) or []
            packed = dict.fromkeys(node for node in copies if nodes.is_packing(node))
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


def _feeds_parameter(placeholder: fx.Node) -> bool:
    """Whether the input is a parameter's shard or handle, which the model holds."""
    return any(nodes.is_communication(user) or nodes.is_low_rank(user) for user in placeholder.users)


def _in_flight(started: fx.Node) -> list[fx.Node]:
    """What a collective reads until it is waited for."""
    start = cast(fx.Node, started.args[0]) if nodes.is_getitem(started) else started
    return start.all_input_nodes if nodes.is_start(start) else []


@dataclass(eq=False)
class _Open:
    """A storage whose readers are still being collected."""

    nbytes: int
    first: fx.Node
    held: bool
    readers: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    outlives: bool = False


class Finder:
    """Finds the storages of programs that follow one another, such as the graphs of a step.

    A value lies where the schema of its call says; else where its fake value shares a storage with an input's; else in
    a new one. A collective in flight holds what it reads up to its wait, and fills its result from its start on.

    Attributes:
        unknown: nodes whose size only the data will tell; they count as 0 bytes.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._found: list[_Open] = []
        # For each item of a node's value (a tensor is one item) the storages it lies in.
        self._places: dict[fx.Node, list[list[_Open]]] = {}
        self._aliases: dict[Any, tuple[int | None, ...]] = {}

    def enter(self, inputs: Iterable[fx.Node], owned: Collection[fx.Node] = ()) -> None:
        """The inputs of a graph, held by somebody else where not owned; those that view one storage share it."""
        known: dict[int, _Open] = {}
        for node in inputs:
            self._places[node] = self._placed(node, known, held=node not in owned)
            if not node.users:
                self.keep([node])

    def enter_backward(self, inputs: Iterable[fx.Node], saved: Sequence[Any]) -> None:
        """The inputs of a backward graph: sizes, then the tensors that forward has saved, then tangents."""
        tensors = iter([node for node in saved if isinstance(node, fx.Node) and isinstance(meta.value(node), Tensor)])
        known: dict[int, _Open] = {}
        for node in inputs:
            source = next(tensors, None) if isinstance(meta.value(node), Tensor) else None
            self._places[node] = self._placed(node, known, held=False) if source is None else self._places[source]
            if not node.users:
                self.keep([node])

    def run(self, order: Iterable[fx.Node]) -> None:
        """The calls of a graph, each behind its inputs."""
        for node in order:
            if node.op == "placeholder":
                continue
            for source in node.all_input_nodes:
                self._read(source, node)
            if nodes.is_getitem(node) and isinstance(meta.value(cast(fx.Node, node.args[0])), tuple | list):
                source, index = cast("tuple[fx.Node, int]", node.args)
                behind, value = iter(self._places[source][index]), meta.value(node)
                items = value if isinstance(value, tuple | list) else [value]
                self._places[node] = [[next(behind) for _ in _tensors(item)] for item in items]
            elif nodes.is_wait(node):
                started = cast(fx.Node, node.args[0])
                self._places[node] = self._places[started]  # which the fake values do not tell
                for source in _in_flight(started):
                    self._read(source, node)
            elif node.op != "output":
                self._call(node)

    def keep(self, values: Iterable[Any]) -> None:
        """Values that are not released."""
        for node in values:
            for storage in self._behind(node) if isinstance(node, fx.Node) else ():
                storage.outlives = True

    def is_held(self, node: fx.Node) -> bool:
        """Whether somebody else holds what a node yields, or it is not a tensor."""
        behind = self._behind(node)
        return not behind or any(storage.held for storage in behind)

    def lies_in(self) -> dict[fx.Node, tuple[int, ...]]:
        """Positions in `storages()` of each node met."""
        numbers = {storage: number for number, storage in enumerate(self._found)}
        return {node: tuple(numbers[storage] for storage in self._behind(node)) for node in self._places}

    def storages(self) -> list[Storage]:
        """All of them, held ones and empty ones included, in the order in which they were met."""
        return [Storage(one.nbytes, one.first, tuple(one.readers), one.outlives, one.held) for one in self._found]

    def _read(self, source: fx.Node, reader: fx.Node) -> None:
        for storage in self._behind(source):
            storage.readers[reader] = None

    def _call(self, node: fx.Node) -> None:
        known = {
            key: storage
            for source in node.all_input_nodes
            for key, storage in zip(_keys(meta.value(source)), self._behind(source), strict=True)
        }
        constant = node.op == "get_attr"  # the module holds it
        self._places[node] = self._placed(node, known, held=constant, shared=self._shared(node))
        if remaining := remaining_bytes(node):
            self._found.append(_Open(remaining, node, held=False, outlives=True))
        if nodes.is_kept_gather(node) and OPEN in node.args:
            self.keep([node])  # for the rest of the window
        if node.target is torch.ops.zgraph.add_difference.default and node.args[-1]:
            self.keep([node])  # for the next difference

    def _shared(self, node: fx.Node) -> Sequence[_Open | None]:
        """For each result of a call the storage that its schema says it lies in.

        The fake values alone do not tell: a pass may have given the node another input than it was traced with.
        """
        if node.target not in self._aliases:
            may_copy = isinstance(node.target, OpOverload) and str(node.target.overloadpacket) in _MAY_COPY
            self._aliases[node.target] = () if may_copy else alias_positions(node.target)
        shared: list[_Open | None] = []
        for position in self._aliases[node.target]:
            source = node.args[position] if position is not None and position < len(node.args) else None
            shared.append(self._behind(source)[0] if isinstance(source, fx.Node) else None)
        if node.target is torch.ops.aten._unsafe_view.default:  # whose schema does not say so
            return self._behind(node.all_input_nodes[0])[:1]
        return shared

    def _behind(self, node: fx.Node) -> list[_Open]:
        return [storage for item in self._places.get(node, ()) for storage in item]

    def _placed(
        self, node: fx.Node, known: dict[int, _Open], *, held: bool, shared: Sequence[_Open | None] = ()
    ) -> list[list[_Open]]:
        """Where a value lies: where its schema says, else in a storage known by its fake one, else in a new one."""
        value = meta.value(node)
        items = value if isinstance(value, tuple | list) else [value]
        if len(shared) == 1:  # one result, which may be a list of views
            shared = [shared[0]] * len(items)
        return [
            [
                (shared[number] if number < len(shared) else None) or self._find(node, tensor, known, held)
                for tensor in _tensors(item)
            ]
            for number, item in enumerate(items)
        ]

    def _find(self, node: fx.Node, value: Tensor, known: dict[int, _Open], held: bool) -> _Open:
        key = fake_storage_key(value)
        if key not in known:
            size = storage_bytes(value)
            if size is None:
                self.unknown.append(node.name)
            known[key] = _Open(size or 0, node, held)
            self._found.append(known[key])
        return known[key]


def storage_bytes(value: Tensor) -> int | None:
    """Bytes of the storage behind a fake tensor, by the hints of symbolic sizes; None where there is no hint."""
    if value.layout == torch.strided:
        return hint_of(value.untyped_storage().nbytes())
    numel = hint_of(value.numel())
    return None if numel is None else numel * value.dtype.itemsize


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    return []


def _keys(value: Any) -> list[int]:
    return [fake_storage_key(tensor) for tensor in _tensors(value)]
