"""A model of a training step that trades memory for time: what forward saves, and what backward recomputes.

forward   a b c d           saves a, c        costs the bytes of c from its last reader here to its first one there
backward      D  C b B A                      costs the time of b, recomputed from a just before it is read
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.hardware import Link
from zgraph.analysis.liveness import LiveRanges, placements
from zgraph.analysis.storages import Storage
from zgraph.graph import meta, nodes, traits
from zgraph.graph.lanes import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Lane
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.aot import is_tangent, mutated_inputs
from zgraph.torch_compat.operators import written_arguments


@dataclass(frozen=True, eq=False)
class Value:
    """A storage that forward can save for backward.

    Attributes:
        nodes: nodes that forward returns if the value is saved: one, or several that share the storage.
        gather: the gather, if the value is a gathered parameter.
    """

    nodes: tuple[fx.Node, ...]
    gather: fx.Node | None = None

    @property
    def name(self) -> str:
        return ", ".join(meta.parameters(self.gather)) if self.gather is not None else self.nodes[0].name


@dataclass(frozen=True, eq=False)
class StepEstimate:
    """Predicted memory and time of a step for one choice of saved values.

    Attributes:
        dropped: values that are not saved, so that backward recomputes them.
        offloaded: values that are copied to the host in forward, and back in backward.
        saved: nodes that forward saves, in addition to its inputs.
        recomputed: nodes that backward recomputes, in the order in which it does.
        bytes_during: bytes alive during each call, those of forward before those of backward.
        lane_us: how long each lane is busy.
        step_us: lower bound on the time of the step, see `Model`.
        gaps: for each value, the positions between its last use in forward and its first in backward, at which it
            takes memory only because it is saved.
        anchors: of a whole step, the node of backward before which each of `recomputed` runs again.
        clock_us: compute done before each call, and in all.
    """

    dropped: Mapping[Value, None]
    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    bytes_during: Sequence[int]
    lane_us: Mapping[Lane, float]
    step_us: float
    gaps: Mapping[Value, range]
    anchors: tuple[fx.Node, ...] = ()
    offloaded: Mapping[Value, None] = field(default_factory=dict[Value, None])
    clock_us: Sequence[float] = ()

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)

    @property
    def busy_us(self) -> float:
        return sum(self.lane_us.values())


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """What offloading to the host takes.

    Attributes:
        device_to_host, host_to_device: links of one rank.
        least_bytes: smaller values stay on the device.
    """

    device_to_host: Link
    host_to_device: Link
    least_bytes: int


NONE_OFFLOADED: Mapping[Value, None] = MappingProxyType({})


class LifetimeModel:
    """What models of a training step share: its calls with their costs, and the storages that these lie in.

    A forward, and likewise a backward, is taken to last as long as its busiest lane, because the schedule, which is
    found later, hides what it can.

    Args:
        graph: before gathers and reductions are lowered.
        cost_of: cost of each call.
        sharing: how lanes share links and compute.
        copies: links to the host and back, for values that may be offloaded; None: none may.

    Attributes:
        values: that may be dropped, or offloaded.
        backward: calls that only backward makes.
        required: what forward runs even if nothing is saved.
    """

    values: Sequence[Value]
    backward: Sequence[fx.Node]
    required: Mapping[fx.Node, None]

    def __init__(
        self,
        graph: fx.Graph,
        *,
        cost_of: Callable[[fx.Node], NodeCost],
        sharing: Sharing,
        copies: HostLinks | None = None,
    ) -> None:
        self.sharing = sharing
        self.copies = copies
        self.order = nodes.order_of(graph)
        self.costs = {node: cost_of(node) for node in nodes.call_functions(graph, lambda _: True)}
        self.reads = {node: tuple(node.all_input_nodes) for node in graph.nodes}
        # The storages, numbered, because many steps will be estimated.
        self.placed = found = placements(graph)
        self.workspace = found.workspace_bytes
        self.sizes = [_bytes_when_lowered(storage) for storage in found.storages]
        self.lies_in: dict[fx.Node, tuple[int, ...]] = {
            node: tuple(number for number in numbers if self.sizes[number]) for node, numbers in found.lies_in.items()
        }
        self.makes: dict[fx.Node, list[int]] = {}
        for number, size in enumerate(self.sizes):
            if size:
                self.makes.setdefault(found.storages[number].first, []).append(number)

    def estimate(self, dropped: Mapping[Value, None], offloaded: Mapping[Value, None] = NONE_OFFLOADED) -> StepEstimate:
        """Estimate the step in which these values are recomputed, these offloaded, and all others saved."""
        raise NotImplementedError

    def base_of(self, value: Value) -> fx.Node | None:
        """The one node that has to be copied so that all of a value can be offloaded; None if it cannot be."""
        raise NotImplementedError

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        """Nodes to recompute in addition to the present ones if a value is dropped; None if one of them cannot be."""
        raise NotImplementedError

    def bytes_of(self, value: Value) -> int:
        return sum(self.sizes[number] for number in self.lies_in[value.nodes[0]])

    def numbers_of(self, values: Iterable[Value]) -> frozenset[int]:
        return frozenset(number for value in values for number in self.lies_in[value.nodes[0]])

    def copy_us(self, value: Value) -> tuple[float, float]:
        """Time to copy a value to the host, and back; infinite if it may not be offloaded."""
        links = self.copies
        if links is None or self.bytes_of(value) < links.least_bytes or self.base_of(value) is None:
            return math.inf, math.inf
        return links.device_to_host.us(self.bytes_of(value)), links.host_to_device.us(self.bytes_of(value))

    def copying(self, offloaded: Mapping[Value, None]) -> tuple[dict[Lane, float], dict[Lane, float]]:
        """Time of the lanes to the host, in forward, and back, in backward."""
        found = [self.copy_us(value) for value in offloaded]
        if not found:
            return {}, {}
        return {DEVICE_TO_HOST: sum(out for out, _ in found)}, {HOST_TO_DEVICE: sum(back for _, back in found)}

    def at_best(self, lane_us: Mapping[Lane, float]) -> float:
        """Least time of a forward or backward that keeps its lanes busy for so long."""
        links: dict[str, float] = {}
        taken = 0.0
        for lane, us in lane_us.items():
            if lane != COMPUTE:
                link = self.sharing.link_of(lane)
                links[link] = links.get(link, 0.0) + us
                taken += us * (self.sharing.compute_share if lane.is_group else 0.0)
        capacities = self.sharing.capacities(lane for lane in lane_us if lane != COMPUTE)
        linked = (us / capacities[link] for link, us in links.items())
        return max(lane_us.get(COMPUTE, 0.0) + taken, *linked, 0.0)


class Model(LifetimeModel):
    """A training step whose forward and backward become two graphs, before they are split.

    Forward runs in the order of the joint graph, backward in the order of torch's
    partitioner: a recomputed node stands just before its first reader.

    Args:
        joint: forward and backward in one graph.
        forward, backward: the two graphs if everything that may be saved is, except gathered parameters.
        user_outputs: number of outputs that the user receives.
        cost_of: cost of each call of the joint graph.
        sharing: how lanes share links and compute.
        copies: links to the host and back; None: nothing is offloaded.
    """

    def __init__(
        self,
        joint: fx.Graph,
        forward: fx.Graph,
        backward: fx.Graph,
        *,
        user_outputs: int,
        cost_of: Callable[[fx.Node], NodeCost],
        sharing: Sharing,
        copies: HostLinks | None = None,
    ) -> None:
        known = {node.name: node for node in joint.nodes}
        calls = {name: node for name, node in known.items() if node.op == "call_function"}
        super().__init__(joint, cost_of=cost_of, sharing=sharing, copies=copies)
        self.forward = [calls[node.name] for node in forward.nodes if node.name in calls]
        in_forward = dict.fromkeys(self.forward)
        in_backward = [calls[node.name] for node in backward.nodes if node.name in calls]
        self.base_recomputed = [node for node in in_backward if node in in_forward]
        backward_only = set(in_backward) - set(in_forward)
        self.backward = _from_first_tangent([node for node in calls.values() if node in backward_only])
        returned = nodes.returned_by(joint)
        self.backward_only = dict.fromkeys(self.backward)
        self.user_outputs = [node for node in returned[:user_outputs] if isinstance(node, fx.Node)]
        self.gradients = [node for node in returned[user_outputs:] if isinstance(node, fx.Node)]
        self.mutated = dict.fromkeys(mutated_inputs(joint))
        self.required = _ancestors(self.user_outputs, self.forward)
        saved = [known[node.name] for node in nodes.returned_by(forward)[user_outputs:] if node is not None]
        self._place(joint, saved)
        self.values = [*self._parameters(), *self._activations()]

    # --- what can be saved

    def _place(self, joint: fx.Graph, saved: Sequence[fx.Node]) -> None:
        """Find what is saved, and what each call reads of it.

        For a saved view its base is saved instead: it takes no more memory, and serves all readers.
        """
        self.saved = list(dict.fromkeys(self._base_of(node, self.placed.lies_in) for node in saved))
        # A getitem directly follows the call that it reads.
        self.reads_storages = {
            node: ()
            if nodes.is_getitem(node)
            else tuple(dict.fromkeys(n for read in reads for n in self.lies_in[read]))
            for node, reads in self.reads.items()
            if node.op != "output"
        }
        self.tangents = [
            number for node in joint.find_nodes(op="placeholder") if is_tangent(node) for number in self.lies_in[node]
        ]

    def _base_of(self, node: fx.Node, lies_in: Mapping[fx.Node, tuple[int, ...]]) -> fx.Node:
        while node.op == "call_function" and not nodes.is_getitem(node) and not meta.is_tagged_by_others(node):
            source = next(iter(self.reads[node]), None)
            if source is None or not lies_in[node] or lies_in[source] != lies_in[node]:
                break
            node = source
        return node

    def _parameters(self) -> Iterator[Value]:
        """Gathered parameters that both forward and backward read; their cast, if all readers apply the same."""
        recomputed = dict.fromkeys(self.base_recomputed)
        for gather in self.base_recomputed:
            if nodes.is_unshard(gather) and UnshardArgs.of(gather).layout.zero_stage == 3 and gather in self.required:
                kept = gather
                while len(kept.users) == 1 and traits.cast_dtype(user := next(iter(kept.users))) and user in recomputed:
                    kept = user
                if self.lies_in[kept]:  # on a single rank nothing is gathered
                    yield Value((kept,), gather)

    def _activations(self) -> Iterator[Value]:
        """Saved activations, grouped by storage, whose memory nobody else holds."""
        held = {number for node in self.user_outputs for number in self.lies_in[node]}
        by_storage: dict[tuple[int, ...], list[fx.Node]] = {}
        for node in self.saved:
            places = self.lies_in.get(node, ())
            if node.op == "call_function" and places and not held & set(places):
                by_storage.setdefault(places, []).append(node)
        for members in by_storage.values():
            if not any(meta.is_tagged_by_others(node) or nodes.is_unshard(node) for node in members):
                yield Value(tuple(members))

    # --- one step

    def base_of(self, value: Value) -> fx.Node | None:
        return value.nodes[0] if value.gather is None and len(value.nodes) == 1 else None

    def estimate(self, dropped: Mapping[Value, None], offloaded: Mapping[Value, None] = NONE_OFFLOADED) -> StepEstimate:
        unsaved = {node for value in dropped for node in value.nodes}
        kept = [value for value in self.values if value not in dropped]
        saved = [node for node in self.saved if node not in unsaved]
        saved += [node for value in kept if value.gather is not None for node in value.nodes]
        forward = self._forward(saved)
        backward, recomputed = self._backward(saved)
        replay = _StepReplay(self, self.numbers_of(offloaded))
        replay.forward(forward)
        replay.backward(backward)
        lane_us: dict[Lane, float] = {}
        step_us = 0.0
        for calls, copying in zip((forward, backward), self.copying(offloaded), strict=True):
            busy = busy_us(self.costs[node] for node in calls) | copying
            step_us += self.at_best(busy)
            for lane, us in busy.items():
                lane_us[lane] = lane_us.get(lane, 0.0) + us
        return StepEstimate(
            dropped=dict(dropped),
            saved=tuple(saved),
            recomputed=tuple(recomputed),
            bytes_during=replay.alive.bytes_during(),
            lane_us=lane_us,
            step_us=step_us,
            gaps={value: replay.gap(value, value in dropped or value in offloaded) for value in self.values},
            offloaded=dict(offloaded),
            clock_us=clock_us(self.costs[node] for node in [*forward, *backward]),
        )

    def _forward(self, saved: Iterable[fx.Node]) -> list[fx.Node]:
        """Calls of forward, without those that only values no longer saved depend on."""
        needed = _ancestors([*self.user_outputs, *saved], self.forward)
        return [node for node in self.forward if node in needed or written_arguments(node)]

    def _backward(self, saved: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Calls of backward in order, and those among them that forward runs too."""
        available = dict.fromkeys(saved)
        recomputed: list[fx.Node] = []
        order: list[fx.Node] = []
        for node in self.backward:
            if all(source in available or source.op != "call_function" for source in self.reads[node]):
                if node not in available:
                    available[node] = None
                    order.append(node)
                continue
            missing: dict[fx.Node, None] = {}
            pending = [node]
            while pending:
                reached = pending.pop()
                if reached.op == "call_function" and reached not in available and reached not in missing:
                    missing[reached] = None
                    pending.extend(self.reads[reached])
            for found in sorted(missing, key=self.order.__getitem__):
                available[found] = None
                order.append(found)
                if found not in self.backward_only:
                    recomputed.append(found)
        return order, recomputed

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        available = {*estimate.saved, *estimate.recomputed} - {*value.nodes}
        found: dict[fx.Node, None] = {}
        pending = list(value.nodes)
        while pending:
            node = pending.pop()
            if node in found or node in available:
                continue
            if node in self.mutated:
                return None
            if node.op == "call_function":
                if meta.is_tagged_by_others(node) or not traits.is_repeatable(node):
                    return None
                found[node] = None
                pending.extend(self.reads[node])
        return list(found)


