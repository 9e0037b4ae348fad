"""Base of the models of a training step that trade memory for time: their estimates and common parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.hardware import Link
from zgraph.analysis.liveness import placements
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
        offloaded: values that are copied to the host in forward, and back in backward.
        saved: nodes that forward saves, in addition to its inputs.
        recomputed: nodes that backward recomputes, in execution order.
        bytes_during: bytes alive during each call, forward before backward.
        lane_us: how long each lane is busy.
        step_us: lower bound on the time of the step, see `LifetimeModel`.
        gaps: for each value, the positions between its last use in forward and its first use in backward. There the
            value occupies memory only because it is saved.
        anchors: for a whole step, the backward node before which each node of `recomputed` runs again.
        clock_us: microseconds of compute done before each call, and as the last entry the total.
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
    """Links for offloading to the host, and the least size for which offloading pays.

    Attributes:
        device_to_host, host_to_device: links of one rank.
        least_bytes: smaller values stay on the device.
    """

    device_to_host: Link
    host_to_device: Link
    least_bytes: int


NONE_OFFLOADED: Mapping[Value, None] = MappingProxyType({})


class LifetimeModel:
    """Base of models of a training step: the step's calls with their costs, and the storages of their results.

    A forward or a backward is assumed to last as long as its busiest lane: the schedule, which is found later, hides
    the rest if it can.

    Args:
        graph: graph before gathers and reductions are lowered.
        cost_of: cost of each call.
        sharing: how lanes share links and compute.
        copies: links to the host and back, for values that may be offloaded; None: nothing is offloaded.

    Attributes:
        values: values that may be dropped or offloaded.
        backward: calls that only backward makes.
        required: nodes that forward runs even if nothing is saved.
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
        """Estimate a step that recomputes values in `dropped`, offloads those in `offloaded`, and saves all others."""
        raise NotImplementedError

    def base_of(self, value: Value) -> fx.Node | None:
        """The node to copy to the host in order to offload the whole value; None if the value cannot be offloaded."""
        raise NotImplementedError

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        """The nodes that backward must also recompute if it drops `value`; None if a node cannot be recomputed."""
        raise NotImplementedError

    def bytes_of(self, value: Value) -> int:
        return sum(self.sizes[number] for number in self.lies_in[value.nodes[0]])

    def numbers_of(self, values: Iterable[Value]) -> frozenset[int]:
        return frozenset(number for value in values for number in self.lies_in[value.nodes[0]])

    def copy_us(self, value: Value) -> tuple[float, float]:
        """Two times: to copy a value to the host, and to copy it back. Both are infinite if it may not be offloaded."""
        links = self.copies
        if links is None or self.bytes_of(value) < links.least_bytes or self.base_of(value) is None:
            return math.inf, math.inf
        return links.device_to_host.us(self.bytes_of(value)), links.host_to_device.us(self.bytes_of(value))

    def copying(self, offloaded: Mapping[Value, None]) -> tuple[dict[Lane, float], dict[Lane, float]]:
        """Time on each lane to copy the values `offloaded`: first to the host, in forward, then back, in backward."""
        found = [self.copy_us(value) for value in offloaded]
        if not found:
            return {}, {}
        return {DEVICE_TO_HOST: sum(out for out, _ in found)}, {HOST_TO_DEVICE: sum(back for _, back in found)}

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


def busy_us(costs: Iterable[NodeCost]) -> dict[Lane, float]:
    """Total time of these costs on each lane."""
    busy: dict[Lane, float] = {}
    for cost in costs:
        if cost.lane is not None:
            busy[cost.lane] = busy.get(cost.lane, 0.0) + cost.us
    return busy


def clock_us(costs: Iterable[NodeCost]) -> list[float]:
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
