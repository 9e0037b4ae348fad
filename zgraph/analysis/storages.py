"""The storages of a graph: their sizes, and the nodes that allocate and read them, in any node order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.analysis.workspace import remaining_bytes
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.graph.operator_arguments import ReduceArgs
from zgraph.runtime.chunks import payload_bytes
from zgraph.tiers.tier import DEVICE, HOST, Tier
from zgraph.torch_compat.fake_values import fake_storage_key, hint_of


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation of memory.

    Attributes:
        nbytes: size in bytes.
        first: node that allocates the memory, or input that passes it in.
        readers: nodes that read the memory, directly, through views or by a collective. It is freed after the last one.
        outlives: whether the memory is never freed, because it is returned, kept for a `no_sync` window, or an unread
            input.
        held: whether the memory is also held outside of the program, and so does not count here.
        space: memory space of the allocation; budgets limit device memory.
    """

    nbytes: int
    first: fx.Node
    readers: tuple[fx.Node, ...]
    outlives: bool = False
    held: bool = False
    space: Tier = DEVICE


def storages_of(order: Iterable[fx.Node], *, inputs_die: bool = False, agreed: bool = False) -> list[Storage]:
    """Return all storages that a graph allocates, without those held outside of the graph.

    Args:
        order: all nodes of a graph.
        inputs_die: whether `mortal_inputs` are freed after their last reader, as in backward. All other inputs are held
            outside of the graph.
        agreed: count bytes equally on all ranks, as `as_all_ranks_count` does. False: count for this rank.
    """
    order = list(order)
    found = Finder()
    found.enter([node for node in order if node.op == "placeholder"], owned=mortal_inputs(order) if inputs_die else ())
    found.run(order)
    for node in order:
        if node.op == "output":
            found.keep(node.all_input_nodes)
    storages = as_all_ranks_count(found.storages(), order) if agreed else found.storages()
    return [storage for storage in storages if storage.nbytes and not storage.held]