class _StepReplay:
    """Live ranges of the storages of a step, including those that backward recomputes.

    If backward recomputes storage n, the copy is storage n + count. Readers of the recomputed node read the copy, so n
    itself ends with its last reader in forward, or with its last reader in backward that reads the saved one. What was
    offloaded comes back as storage n + count, too, with the first reader in backward.
    """

    def __init__(self, model: Model, offloaded: frozenset[int] = frozenset()) -> None:
        self.model = model
        self.offloaded = offloaded
        self.count = len(model.sizes)
        self.alive = LiveRanges([*model.sizes, *model.sizes])
        self.last_forward_read: list[int] = []  # last reader in forward
        self.first_backward_read: dict[int, int] = {}  # first reader in backward

    def forward(self, calls: Sequence[fx.Node]) -> None:
        makes, reads, workspace = self.model.makes, self.model.reads_storages, self.model.workspace
        for node in calls:
            self.alive.run(makes.get(node, ()), reads[node], workspace.get(node, 0))
        self.last_forward_read = self.alive.last.copy()
        self.alive.enter(self.model.tangents)

    def backward(self, calls: Sequence[fx.Node]) -> None:
        model, count = self.model, self.count
        placed: dict[fx.Node, Sequence[int]] = {}  # storages of a node, if not those of the model
        ran = dict.fromkeys(calls)
        for node in calls:
            makes, reads = model.makes.get(node, ()), model.reads_storages[node]
            moved = [source for source in model.reads[node] if source in placed]
            if moved or (makes and node not in model.backward_only):
                read = {number: number for number in reads}
                for source in moved:
                    read |= zip(model.lies_in[source], placed[source], strict=True)
                copies = {} if node in model.backward_only else {number: number + count for number in makes}
                placed[node] = [copies.get(n, read.get(n, n)) for n in model.lies_in[node]]
                makes, reads = copies.values() or makes, () if nodes.is_getitem(node) else read.values()
            if self.offloaded and not self.offloaded.isdisjoint(reads):
                back = {number: number + count if number in self.offloaded else number for number in reads}
                reads = back.values()
                makes = [*makes, *(n for n in reads if n >= count and self.alive.first[n] < 0)]
            here = self.alive.run(makes, reads, model.workspace.get(node, 0))
            for number in reads:
                self.first_backward_read.setdefault(number, here)
        self.alive.keep(number for node in model.user_outputs for number in model.lies_in[node])
        self.alive.keep(n for node in model.gradients if node in ran for n in placed.get(node, model.lies_in[node]))

    def gap(self, value: Value, is_dropped: bool) -> range:
        """Positions from the last reader in forward to the first in backward, or to where it is recomputed."""
        numbers = self.model.lies_in[value.nodes[0]]
        begin = max(self.last_forward_read[number] for number in numbers) + 1
        if is_dropped:
            ends = [self.alive.first[number + self.count] for number in numbers]
        else:
            ends = [self.first_backward_read.get(number, -1) for number in numbers]
        return range(begin, min((end for end in ends if end >= 0), default=begin))


