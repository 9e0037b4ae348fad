"""A model of a whole training step in one graph that trades memory for time: what each backward recomputes.

forward   a b c d           a, b, c are read in backward
backward  D  C b B A        b costs nothing between its last reader in forward and where it is recomputed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import LiveRanges
from zgraph.graph import dataflow, nodes, traits
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
from zgraph.torch_compat.operators import written_arguments


class WholeStepModel(LifetimeModel):
    """A whole step: any number of forwards and backwards in one graph, then the optimizer.

    A value is a storage that one forward makes and that only this forward and its backward read. If the value is
    dropped, its backward recomputes it just before the first reader, from storages that are alive there. Casts of
    replicated parameters are always dropped, because their gathers are free.

    Args:
        graph: graph of the step, whose nodes record which forward or backward they belong to; it is not changed.
        cost_of: cost of each call.
        sharing: how lanes share links and compute.
        copies: links to the host and back; None: nothing is offloaded.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        cost_of: Callable[[fx.Node], NodeCost],
        sharing: Sharing,
        copies: HostLinks | None = None,
    ) -> None:
        super().__init__(graph, cost_of=cost_of, sharing=sharing, copies=copies)
        self.calls = list(self.costs)
        self.part = dataflow.parts_of(graph)
        self.backward = [node for node in self.calls if self.part[node] % 2]
        self.returned = [node for node in nodes.returned_by(graph) if isinstance(node, fx.Node)]
        self.effects = {node for node in self.calls if written_arguments(node) or node.is_impure()}
        self.spoiled = self._spoiled()
        self.crossing = self._crossing()
        self.gathered_once = self._gathered_once(graph)
        gathers = self._gathers(graph)
        values = [Value(tuple(found), gathers.get(number)) for number, found in self._candidates()]
        replicated = [value for value in values if value.gather is not None and _stage(value.gather) == 0]
        self.always = dict.fromkeys(replicated)
        self.values = [value for value in values if value not in self.always]
        self.required = self._required()
        self._asked: tuple[StepEstimate, set[int], set[fx.Node]] | None = None

    # --- what can be dropped

    def _spoiled(self) -> set[fx.Node]:
        """Nodes whose memory is overwritten before the last backward ends. Later readers would see other data."""
        last = max((place for place, node in enumerate(self.calls) if self.part[node] % 2), default=-1)
        places = self.placed.lies_in
        written = {
            number for node in self.calls[: last + 1] for target in written_arguments(node) for number in places[target]
        }
        return {node for node, numbers in places.items() if written & {*numbers}}

    def _crossing(self) -> dict[int, dict[fx.Node, None]]:
        """For each storage, its nodes that are made by a forward and read by the backward of this forward."""
        found: dict[int, dict[fx.Node, None]] = {}
        for node in self.backward:
            for source in self.reads[node]:
                if source.op == "call_function" and self.part[source] == self.part[node] - 1:
                    for number in self.lies_in[source]:
                        found.setdefault(number, {})[source] = None
        return found

    def _candidates(self) -> Iterator[tuple[int, list[fx.Node]]]:
        for number, found in self.crossing.items():
            storage = self.placed.storages[number]
            if storage.outlives or storage.first.op != "call_function":
                continue
            forward = self.part[storage.first]
            readers = {self.part.get(reader) for reader in storage.readers}  # the output has no part
            if readers <= {forward, forward + 1} and all(self.lies_in[node] == (number,) for node in found):
                yield number, list(found)

    def _gathers(self, graph: fx.Graph) -> dict[int, fx.Node]:
        """Gathers of stages 0 and 3. The keys are the storages of a gather, and of its views, casts and copies."""
        found: dict[int, fx.Node] = {}
        for marker in nodes.call_functions(graph, nodes.is_unshard):
            if _stage(marker) in (0, 3):
                for node in dataflow.reshaped_values(marker):
                    found |= dict.fromkeys(self.lies_in[node], marker)
        return found

    def _required(self) -> dict[fx.Node, None]:
        """Nodes that forwards always run: for the user, for later parts, and for values that cannot be recomputed."""
        fixed = {node for found in self.crossing.values() for node in found}
        fixed -= {node for value in (*self.values, *self.always) for node in value.nodes}
        needed = dict.fromkeys([*self.returned, *fixed, *self.effects])
        for node in reversed(self.calls):
            if node in needed:
                needed |= dict.fromkeys(source for source in self.reads[node] if self._may_need(node, source))
        return needed

    def _may_need(self, node: fx.Node, source: fx.Node) -> bool:
        return source.op == "call_function" and self.part[source] % 2 == 0 and self.part[node] % 2 == 0

    def chain(self, value: Value, estimate: StepEstimate) -> list[fx.Node] | None:
        forward = self.part[value.nodes[0]]
        if self._asked is None or self._asked[0] is not estimate:  # one estimate is asked about many values
            self._asked = estimate, self._gone(estimate.dropped), {*estimate.recomputed}
        _, kept_away, again = self._asked
        gone = kept_away | {*self._numbers(value)}
        found: dict[fx.Node, None] = {}
        pending = list(value.nodes)
        while pending:
            node = pending.pop()
            if node in found or node in again:
                continue
            if node in self.spoiled:
                return None
            if node.op != "call_function" or self.is_alive(node, gone, forward):
                continue
            if self.part[node] != forward or not traits.is_repeatable(node):
                return None
            found[node] = None
            pending.extend(self.reads[node])
        return list(found)

    def is_alive(self, node: fx.Node, gone: Collection[int], forward: int) -> bool:
        """Whether a node is alive in the backward of part `forward` if that backward lacks the storages `gone`."""
        own = self.crossing if self.part[node] == forward else ()
        return all(
            number in self.gathered_once or (number in own and number not in gone) for number in self.lies_in[node]
        )

    def _gathered_once(self, graph: fx.Graph) -> set[int]:
        """Storages of gathered parameters of stages 1 and 2, which live until their last reader."""
        markers = nodes.call_functions(graph, nodes.is_unshard)
        return {number for marker in markers if _stage(marker) in (1, 2) for number in self.lies_in[marker]}

    def base_of(self, value: Value) -> fx.Node | None:
        """The node to offload for a value: below all views that backward reads. None if it cannot be offloaded."""
        if value.gather is not None or any(node in self.spoiled for node in value.nodes):
            return None
        (base, *others) = dict.fromkeys(map(self._without_views, value.nodes))
        return None if others or traits.is_view(base) else base

    def _without_views(self, node: fx.Node) -> fx.Node:
        while traits.is_view(node) and self.lies_in[source := self.reads[node][0]] == self.lies_in[node]:
            node = source
        return node

    def _gone(self, dropped: Mapping[Value, None]) -> set[int]:
        return {number for value in (*dropped, *self.always) for number in self._numbers(value)}

    def _numbers(self, value: Value) -> tuple[int, ...]:
        return self.lies_in[value.nodes[0]]

    # --- one step

    def estimate(self, dropped: Mapping[Value, None], offloaded: Mapping[Value, None] = NONE_OFFLOADED) -> StepEstimate:
        again = self._again(self._gone(dropped))
        copied = {node for found in again.values() for node in found}
        replay = _Replay(self, again, copied, self.numbers_of(offloaded))
        busy: dict[int, list[NodeCost]] = {}
        for node, part in replay.ran:
            busy.setdefault(part, []).append(self.costs[node])
        copying = self._copying_in_parts(offloaded)
        lane_us: dict[Lane, float] = {}
        step_us = 0.0
        for part, costs in busy.items():
            in_part = busy_us(costs) | copying.get(part, {})
            step_us += self.at_best(in_part)
            for lane, us in in_part.items():
                lane_us[lane] = lane_us.get(lane, 0.0) + us
        return StepEstimate(
            dropped=dict(dropped),
            saved=(),
            recomputed=tuple(node for found in again.values() for node in found),
            anchors=tuple(anchor for anchor, found in again.items() for _ in found),
            bytes_during=replay.alive.bytes_during(),
            lane_us=lane_us,
            step_us=step_us,
            gaps={
                value: replay.gap(self._numbers(value), value in dropped or value in offloaded) for value in self.values
            },
            offloaded=dict(offloaded),
            clock_us=clock_us(self.costs[node] for node, _ in replay.ran),
        )

    def _copying_in_parts(self, offloaded: Mapping[Value, None]) -> dict[int, dict[Lane, float]]:
        """Time on each lane to copy the values `offloaded`, by part: to the host in a forward, back in its backward."""
        by_forward: dict[int, dict[Value, None]] = {}
        for value in offloaded:
            by_forward.setdefault(self.part[value.nodes[0]], {})[value] = None
        return {
            forward + behind: lanes
            for forward, values in by_forward.items()
            for behind, lanes in enumerate(self.copying(values))
        }

    def _again(self, gone: set[int]) -> dict[fx.Node, list[fx.Node]]:
        """Nodes that backwards recompute, keyed by the node before which they run."""
        found: dict[fx.Node, list[fx.Node]] = {}
        there: set[fx.Node] = set()
        for node in self.backward:
            missing: dict[fx.Node, None] = {}
            pending = list(self.reads[node])
            while pending:
                source = pending.pop()
                if source.op != "call_function" or self.part[source] != self.part[node] - 1:
                    continue
                if source not in there and source not in missing and not self.is_alive(source, gone, self.part[source]):
                    missing[source] = None
                    pending.extend(self.reads[source])
            if missing:
                there |= missing.keys()
                found[node] = sorted(missing, key=self.order.__getitem__)
        return found


