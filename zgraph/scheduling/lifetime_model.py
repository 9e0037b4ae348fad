"""What a training step keeps from forward to backward, and what it makes again there: memory against time, on paper.

forward   a b c d           keeps a, c        bytes of c between its last reader here and its first one there
backward      D  c C b B A                    microseconds of b, made again from a just before it is read
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import placements
from zgraph.graph import meta, nodes
from zgraph.graph.operator_arguments import ReduceArgs, UnshardArgs
from zgraph.runtime.chunks import chunk_rows, payload_bytes
from zgraph.runtime.groups import group_size
from zgraph.scheduling.simulate import COMPUTE
from zgraph.scheduling.timeline import Sharing
from zgraph.torch_compat.aot import is_tangent, mutated_inputs
from zgraph.torch_compat.fake_values import hint_of
from zgraph.torch_compat.operators import OpOverload, is_pure, written_arguments


@dataclass(frozen=True, eq=False)
class Value:
    """What can be kept from forward to backward: one storage.

    Attributes:
        nodes: forward saves these where it is kept: one, or several that share the storage.
        gather: where it is a gathered parameter.
    """

    nodes: tuple[fx.Node, ...]
    gather: fx.Node | None = None

    @property
    def name(self) -> str:
        return ", ".join(meta.parameters(self.gather)) if self.gather is not None else self.nodes[0].name


@dataclass(frozen=True, eq=False)
class StepEstimate:
    """A whole step, on paper.

    Attributes:
        dropped: values that backward makes again.
        saved: what forward saves beside its inputs.
        recomputed: what backward computes again, in its order.
        bytes_during: while each call runs: those of forward, then those of backward.
        lane_us: how long each lane is busy.
        step_us: at best; see `Model`.
        gaps: of each value that can be dropped, or has been: the positions at which only its being kept costs memory.
    """

    dropped: Mapping[Value, None]
    saved: tuple[fx.Node, ...]
    recomputed: tuple[fx.Node, ...]
    bytes_during: Sequence[int]
    lane_us: Mapping[str, float]
    step_us: float
    gaps: Mapping[Value, range]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_during, default=0)

    @property
    def busy_us(self) -> float:
        return sum(self.lane_us.values())


class Model:
    """A training step before its gathers and reductions are lowered.

    A pass of it takes as long as its busiest lane: the schedule is still to be found, and hides what it can. Forward
    runs in the order of the joint graph, backward as torch's partitioner orders it: what is made again stands just
    before its first reader.

    Args:
        joint: forward and backward in one.
        forward, backward: how they are split when every value is kept that may be, gathered parameters left out.
        user_outputs: how many outputs are the user's.
        cost_of: of the calls of the joint graph.
        sharing: of the lanes.
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
    ) -> None:
        known = {node.name: node for node in joint.nodes}
        calls = {name: node for name, node in known.items() if node.op == "call_function"}
        self.sharing = sharing
        self.order = nodes.order_of(joint)
        self.forward = [calls[node.name] for node in forward.nodes if node.name in calls]
        in_forward = dict.fromkeys(self.forward)
        behind = [calls[node.name] for node in backward.nodes if node.name in calls]
        self.base_recomputed = [node for node in behind if node in in_forward]
        self.backward = _from_first_tangent([node for node in calls.values() if node in set(behind) - set(in_forward)])
        returned = nodes.returned_by(joint)
        self.user_outputs = [node for node in returned[:user_outputs] if isinstance(node, fx.Node)]
        self.gradients = [node for node in returned[user_outputs:] if isinstance(node, fx.Node)]
        self.costs = {node: cost_of(node) for node in calls.values()}
        self.reads = {node: tuple(node.all_input_nodes) for node in joint.nodes}
        self.mutated = dict.fromkeys(mutated_inputs(joint))
        self.required = _ancestors(self.user_outputs, self.forward)
        saved = [known[node.name] for node in nodes.returned_by(forward)[user_outputs:] if node is not None]
        self._place(joint, saved)
        self.values = [*self._parameters(), *self._activations()]

    # --- what there is

    def _place(self, joint: fx.Graph, saved: Sequence[fx.Node]) -> None:
        """Numbers instead of nodes: a step is looked at many times.

        Of what is saved as a view the whole is taken: that costs nothing more, and whoever needs the whole finds it.
        """
        found = placements(joint)
        self.saved = list(dict.fromkeys(self._whole(node, found.lies_in) for node in saved))
        self.workspace = found.workspace_bytes
        self.sizes = [
            0 if storage.held and not is_tangent(storage.first) else _agreed_bytes(storage.first, storage.nbytes)
            for storage in found.storages
        ]
        allocated = [number for number, size in enumerate(self.sizes) if size]
        self.lies_in: dict[fx.Node, tuple[int, ...]] = {
            node: tuple(number for number in numbers if self.sizes[number]) for node, numbers in found.lies_in.items()
        }
        self.makes: dict[fx.Node, list[int]] = {}
        for number in allocated:
            self.makes.setdefault(found.storages[number].first, []).append(number)
        # A getitem stands just behind what it reads.
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

    def _whole(self, node: fx.Node, lies_in: Mapping[fx.Node, tuple[int, ...]]) -> fx.Node:
        while node.op == "call_function" and not nodes.is_getitem(node) and not meta.is_tagged_by_others(node):
            source = next(iter(self.reads[node]), None)
            if source is None or not lies_in[node] or lies_in[source] != lies_in[node]:
                break
            node = source
        return node

    def _parameters(self) -> Iterator[Value]:
        """Gathered parameters that forward and backward read; what is kept is their cast, where all readers cast."""
        again = dict.fromkeys(self.base_recomputed)
        for gather in self.base_recomputed:
            if nodes.is_unshard(gather) and UnshardArgs.of(gather).zero_stage == 3 and gather in self.required:
                kept = gather
                while len(kept.users) == 1 and nodes.is_cast(user := next(iter(kept.users))) and user in again:
                    kept = user
                yield Value((kept,), gather)

    def _activations(self) -> Iterator[Value]:
        """Saved values, those of one storage together, of which nobody else holds the memory."""
        held = {number for node in self.user_outputs for number in self.lies_in[node]}
        by_storage: dict[tuple[int, ...], list[fx.Node]] = {}
        for node in self.saved:
            places = self.lies_in.get(node, ())
            if node.op == "call_function" and places and not held & set(places):
                by_storage.setdefault(places, []).append(node)
        for members in by_storage.values():
            if not any(meta.is_tagged_by_others(node) or nodes.is_unshard(node) for node in members):
                yield Value(tuple(members))

    def may_run_again(self, node: fx.Node) -> bool:
        """Whether a call yields the same again, and nobody else has decided about it.

        Nothing random, nothing that writes, no collective of the model's own, no operator that we do not know.
        """
        if meta.is_tagged_by_others(node):
            return False
        if nodes.is_unshard(node):
            return UnshardArgs.of(node).zero_stage in (0, 3)
        if nodes.is_getitem(node):
            return True
        return (
            isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims") and is_pure(node.target)
        )

    # --- one step

    def estimate(self, dropped: Mapping[Value, None]) -> StepEstimate:
        """The step when these values are made again and all others are kept."""
        gone = {node for value in dropped for node in value.nodes}
        kept = [value for value in self.values if value not in dropped]
        saved = [node for node in self.saved if node not in gone]
        saved += [node for value in kept if value.gather is not None for node in value.nodes]
        forward = self._forward(saved)
        backward, again = self._backward(saved)
        greedy_frontier = _Walk(self)
        greedy_frontier.forward(forward)
        greedy_frontier.backward(backward)
        lane_us: dict[str, float] = {}
        step_us = 0.0
        for calls in (forward, backward):
            busy = busy_us(self.costs[node] for node in calls)
            step_us += self.at_best(busy)
            for lane, us in busy.items():
                lane_us[lane] = lane_us.get(lane, 0.0) + us
        return StepEstimate(
            dropped=dict(dropped),
            saved=tuple(saved),
            recomputed=tuple(again),
            bytes_during=greedy_frontier.bytes_during(),
            lane_us=lane_us,
            step_us=step_us,
            gaps={value: greedy_frontier.gap(value, value in dropped) for value in self.values},
        )

    def at_best(self, lane_us: Mapping[str, float]) -> float:
        """How long a pass takes that keeps its lanes busy for so long."""
        links: dict[str, float] = {}
        taken = 0.0
        for lane, us in lane_us.items():
            if lane != COMPUTE:
                link = self.sharing.link_of(lane)
                links[link] = links.get(link, 0.0) + us
                taken += us * (self.sharing.compute_share if lane.startswith("group:") else 0.0)
        capacities = self.sharing.capacities(lane for lane in lane_us if lane != COMPUTE)
        linked = (us / capacities[link] for link, us in links.items())
        return max(lane_us.get(COMPUTE, 0.0) + taken, *linked, 0.0)

    def _forward(self, saved: Iterable[fx.Node]) -> list[fx.Node]:
        """Without what only a value needed that is not saved any more."""
        needed = _ancestors([*self.user_outputs, *saved], self.forward)
        return [node for node in self.forward if node in needed or written_arguments(node)]

    def _backward(self, saved: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """In order, and what of it forward computes too."""
        there = dict.fromkeys(saved)
        again: list[fx.Node] = []
        order: list[fx.Node] = []
        own = dict.fromkeys(self.backward)
        for node in self.backward:
            if all(source in there or source.op != "call_function" for source in self.reads[node]):
                if node not in there:
                    there[node] = None
                    order.append(node)
                continue
            missing: dict[fx.Node, None] = {}
            pending = [node]
            while pending:
                reached = pending.pop()
                if reached.op == "call_function" and reached not in there and reached not in missing:
                    missing[reached] = None
                    pending.extend(self.reads[reached])
            for found in sorted(missing, key=self.order.__getitem__):
                there[found] = None
                order.append(found)
                if found not in own:
                    again.append(found)
        return order, again

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        """What would have to run again beside what does already; None where something of it cannot."""
        there = {*estimate.saved, *estimate.recomputed} - {*value.nodes}
        found: dict[fx.Node, None] = {}
        pending = list(value.nodes)
        while pending:
            node = pending.pop()
            if node in found or node in there:
                continue
            if node in self.mutated:
                return None
            if node.op == "call_function":
                if not self.may_run_again(node):
                    return None
                found[node] = None
                pending.extend(self.reads[node])
        return list(found)


class _Walk:
    """Which storages are alive at each call of a step, and between which readers."""

    def __init__(self, model: Model) -> None:
        self.model = model
        count = 2 * len(model.sizes)  # as forward makes them, and as backward makes them again
        self.sizes = [*model.sizes, *model.sizes]
        self.first, self.last = [-1] * count, [-1] * count
        self.first_there = [-1] * count  # first reader in backward
        self.last_here: list[int] = []  # last reader in forward
        self.workspace: list[int] = []

    def forward(self, calls: Sequence[fx.Node]) -> None:
        makes, reads = self.model.makes, self.model.reads_storages
        for node in calls:
            here = self._step(node)
            for number in makes.get(node, ()):
                self.first[number] = self.last[number] = here
            for number in reads[node]:
                self.last[number] = here
        self.last_here = self.last.copy()
        for number in self.model.tangents:
            self.first[number] = self.last[number] = len(calls)

    def backward(self, calls: Sequence[fx.Node]) -> None:
        lies_in, makes, again = self.model.lies_in, self.model.makes, len(self.model.sizes)
        placed: dict[fx.Node, Sequence[int]] = {}  # where it lies, if not where the model says
        for node in calls:
            here = self._step(node)
            read = {number: number for number in self.model.reads_storages[node]}
            for source in self.model.reads[node]:
                if source in placed:
                    read |= zip(lies_in[source], placed[source], strict=True)
            own = makes.get(node, ())
            for number in own:
                self.first[number + again] = self.last[number + again] = here
            if lies_in[node]:
                placed[node] = [
                    number + again if number in own else read.get(number, number) for number in lies_in[node]
                ]
            if nodes.is_getitem(node):
                continue
            for place in read.values():
                self.last[place] = here
                if self.first_there[place] < 0:
                    self.first_there[place] = here
        end = len(self.workspace)
        for node in self.model.user_outputs:
            for number in lies_in[node]:
                self.last[number] = end
        for node in self.model.gradients:
            for place in placed.get(node, ()):
                self.last[place] = end

    def bytes_during(self) -> list[int]:
        change = [0] * (len(self.workspace) + 2)
        for number, first in enumerate(self.first):
            if first >= 0:
                change[first] += self.sizes[number]
                change[self.last[number] + 1] -= self.sizes[number]
        alive, during = 0, list[int]()
        for position, workspace in enumerate(self.workspace):
            alive += change[position]
            during.append(alive + workspace)
        return during

    def gap(self, value: Value, is_dropped: bool) -> range:
        """Between the last reader in forward and the first in backward; where it is made again, up to there."""
        numbers = self.model.lies_in[value.nodes[0]]
        begin = max(self.last_here[number] for number in numbers) + 1
        if is_dropped:
            ends = [self.first[number + len(self.model.sizes)] for number in numbers]
        else:
            ends = [self.first_there[number] for number in numbers]
        return range(begin, min((end for end in ends if end >= 0), default=begin))

    def _step(self, node: fx.Node) -> int:
        self.workspace.append(self.model.workspace.get(node, 0))
        return len(self.workspace) - 1


# --- the path -------------------------------------------------------------------------------------------------------


def busy_us(costs: Iterable[NodeCost]) -> dict[str, float]:
    """By lane."""
    busy: dict[str, float] = {}
    for cost in costs:
        if cost.lane:
            busy[cost.lane] = busy.get(cost.lane, 0.0) + cost.us
    return busy


def _ancestors(ends: Iterable[fx.Node], order: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The nodes that ends are made of, themselves included, among those of a program."""
    needed = dict.fromkeys(ends)
    for node in reversed(order):
        if node in needed:
            needed |= dict.fromkeys(node.all_input_nodes)
    return needed


def _from_first_tangent(calls: list[fx.Node]) -> list[fx.Node]:
    """Those from the first reader of a tangent on; the others stand before who reads them."""
    first = next(
        (position for position, node in enumerate(calls) if any(map(is_tangent, node.all_input_nodes))),
        0,
    )
    return calls[first:]


def _agreed_bytes(node: fx.Node, found: int) -> int:
    """What a storage takes, as all ranks count it: of a gradient's own rows the longest part of any rank."""
    if nodes.is_unshard(node):
        args = UnshardArgs.of(node)
        is_local = args.zero_stage == 0 or group_size(args.group_name) == 1
        # Where nothing is gathered and nothing cast, the shard itself is read.
        return 0 if is_local and meta.tensor_value(args.shard).dtype == meta.tensor_value(node).dtype else found
    if nodes.is_reduce_grad(node) and ReduceArgs.of(node).zero_stage:
        args = ReduceArgs.of(node)
        rows, *others = (hint_of(size) or 0 for size in meta.tensor_value(args.grad).shape)
        return payload_bytes((chunk_rows(rows, group_size(args.group_name)), *others), args.dtype)
    return found