# --- helpers --------------------------------------------------------------------------------------------------------


def busy_us(costs: Iterable[NodeCost]) -> dict[Lane, float]:
    """Total time of these costs on each lane."""
    busy: dict[Lane, float] = {}
    for cost in costs:
        if cost.lane is not None:
            busy[cost.lane] = busy.get(cost.lane, 0.0) + cost.us
    return busy


def clock_us(costs: Iterable[NodeCost]) -> list[float]:
    """Compute done before each of these calls, and in all."""
    return [0.0, *accumulate(cost.us if cost.lane == COMPUTE else 0.0 for cost in costs)]


def _ancestors(ends: Iterable[fx.Node], order: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The given nodes and all nodes of a program that they depend on."""
    needed = dict.fromkeys(ends)
    for node in reversed(order):
        if node in needed:
            needed |= dict.fromkeys(node.all_input_nodes)
    return needed


def _from_first_tangent(calls: list[fx.Node]) -> list[fx.Node]:
    """Calls from the first reader of a tangent on; earlier ones run just before their first reader."""
    first = next(
        (position for position, node in enumerate(calls) if any(map(is_tangent, node.all_input_nodes))),
        0,
    )
    return calls[first:]


def _bytes_when_lowered(storage: Storage) -> int:
    """Bytes of a storage on the device once gathers are lowered; 0 for a shard that is neither gathered nor cast."""
    if storage.space != "device" or (storage.held and not is_tangent(storage.first)):
        return 0
    if not nodes.is_unshard(storage.first):
        return storage.nbytes
    args = UnshardArgs.of(storage.first)
    is_cast = meta.tensor_value(args.shard).dtype != meta.tensor_value(storage.first).dtype
    return storage.nbytes if args.layout.is_gathered or is_cast else 0