class _Replay:
    """Finds the live ranges of a step's storages. A recomputed or reloaded copy of storage n is storage n + count.

    Attributes:
        ran: calls that run, each with the part in which it runs.
    """

    def __init__(
        self,
        model: WholeStepModel,
        again: Mapping[fx.Node, list[fx.Node]],
        copied: set[fx.Node],
        offloaded: frozenset[int],
    ) -> None:
        self.model, self.copied, self.offloaded = model, copied, offloaded
        self.count = len(model.sizes)
        self.alive = LiveRanges([*model.sizes, *model.sizes])
        self.last_forward_read: dict[int, int] = {}
        self.first_backward_read: dict[int, int] = {}
        self.ran: list[tuple[fx.Node, int]] = []
        self.places: dict[tuple[fx.Node, bool], tuple[int, ...]] = {}  # storages by node and `is_copy`
        unread = self._unread()
        for node in model.calls:
            for source in again.get(node, ()):
                self._run(source, model.part[node], is_copy=True)
            if node not in unread:
                self._run(node, model.part[node], is_copy=False)
        lasting = [place for place, storage in enumerate(model.placed.storages) if storage.outlives]
        self.alive.keep(place for place in lasting if self.alive.first[place] >= 0)
        self.alive.keep(place for node in model.returned for place in self._place_of(node, False))

    def gap(self, numbers: tuple[int, ...], is_dropped: bool) -> range:
        """Positions from a value's last reader in forward to its first reader in backward, or to its copy."""
        begin = max((self.last_forward_read.get(number, self.alive.first[number]) for number in numbers), default=0) + 1
        if is_dropped:
            ends = [self.alive.first[number + self.count] for number in numbers]
        else:
            ends = [self.first_backward_read.get(number, -1) for number in numbers]
        return range(begin, min((end for end in ends if end >= 0), default=begin))

    def _unread(self) -> set[fx.Node]:
        """Nodes that no longer have readers, because backward reads the recomputed copies."""
        model = self.model
        unread: set[fx.Node] = set()
        for node in sorted(self.copied, key=model.order.__getitem__, reverse=True):
            behind = model.part[node] + 1
            if all(user in unread or model.part.get(user) == behind for user in node.users):
                unread.add(node)
        return unread

    def _place_of(self, node: fx.Node, is_copy: bool) -> tuple[int, ...]:
        return self.places.get((node, is_copy), self.model.lies_in.get(node, ()))

    def _run(self, node: fx.Node, part: int, *, is_copy: bool) -> None:
        model = self.model
        places: dict[int, int] = {}
        for source in model.reads[node]:
            from_copy = source in self.copied and part == model.part[source] + 1
            places |= zip(model.lies_in[source], self._place_of(source, from_copy), strict=True)
        makes = {number: number + self.count if is_copy else number for number in model.makes.get(node, ())}
        self.places[node, is_copy] = tuple(makes.get(n, places.get(n, n)) for n in model.lies_in[node])
        reads = () if nodes.is_getitem(node) else places.values()  # it directly follows the call that it reads
        made = list(makes.values())
        if part % 2 and not self.offloaded.isdisjoint(reads):
            reads = [number + self.count if number in self.offloaded else number for number in reads]
            made += [n for n in dict.fromkeys(reads) if n >= self.count and self.alive.first[n] < 0 and n not in made]
        here = self.alive.run(made, reads, model.workspace.get(node, 0))
        self.ran.append((node, part))
        for number in reads:
            if part % 2:
                self.first_backward_read.setdefault(number, here)
            else:
                self.last_forward_read[number] = here


def _stage(marker: fx.Node) -> int:
    return UnshardArgs.of(marker).layout.zero_stage
