"""Visits: the periods of a step in which an offloaded input has a copy on the device."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from zgraph.analysis.liveness import Placements
from zgraph.analysis.storages import storage_bytes
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.passes.common.updates import Updates, lists_of
from zgraph.tiers.tier import is_offloaded
from zgraph.torch_compat.operators import is_fused_update, overwritten, written_arguments


@dataclass(eq=False)
class Visit:
    """A period of a step in which one offloaded input has a copy on the device.

    Attributes:
        resting: the offloaded input.
        aliases: values in the input's storage, each mapped to the value from which it was made.
        uses: nodes that read or write these values, in order; views are left out.
        is_update: whether the uses belong to an optimizer update.
        last_write: the last use that writes. None: no use writes, so the copy on the device is dropped.
        is_first: whether no earlier visit has stored to the input.
        previous: the previous visit of the same input, or None.
        reload, ready: start of the copy to the device, and the wait for this copy; None until built.
        store: start of the copy back; None until built.
        copies: maps each alias to the value that replaces it while the copy on the device is used.
    """

    resting: fx.Node
    aliases: Mapping[fx.Node, fx.Node]
    uses: list[fx.Node]
    is_update: bool = False
    last_write: fx.Node | None = None
    is_first: bool = True
    previous: Visit | None = None
    reload: fx.Node | None = None
    ready: fx.Node | None = None
    store: fx.Node | None = None
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict["fx.Node", "fx.Node"])


def plan_split(update: fx.Node, most_bytes: int) -> list[list[int]]:
    """Group the list indices of a fused update so that each group has at most `most_bytes` of offloaded tensors.

    Each group has at least one parameter. All ranks form the same groups.
    """
    groups: list[list[int]] = []
    held = 0
    for place, members in enumerate(zip(*lists_of(update), strict=True) if is_fused(update) else ()):
        resting = [one for one in members if isinstance(one, fx.Node) and is_offloaded(meta.space(one))]
        size = sum(map(most_bytes_of, resting))
        if not groups or (held and held + size > most_bytes):
            groups.append([])
            held = 0
        groups[-1].append(place)
        held += size
    return groups


def plan_visits(order: Sequence[fx.Node], placed: Placements, apart: Container[fx.Node] = ()) -> list[Visit]:
    """Return the visits of all offloaded inputs, in the order of their first uses.

    A visit (a period on the device) serves consecutive uses of one kind (gathers, other reads or updates) in one
    forward or backward. Uses in `apart` do not share a visit with other uses.
    """
    resting = [
        node
        for node in order
        if node.op == "placeholder" and is_offloaded(meta.space(node)) and placed.lies_in.get(node)
    ]
    if not resting:
        return []
    owners = {placed.lies_in[node][0]: node for node in resting}
    aliases = {node: {node: node} for node in resting}
    for node in order:
        for owner in dict.fromkeys(owners[number] for number in placed.lies_in.get(node, ()) if number in owners):
            known = aliases[owner]
            sources = [source for source in [*written_arguments(node), *node.all_input_nodes] if source in known]
            known.setdefault(node, sources[0] if sources else node)
    updates = _updates(order, {alias for known in aliases.values() for alias in known})
    position = {node: place for place, node in enumerate(order)}
    begins = position | _gathers_of_copies(order, position)
    visits = [visit for node in resting for visit in _visits_of(node, aliases[node], updates, apart)]

    def place(visit: Visit) -> tuple[int, int]:
        first = visit.uses[0]
        return begins[first], position[visit.resting]

    return sorted(visits, key=place)


def is_computing(node: fx.Node) -> bool:
    """Return whether a node computes; False for inputs, copies and views."""
    return node.op == "call_function" and not (nodes.is_communication(node) or traits.is_free(node))


def _gathers_of_copies(order: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Map each copy of local rows to the position of the gather that sends the copy.

    Only ranks that must pad their rows have such copies; all ranks have the gather.
    """
    found: dict[fx.Node, int] = {}
    for start in order:
        if nodes.is_gather(start) and meta.parameters(start):
            for copy in dataflow.copy_in(start) or ():
                found.setdefault(copy, position[start])
    return found


def _updates(order: Sequence[fx.Node], resting: Container[fx.Node]) -> Container[fx.Node]:
    """Return the updates: nodes that depend on reduced gradients or, without any, all nodes from the first write on."""
    found = Updates.of(order)
    if found.reading:
        return found
    writes = (place for place, node in enumerate(order) if any(one in resting for one in written_arguments(node)))
    return frozenset(order[next(writes, len(order)) :])


def _visits_of(
    resting: fx.Node, aliases: Mapping[fx.Node, fx.Node], updates: Container[fx.Node], apart: Container[fx.Node]
) -> Iterator[Visit]:
    users = dict.fromkeys(user for alias in aliases for user in alias.users)
    uses = sorted(user for user in users if user.op == "call_function" and not _moves(user, aliases))
    known: Hashable = None
    visit: Visit | None = None
    stored = False
    for use in uses:
        writes = any(argument in aliases for argument in overwritten(use))
        kind = (meta.part(use), "gather" if _carries(use) else "update" if use in updates else "read", use in apart)
        if visit is None or kind != known:
            if visit is not None:
                yield visit
                stored = stored or visit.last_write is not None
            visit, known = Visit(resting, aliases, [], kind[1] == "update", is_first=not stored, previous=visit), kind
        visit.uses.append(use)
        if writes:
            visit.last_write = use
    if visit is not None:
        yield visit


def _carries(node: fx.Node) -> bool:
    return nodes.is_communication(node) and bool(meta.parameters(node))


def _moves(node: fx.Node, aliases: Mapping[fx.Node, fx.Node]) -> bool:
    """Return whether a node only makes a view of an offloaded input, or copies between memory spaces."""
    return (node in aliases and not written_arguments(node)) or nodes.is_copy_start(node)


def bytes_of(node: fx.Node) -> int:
    return storage_bytes(meta.tensor_value(node)) or 0


def most_bytes_of(node: fx.Node) -> int:
    """Return the bytes of an offloaded tensor on the rank with the most rows of it."""
    return meta.longest_bytes(node) or bytes_of(node)


def is_fused(node: fx.Node) -> bool:
    return is_fused_update(node.target)
