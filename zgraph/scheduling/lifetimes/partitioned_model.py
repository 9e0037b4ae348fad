"""The model of a step whose forward and backward become two graphs: what forward saves, and what backward recomputes.

forward   a b c d           saves a, c        costs the bytes of c, from c's last reader here to its first in backward
backward      D  C b B A                      costs the time of b, recomputed from a just before B reads b
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import LiveRanges
from zgraph.graph import meta, nodes, traits
from zgraph.graph.operator_arguments import UnshardArgs
from zgraph.scheduling.lifetimes.lifetime_model import (
    NONE_OFFLOADED,
    HostLinks,
    LifetimeModel,
    StepEstimate,
    Value,
    busy_us,
    clock_us,
)
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import Lane
from zgraph.torch_compat.aot import is_tangent, mutated_inputs
from zgraph.torch_compat.operators import written_arguments


class PartitionedModel(LifetimeModel):
    """The model of a training step whose joint graph will be split into a forward and a backward graph.

    Forward runs in the order of the joint graph. Backward runs in the order of torch's partitioner, in which a
    recomputed node runs just before its first reader.

    Args:
        joint: forward and backward in one graph.
        forward, backward: the two graphs of a split that saves all values that may be saved, but no gathered parameter.
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
        """Find the saved nodes, and the storages that each call reads.

        A saved view is replaced by its base, which needs no more memory and serves all readers.
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
        """Yield a value for each gathered parameter that both forward and backward read.

        The value is the parameter's cast if all readers cast it.
        """
        recomputed = dict.fromkeys(self.base_recomputed)
        for gather in self.base_recomputed:
            if nodes.is_unshard(gather) and UnshardArgs.of(gather).layout.zero_stage == 3 and gather in self.required:
                kept = gather
                while len(kept.users) == 1 and traits.cast_dtype(user := next(iter(kept.users))) and user in recomputed:
                    kept = user
                if self.lies_in[kept]:  # on a single rank nothing is gathered
                    yield Value((kept,), gather)

    def _activations(self) -> Iterator[Value]:
        """Yield a value for each storage of saved activations, without those that an output of the user keeps alive."""
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
        """The calls that forward must make for the user's outputs and for the values `saved`, in order."""
        needed = _ancestors([*self.user_outputs, *saved], self.forward)
        return [node for node in self.forward if node in needed or written_arguments(node)]

    def _backward(self, saved: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """The calls of backward in order, and those of them that forward runs, too, that is, the recomputed ones."""
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
    """Finds the live ranges of the storages of a step, including those that backward recomputes.

    If backward recomputes storage n, the copy is storage n + count. Readers of the recomputed node read the copy. All
    other readers, in forward or in backward, read n, which ends with the last of them. An offloaded storage n also
    comes back as storage n + count, at its first reader in backward.
    """

    def __init__(self, model: PartitionedModel, offloaded: frozenset[int] = frozenset()) -> None:
        self.model = model
        self.offloaded = offloaded
        self.count = len(model.sizes)
        self.alive = LiveRanges([*model.sizes, *model.sizes])
        self.last_forward_read: list[int] = []  # by storage: position of the last reader in forward
        self.first_backward_read: dict[int, int] = {}  # by storage: position of the first reader in backward

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
        """Positions from a value's last reader in forward to its first reader in backward, or to its copy."""
        numbers = self.model.lies_in[value.nodes[0]]
        begin = max(self.last_forward_read[number] for number in numbers) + 1
        if is_dropped:
            ends = [self.alive.first[number + self.count] for number in numbers]
        else:
            ends = [self.first_backward_read.get(number, -1) for number in numbers]
        return range(begin, min((end for end in ends if end >= 0), default=begin))


def _ancestors(ends: Iterable[fx.Node], order: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """The given nodes and all nodes of a program that they depend on."""
    needed = dict.fromkeys(ends)
    for node in reversed(order):
        if node in needed:
            needed |= dict.fromkeys(node.all_input_nodes)
    return needed


def _from_first_tangent(calls: list[fx.Node]) -> list[fx.Node]:
    """The calls from the first reader of a tangent on. Earlier calls are left out: they run where they are read."""
    first = next(
        (position for position, node in enumerate(calls) if any(map(is_tangent, node.all_input_nodes))),
        0,
    )
    return calls[first:]
