"""Base of the models of a training step that trade memory for time: the estimate of a step, from its replay.

forward   a b c d           saves a, c        costs the bytes of c, from its last forward to its first backward reader
backward      D  C b B A                      costs the time of b, recomputed from a just before B reads b
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.hardware import Link
from zgraph.analysis.liveness import LiveRanges, placements
from zgraph.analysis.storages import Storage
from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import COMPUTE, DEVICE_TO_HOST, HOST_TO_DEVICE, Lane
from zgraph.tiers.tier import DEVICE
from zgraph.torch_compat.aot import is_tangent


@dataclass(frozen=True, eq=False)
class Value:
    """A storage that forward can save for backward.

    Attributes:
        nodes: the node that forward returns if the value is saved, or several nodes that share the storage.
        gather: the gather that makes the value, if the value is a gathered parameter.
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
        saved: nodes that a forward graph returns for backward; empty for a whole step.
        recomputed: nodes that backward recomputes, in execution order.
        bytes_during: bytes alive during each call, forward before backward.
        lane_us: how long each lane is busy.
        step_us: lower bound on the time of the step, see `LifetimeModel`.
        gaps: for each value, the positions between its last use in forward and its first use in backward. There the
            value occupies memory only because it is saved.
        anchors: the backward node before which each node of `recomputed` runs again.
        clock_us: microseconds of compute done before each call, and as the last entry the total.
        offloaded: values that are copied to the host in forward, and back in backward.
    """

    dropped: Mapping[Value, None]
    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    bytes_during: Sequence[int]
    lane_us: Mapping[Lane, float]
    step_us: float
    gaps: Mapping[Value, range]
    anchors: tuple[fx.Node, ...]
    clock_us: Sequence[float]
    offloaded: Mapping[Value, None]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)

    @property
    def busy_us(self) -> float:
        return sum(self.lane_us.values())


@dataclass(frozen=True, kw_only=True)
class HostLinks:
    """Links for offloading to the host, and the least size for which offloading pays.

    Attributes:
        device_to_host, host_to_device: links of one rank.
        least_bytes: smaller values stay on the device.
    """

    device_to_host: Link
    host_to_device: Link
    least_bytes: int


@dataclass(frozen=True)
class Choice:
    """Calls of a step for one choice of dropped values.

    Attributes:
        calls: calls in order, except recomputed ones.
        again: nodes that backwards recompute, keyed by the node before which they run.
        saved: as in `StepEstimate`.
    """

    calls: Sequence[fx.Node]
    again: Mapping[fx.Node, Sequence[fx.Node]]
    saved: tuple[fx.Node, ...] = ()


NONE_OFFLOADED: Mapping[Value, None] = MappingProxyType({})
NO_COPIES: Mapping[int, int] = MappingProxyType({})


class LifetimeModel:
    """Base of models of a training step: the step's calls with their costs, and the storages of their results.

    A forward or a backward is assumed to last as long as its busiest lane. The schedule is found later, and may
    fail to hide the other lanes.

    Args:
        graph: graph before gathers and reductions are lowered.
        cost_of: cost of each call.
        sharing: how lanes share links and compute.
        copies: links to the host and back, for values that may be offloaded; None: nothing is offloaded.

    Attributes:
        values: values that may be dropped or offloaded.
        part: the part of the step to which each call belongs. Forwards have even numbers, and n + 1 is the backward of
            forward n.
        backward: calls that only backward makes, in order.
        required: nodes that forward runs even if nothing is saved.
        returned: nodes whose storages live to the end of the step, each with the part that returns it.
    """

    values: Sequence[Value]
    part: Mapping[fx.Node, int]
    backward: Sequence[fx.Node]
    required: Mapping[fx.Node, None]
    returned: Sequence[tuple[fx.Node, int]]

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
        # A getitem directly follows the call that it reads.
        self.reads_storages = {
            node: () if nodes.is_getitem(node) else tuple(dict.fromkeys(self.storages_of(reads)))
            for node, reads in self.reads.items()
        }
        self.tangents = list(self.storages_of(filter(is_tangent, graph.nodes)))

    def choice(self, dropped: Mapping[Value, None]) -> Choice:
        """Find the calls of a step that drops these values and saves all others."""
        raise NotImplementedError

    def base_of(self, value: Value) -> fx.Node | None:
        """The node to copy to the host in order to offload the whole value; None if the value cannot be offloaded."""
        raise NotImplementedError

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        """The nodes that backward must also recompute if it drops `value`; None if a node cannot be recomputed."""
        raise NotImplementedError

    def estimate(self, dropped: Mapping[Value, None], offloaded: Mapping[Value, None] = NONE_OFFLOADED) -> StepEstimate:
        """Estimate a step that recomputes values in `dropped`, offloads those in `offloaded`, and saves all others."""
        choice = self.choice(dropped)
        again = choice.again
        ran = [(one, self.part[node]) for node in choice.calls for one in (*again.get(node, ()), node)]
        replay = _Replay(self, ran, self.numbers_of(offloaded))
        costs: dict[int, list[NodeCost]] = {}
        for node, part in ran:
            costs.setdefault(part, []).append(self.costs[node])
        copying = self._copying_in_parts(offloaded)
        lane_us: dict[Lane, float] = {}
        step_us = 0.0
        for part, of_part in costs.items():
            busy = busy_us(of_part) | copying.get(part, {})
            step_us += self.at_best(busy)
            for lane, us in busy.items():
                lane_us[lane] = lane_us.get(lane, 0.0) + us
        return StepEstimate(
            dropped=dict(dropped),
            saved=choice.saved,
            recomputed=tuple(node for found in again.values() for node in found),
            bytes_during=replay.alive.bytes_during(),
            lane_us=lane_us,
            step_us=step_us,
            gaps={value: replay.gap(value, value in dropped or value in offloaded) for value in self.values},
            anchors=tuple(anchor for anchor, found in again.items() for _ in found),
            clock_us=_clock_us(self.costs[node] for node, _ in ran),
            offloaded=dict(offloaded),
        )

    def recomputed(self, is_saved: Callable[[fx.Node], bool]) -> dict[fx.Node, list[fx.Node]]:
        """Nodes that backwards recompute if forwards save only `is_saved` nodes, by the node before which they run."""
        found: dict[fx.Node, list[fx.Node]] = {}
        there: set[fx.Node] = set()
        for node in self.backward:
            missing: dict[fx.Node, None] = {}
            pending = list(self.reads[node])
            while pending:
                source = pending.pop()
                if self.part.get(source) != self.part[node] - 1 or source in there or source in missing:
                    continue
                if not is_saved(source):
                    missing[source] = None
                    pending.extend(self.reads[source])
            if missing:
                there |= missing.keys()
                found[node] = sorted(missing, key=self.order.__getitem__)
        return found

    def storages_of(self, of_nodes: Iterable[fx.Node]) -> Iterator[int]:
        return (number for node in of_nodes for number in self.lies_in[node])

    def bytes_of(self, value: Value) -> int:
        return sum(self.sizes[number] for number in self.lies_in[value.nodes[0]])

    def numbers_of(self, values: Iterable[Value]) -> frozenset[int]:
        return frozenset(self.storages_of(value.nodes[0] for value in values))

    def copy_us(self, value: Value) -> tuple[float, float]:
        """Two times: to copy a value to the host, and to copy it back. Both are infinite if it may not be offloaded."""
        links = self.copies
        if links is None or self.bytes_of(value) < links.least_bytes or self.base_of(value) is None:
            return math.inf, math.inf
        return links.device_to_host.us(self.bytes_of(value)), links.host_to_device.us(self.bytes_of(value))

    def copying(self, offloaded: Mapping[Value, None]) -> tuple[dict[Lane, float], dict[Lane, float]]:
        """Two maps of lane to time, for copying `offloaded` values to the host in forward, and back in backward."""
        found = [self.copy_us(value) for value in offloaded]
        if not found:
            return {}, {}
        return {DEVICE_TO_HOST: sum(out for out, _ in found)}, {HOST_TO_DEVICE: sum(back for _, back in found)}

    def _copying_in_parts(self, offloaded: Mapping[Value, None]) -> dict[int, dict[Lane, float]]:
        """Time on each lane for copying `offloaded` values, by part: forwards copy to the host, backwards copy back."""
        by_forward: dict[int, dict[Value, None]] = {}
        for value in offloaded:
            by_forward.setdefault(self.part[value.nodes[0]], {})[value] = None
        return {
            forward + behind: lanes
            for forward, values in by_forward.items()
            for behind, lanes in enumerate(self.copying(values))
        }

    def at_best(self, lane_us: Mapping[Lane, float]) -> float:
        """Least time of a forward or backward in which each lane is busy for its time in `lane_us`."""
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


class _Replay:
    """Finds the live ranges of the storages of a step, including those that backwards recompute or reload.

    If a backward recomputes storage n, the copy is storage n + count. This backward's readers of the recomputed node
    read the copy. All other readers read n, and the last of them ends n's live range. An offloaded storage n also
    comes back as storage n + count, at its first reader in backward.

    Args:
        model: model of the step.
        ran: calls in order, each with the part in which it runs; recomputed calls do not run in their own part.
        offloaded: storages that are offloaded.
    """

    def __init__(self, model: LifetimeModel, ran: Sequence[tuple[fx.Node, int]], offloaded: frozenset[int]) -> None:
        self.model, self.count = model, len(model.sizes)
        self.alive = LiveRanges([*model.sizes, *model.sizes])
        self.last_forward_read: dict[int, int] = {}  # by storage: position of the last reader in forward
        self.first_backward_read: dict[int, int] = {}  # by storage: position of the first reader in backward
        self.copies: dict[tuple[fx.Node, int], dict[int, int]] = {}  # by node and part: copies of the node's storages
        entering: Sequence[int] = model.tangents
        for node, part in ran:
            makes, reads = self._accesses(node, part)
            if part % 2:
                if not offloaded.isdisjoint(reads):
                    reads = [number + self.count if number in offloaded else number for number in reads]
                    makes = [*makes, *(n for n in reads if n >= self.count and self.alive.first[n] < 0)]
                makes, entering = [*makes, *entering], ()
            here = self.alive.run(makes, reads, model.workspace.get(node, 0))
            for number in reads:
                if part % 2:
                    self.first_backward_read.setdefault(number, here)
                else:
                    self.last_forward_read[number] = here
        done = dict.fromkeys(ran)
        for node, part in model.returned:
            if (node, part) in done:
                self.alive.keep(self._copied(node, part).get(number, number) for number in model.lies_in[node])

    def gap(self, value: Value, is_dropped: bool) -> range:
        """Positions from a value's last reader in forward to its first in backward, or to its copy if `is_dropped`."""
        numbers = self.model.lies_in[value.nodes[0]]
        begin = max(self.last_forward_read.get(number, self.alive.first[number]) for number in numbers) + 1
        if is_dropped:
            ends = [self.alive.first[number + self.count] for number in numbers]
        else:
            ends = [self.first_backward_read.get(number, -1) for number in numbers]
        return range(begin, min((end for end in ends if end >= 0), default=begin))

    def _accesses(self, node: fx.Node, part: int) -> tuple[Sequence[int], Sequence[int]]:
        """Two lists: the storages that a call makes, and the storages that it reads."""
        model = self.model
        makes, reads = model.makes.get(node, ()), model.reads_storages[node]
        copies: dict[int, int] = {}
        for source in model.reads[node] if self.copies else ():
            copies |= self._copied(source, part)
        if copies:
            reads = [copies.get(number, number) for number in reads]
        if part != model.part[node]:
            copies |= {number: number + self.count for number in makes}
            makes = [number + self.count for number in makes]
        if copies:
            self.copies[node, part] = {number: copies[number] for number in model.lies_in[node] if number in copies}
        return makes, reads

    def _copied(self, node: fx.Node, part: int) -> Mapping[int, int]:
        """Copies that calls of this part read in place of a node's storages."""
        own = self.copies.get((node, self.model.part.get(node, part)), NO_COPIES)
        return self.copies.get((node, part), own)


def busy_us(costs: Iterable[NodeCost]) -> dict[Lane, float]:
    """Total time of these costs on each lane."""
    busy: dict[Lane, float] = {}
    for cost in costs:
        if cost.lane is not None:
            busy[cost.lane] = busy.get(cost.lane, 0.0) + cost.us
    return busy


def _clock_us(costs: Iterable[NodeCost]) -> list[float]:
    """Microseconds of compute done before each of these calls, and as the last entry the total."""
    return [0.0, *accumulate(cost.us if cost.lane == COMPUTE else 0.0 for cost in costs)]


def _bytes_when_lowered(storage: Storage) -> int:
    """Bytes of a storage on the device after gathers are lowered. A shard without gather and cast counts 0."""
    if storage.space != DEVICE or (storage.held and not is_tangent(storage.first)):
        return 0
    if not nodes.is_unshard(storage.first):
        return storage.nbytes
    args = UnshardArgs.of(storage.first)
    is_cast = meta.tensor_value(args.shard).dtype != meta.tensor_value(storage.first).dtype
    return storage.nbytes if args.layout.is_gathered or is_cast else 0