def mortal_inputs(order: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the inputs that a backward graph frees: all but shards and handles of parameters."""
    return frozenset(
        node
        for node in order
        if node.op == "placeholder"
        and not any(nodes.is_communication(user) or nodes.is_low_rank(user) for user in node.users)
    )


def rows_of_its_own(order: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the copies of this rank's rows that feed a gather.

    The sizes of these copies differ between ranks, because ranks have different numbers of rows and may pad them.
    Tensors packed from the copies, and tensors that are sent, have the same sizes on all ranks.
    """
    gathers = filter(_gathers_parameters, order)
    return list(dict.fromkeys(node for start in gathers for node in _own_copies(start)))


def as_all_ranks_count(storages: Sequence[Storage], order: Iterable[fx.Node]) -> list[Storage]:
    """Change the sizes of storages to the maximum over all ranks, so that all ranks make the same plan.

    If ranks have different numbers of a parameter's rows, the copies of these rows for a gather count 0. Instead, the
    chunk that each rank sends counts, because chunks are equally long on all ranks. A chunk counts while the gather is
    in flight or, if chunks are packed into one buffer, during the packing. Rows copied back from the host for a gather
    count until the chunk is made. A reduced gradient counts with its largest size on any rank.

    Returns:
        The given storages in their order, some with other sizes or readers, followed by a storage for each chunk.
    """
    uncounted: dict[fx.Node, None] = {}
    made_by: dict[fx.Node, fx.Node] = {}  # for nodes that read a chunk's rows on some rank: its maker on all ranks
    chunks: list[Storage] = []
    for start in filter(_gathers_parameters, order):
        copies = dataflow.copy_in(start)
        even = all(chunk.is_even for chunk in meta.chunks(start))
        if copies is None or even or nodes.is_quantized_gather(start):  # a quantized gather reads the rows in place
            continue
        own = _own_copies(start)
        uncounted |= dict.fromkeys(own)
        packed = next((node for node in copies if node.target is torch.ops.aten.cat.default), None)
        made_by |= dict.fromkeys([*own, start, *nodes.waits_of(start)], packed or start)
        sent = [node for node in nodes.sent_by(start) if node is packed or not traits.is_packing(node)]
        values = [meta.tensor_value(node) for node in sent]
        nbytes = sum(payload_bytes(value.shape, value.dtype) for value in values)
        waits = () if packed is not None else tuple(nodes.waits_of(start))
        chunks.append(Storage(nbytes, packed or start, waits))
    found = [replace(one, nbytes=0 if one.first in uncounted else _longest_bytes(one)) for one in storages]
    return [_until_made(one, made_by) if nodes.is_reload(one.first) else one for one in found] + chunks


def _until_made(rows: Storage, made_by: Mapping[fx.Node, fx.Node]) -> Storage:
    """Let rows copied back from the host live until the chunk to send has been made from them."""
    return replace(rows, readers=tuple(dict.fromkeys(made_by.get(node, node) for node in rows.readers)))


def _own_copies(start: fx.Node) -> list[fx.Node]:
    return [node for node in dataflow.copy_in(start) or [] if not traits.is_packing(node)]


def _longest_bytes(storage: Storage) -> int:
    """Return the size of a storage; for a shard, its state or a reduced gradient, the largest size on any rank."""
    node = storage.first
    longest = meta.longest_bytes(node)
    if longest is not None:
        return longest
    if not nodes.is_reduce_grad(node) or not (args := ReduceArgs.of(node)).layout.is_sharded:
        return storage.nbytes
    shape = tuple(hint_of(size) or 0 for size in args.layout.shape)
    return replace(args.layout, shape=shape).grad_chunk.numel() * args.dtype.itemsize


def _gathers_parameters(node: fx.Node) -> bool:
    return nodes.is_gather(node) and bool(meta.parameters(node)) and nodes.wait_of(node) is not None


def _in_flight(started: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a collective reads until its wait."""
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
    device_type: str = ""


class Finder:
    """Finds the storages of consecutive programs, such as the graphs of a step.

    A value shares the storage of an argument if the call's schema says so, or if the fake values of both share a
    storage. Otherwise the value has a new storage. A collective reads its inputs until its wait, and its result is
    allocated at its start.

    Attributes:
        unknown: names of nodes whose results have a size that depends on data; these results count as 0 bytes.
    """

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._found: list[_Open] = []
        # For each item of a node's value (a tensor is one item), the storages of its tensors.
        self._places: dict[fx.Node, list[list[_Open]]] = {}
        # For each tensor the key of its fake value's storage, cached because it is slow to compute.
        self._keys: dict[fx.Node, list[int]] = {}
        self._aliases: dict[Any, tuple[int | None, ...]] = {}

    def enter(self, inputs: Iterable[fx.Node], owned: Collection[fx.Node] = ()) -> None:
        """Add the inputs of a graph.

        Inputs not in `owned` are held outside of the program. Inputs that share a storage count once.
        """
        known: dict[int, _Open] = {}
        for node in inputs:
            self._places[node] = self._placed(node, known, held=node not in owned)
            if not node.users:
                self.keep([node])

    def enter_backward(self, inputs: Iterable[fx.Node], saved: Sequence[Any]) -> None:
        """Add the inputs of a backward graph: sizes, the tensors `saved` by forward, and gradients of outputs."""
        tensors = iter([node for node in saved if isinstance(node, fx.Node) and isinstance(meta.value(node), Tensor)])
        known: dict[int, _Open] = {}
        for node in inputs:
            source = next(tensors, None) if isinstance(meta.value(node), Tensor) else None
            self._places[node] = self._placed(node, known, held=False) if source is None else self._places[source]
            if not node.users:
                self.keep([node])

    def run(self, order: Iterable[fx.Node]) -> None:
        """Add the calls of a graph, given in an order in which each call comes after its inputs."""
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
                self._places[node] = self._places[started]  # fake values do not show this aliasing
                for source in _in_flight(started):
                    self._read(source, node)
            elif node.op != "output":
                self._call(node)

    def keep(self, values: Iterable[Any]) -> None:
        """Mark values as never freed."""
        for node in values:
            for storage in self._storages_of(node) if isinstance(node, fx.Node) else ():
                storage.outlives = True

    def is_held(self, node: fx.Node) -> bool:
        """Return whether a node's value is held outside of the program, or is not a tensor."""
        behind = self._storages_of(node)
        return not behind or any(storage.held for storage in behind)

    def lies_in(self) -> dict[fx.Node, tuple[int, ...]]:
        """Return for each node seen so far the indices of its value's storages in `storages()`."""
        numbers = {storage: number for number, storage in enumerate(self._found)}
        return {node: tuple(numbers[storage] for storage in self._storages_of(node)) for node in self._places}

    def storages(self) -> list[Storage]:
        """Return all storages, including held and empty ones, in the order in which they were found."""
        has_accelerator = any(one.device_type not in ("cpu", "") for one in self._found)
        return [
            Storage(
                *(one.nbytes, one.first, tuple(one.readers), one.outlives, one.held),
                space=_copied_to(one.first) or (HOST if has_accelerator and one.device_type == "cpu" else DEVICE),
            )
            for one in self._found
        ]

    def _read(self, source: fx.Node, reader: fx.Node) -> None:
        for storage in self._storages_of(source):
            storage.readers[reader] = None

    def _call(self, node: fx.Node) -> None:
        known = {
            key: storage
            for source in node.all_input_nodes
            for key, storage in zip(self._keys_of(source), self._storages_of(source), strict=True)
        }
        held = node.op == "get_attr" or meta.is_tagged_at_rest(node)  # held by the module, or by the optimizer
        self._places[node] = self._placed(node, known, held=held, shared=self._shared(node))
        if remaining := remaining_bytes(node):
            self._found.append(_Open(remaining, node, held=False, outlives=True))
        if traits.outlives_graph(node):
            self.keep([node])

    def _shared(self, node: fx.Node) -> Sequence[_Open | None]:
        """Return for each result of a call the storage shared with an argument according to the schema, or None.

        Fake values are not enough, because a pass may have replaced the input with which the node was traced.
        """
        if node.target not in self._aliases:
            self._aliases[node.target] = traits.shared_arguments(node)
        shared: list[_Open | None] = []
        for position in self._aliases[node.target]:
            source = node.args[position] if position is not None and position < len(node.args) else None
            shared.append(self._storages_of(source)[0] if isinstance(source, fx.Node) else None)
        return shared

    def _keys_of(self, node: fx.Node) -> list[int]:
        keys = self._keys.get(node)
        if keys is None:
            keys = self._keys[node] = [fake_storage_key(tensor) for tensor in _tensors(meta.value(node))]
        return keys

    def _storages_of(self, node: fx.Node) -> list[_Open]:
        return [storage for item in self._places.get(node, ()) for storage in item]

    def _placed(
        self, node: fx.Node, known: dict[int, _Open], *, held: bool, shared: Sequence[_Open | None] = ()
    ) -> list[list[_Open]]:
        """Return the storages of a value: given by `shared`, found in `known` by its fake value, or new."""
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
            known[key] = _Open(size or 0, node, held, device_type=value.device.type)
            self._found.append(known[key])
        return known[key]


def _copied_to(node: fx.Node) -> Tier | None:
    """Return the memory space of a node's value, if one is recorded or the node is a copy; otherwise None."""
    transit = meta.transit(node)
    if transit is None or meta.space(node) is not None:
        return meta.space(node)
    return DEVICE if transit.to_device else transit.tier


def storage_bytes(value: Tensor) -> int | None:
    """Return the bytes of a fake tensor's storage, with hints for symbolic sizes; None if a size has no hint."""
    if value.layout == torch.strided:
        return hint_of(value.untyped_storage().nbytes())
    numel = hint_of(value.numel())
    return None if numel is None else numel * value.dtype.itemsize


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, which may be nested lists or tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in cast("Sequence[Any]", value) for tensor in _tensors(item)]
    return []
