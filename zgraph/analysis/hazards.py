"""Hazards: pairs of nodes that must keep their order because they access the same memory and one of them writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from zgraph.analysis.storages import Finder
from zgraph.graph import meta, nodes, traits
from zgraph.torch_compat.fake_values import fake_storage_key, hint_of
from zgraph.torch_compat.operators import written_arguments

Hazards = Mapping[fx.Node, Sequence[fx.Node]]
Region = tuple[int, float, float]  # number of the storage, first byte, byte after the last one
# Stands for all state outside the graph, such as a generator's.
OUTSIDE: Region = (-1, 0, 1)


def hazards(order: Sequence[fx.Node]) -> Hazards:
    """Return for each node the earlier nodes that must run before it, because they share memory and one of them writes.

    A wait counts as a reader of the tensors that its collective sends, which must not be overwritten before the wait.
    Parts of one storage, such as the gradients of a bucket, are distinguished by their byte ranges. Random operators,
    the model's own collectives, and low-rank operators of the same parameter also keep their order.

    Args:
        order: all nodes of a graph.

    Returns:
        For each node with such earlier nodes, a list of them. A node's inputs are left out, and so are earlier nodes
        whose order follows from another hazard.
    """
    writes = {node: given for node in order if (given := [*written_arguments(node), *nodes.low_rank_handles(node)])}
    regions = Regions(order if writes else ())
    # Most storages are never written: their readers are ordered by being users.
    changed = {storage for given in writes.values() for value in given for storage in regions.storages(value)}
    accesses: dict[int, list[_Access]] = {}
    before: dict[fx.Node, list[fx.Node]] = {}
    for node in order:
        if node.op in ("placeholder", "output"):
            continue
        written = regions.of(writes.get(node, ()))
        written |= {OUTSIDE} if _acts_outside(node) else set()
        read = set[Region]()
        if not _only_views(node):
            read = regions.of(one for one in node.all_input_nodes if not changed.isdisjoint(regions.storages(one)))
        if nodes.is_wait(node):
            read |= regions.of(nodes.start_of(node).all_input_nodes)
            # A copy's target is complete only after the wait.
            written |= regions.of(written_arguments(nodes.start_of(node)))
        if not (read or written):
            continue
        earlier: dict[fx.Node, None] = {}
        for region in sorted(read | written):
            access = _Access(node, region, region in written)
            known = accesses.setdefault(region[0], [])
            earlier |= dict.fromkeys(other.node for other in known if access.conflicts(other))
            if access.writes:
                known[:] = [other for other in known if not access.covers(other)]
            known.append(access)
        inputs = {node, *node.all_input_nodes}
        if wanted := [one for one in earlier if one not in inputs]:
            before[node] = wanted
    return before


@dataclass(frozen=True, slots=True)
class _Access:
    node: fx.Node
    region: Region
    writes: bool

    def conflicts(self, other: _Access) -> bool:
        return (self.writes or other.writes) and _overlap(self.region, other.region)

    def covers(self, other: _Access) -> bool:
        return self.region[1] <= other.region[1] and other.region[2] <= self.region[2]


class Regions:
    """The byte ranges of storages that the values of a graph's nodes occupy.

    Args:
        order: all nodes of the graph.
    """

    def __init__(self, order: Sequence[fx.Node]) -> None:
        found = Finder()
        found.enter([node for node in order if node.op == "placeholder"])
        found.run(order)
        self._lies_in = found.lies_in()
        self._storages = found.storages()
        self._known: dict[fx.Node, tuple[Region, ...]] = {}

    def storages(self, value: fx.Node) -> tuple[int, ...]:
        """Return the numbers of a value's storages; empty for values that are not tensors."""
        return self._lies_in.get(value, ())

    def of(self, values: Iterable[fx.Node]) -> set[Region]:
        """Return the byte ranges of values; empty for values that are not tensors."""
        return {region for value in values for region in self._regions_of(value)}

    def _regions_of(self, value: fx.Node) -> tuple[Region, ...]:
        known = self._known.get(value)
        if known is None:
            known = tuple((number, *self._extent(value, number)) for number in self.storages(value))
            self._known[value] = known
        return known

    def overlap(self, value: fx.Node, others: Iterable[fx.Node]) -> bool:
        """Return whether `value` shares memory with any of `others`."""
        theirs = self.of(others)
        return any(_overlap(one, other) for one in self.of([value]) for other in theirs)

    def _extent(self, node: fx.Node, number: int) -> tuple[float, float]:
        """Return the byte range of a value in its storage, as (first byte, end); (0, inf) if unknown."""
        whole = meta.value(self._storages[number].first)
        # A pass may have replaced the input from which a view's fake value was made; the view lies within the new one.
        while not _share_storage(meta.value(node), whole) and _lies_in_its_input(node):
            node = node.all_input_nodes[0]
        value = meta.value(node)
        if not _share_storage(value, whole) or 0 in value.shape:
            return 0, float("inf")
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        begin, length = hint_of(value.storage_offset()), hint_of(last)
        if begin is None or length is None:
            return 0, float("inf")
        return begin * value.itemsize, (begin + length + 1) * value.itemsize


def _overlap(one: Region, other: Region) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def _share_storage(value: object, other: object) -> bool:
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return False
    return fake_storage_key(value) == fake_storage_key(other)


def _only_views(node: fx.Node) -> bool:
    """Return whether a node reads no memory, because it only makes a view or selects one of several results."""
    return _lies_in_its_input(node) and not written_arguments(node)


def _lies_in_its_input(node: fx.Node) -> bool:
    return nodes.is_getitem(node) or (traits.is_view(node) and not traits.of(node).may_copy)


def _acts_outside(node: fx.Node) -> bool:
    return traits.is_random(node) or (nodes.is_collective(node) and not meta.parameters(node))
