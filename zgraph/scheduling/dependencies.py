"""Dependency graph of a program: the order that nodes must keep, and the slots into which each movable node may go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from zgraph.analysis.hazards import hazards
from zgraph.graph import nodes, traits
from zgraph.scheduling.simulate import Work


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Dependency graph of a program. Nodes are numbers, see `Work`.

    Slot p is the gap before the p-th compute node. Compute nodes keep their order; movable nodes are placed in slots.

    Attributes:
        needs: for each node, the nodes that must be issued earlier: its inputs, earlier accesses to the same memory
            that conflict with it, and, if it is a start in a queue, the previous start of the queue.
        users: for each node, the nodes that need it; the order of a queue does not count.
        given: whether each node is an input of the graph, which is never issued.
        movable: whether the scheduler chooses the place of each node.
        is_start: whether each node starts a movable collective, or a movable copy between memory spaces.
        is_reload: whether each node starts a copy to the device.
        feeds: for each copy to the device, the gathers of its result.
        is_release: whether each node is a wait that frees memory: for a copy from the device, or for an update
            concurrent with compute. The output needs all of these waits.
        comes_along: whether each node is a view of a collective's input or result. Such views are issued together with
            the collective, because their number may differ between ranks.
        compute_order: compute nodes (neither inputs nor movable) in program order; the last is the output.
        rank: index of each compute node in `compute_order`.
        after: for each movable node, the nearest starts that it depends on through movable nodes only.
        release: for each movable node, the first slot in which all compute that it needs is done.
        use: for each movable node, the slot before the first compute node that needs it.
    """

    needs: Sequence[Sequence[int]]
    users: Sequence[Sequence[int]]
    given: Sequence[bool]
    movable: Sequence[bool]
    is_start: Sequence[bool]
    is_reload: Sequence[bool]
    feeds: Mapping[int, Sequence[int]]
    is_release: Sequence[bool]
    comes_along: Sequence[bool]
    compute_order: Sequence[int]
    rank: dict[int, int]
    after: Sequence[tuple[int, ...]]
    release: Sequence[int]
    use: Sequence[int]

    @classmethod
    def of(cls, work: Work) -> Dependencies:
        """Return the dependencies of a program; `in_queues` adds the order of the queues."""
        ahead = hazards(work.nodes)
        given = [node.op in ("placeholder", "get_attr") for node in work.nodes]
        movable = [traits.is_movable(node) for node in work.nodes]
        is_start = [moves and nodes.is_start(node) for moves, node in zip(movable, work.nodes, strict=True)]
        compute_order = [number for number, moves in enumerate(movable) if not moves and not given[number]]
        needs = [[work.numbers[source] for source in node.all_input_nodes] for node in work.nodes]
        users = [[work.numbers[user] for user in node.users] for node in work.nodes]
        for node, earlier in ahead.items():
            number = work.numbers[node]
            for one in (work.numbers[source] for source in earlier):
                if movable[number] or movable[one]:  # compute keeps its order anyway
                    needs[number].append(one)
                    users[one].append(number)
        is_release = list(map(_is_release, work.nodes))
        output = compute_order[-1]
        for number in filter(is_release.__getitem__, range(len(is_release))):
            if output not in users[number]:
                needs[output].append(number)
                users[number].append(output)
        found = cls(
            needs=needs,
            users=users,
            given=given,
            movable=movable,
            is_start=is_start,
            is_reload=[nodes.is_reload(node) for node in work.nodes],
            feeds={},
            is_release=is_release,
            comes_along=[
                moves and not starts and lane == Work.IN_NO_TIME
                for moves, starts, lane in zip(movable, is_start, work.lane, strict=True)
            ],
            compute_order=compute_order,
            rank={number: place for place, number in enumerate(compute_order)},
            after=(),
            release=(),
            use=(),
        )
        release, after = found._look_back(work.update_of)
        found = replace(found, release=release, after=after, use=found._look_ahead({}))
        return replace(found, feeds=found._fed())

    def in_queues(self, queues: Sequence[Sequence[int]]) -> Dependencies:
        """Return the same dependencies, in which each start of a queue also needs the previous start of the queue."""
        needs, release = list(self.needs), list(self.release)
        following: dict[int, int] = {}
        for queue in queues:
            for before, start in pairwise(queue):
                following[before] = start
                needs[start] = [before, *self.needs[start]]
                release[start] = max(release[start], release[before])
        return replace(self, needs=needs, release=release, use=self._look_ahead(following))

    def reads_inputs_alone(self, start: int) -> bool:
        """Return whether a collective needs only inputs of the graph, as the gather of a parameter does."""
        return not self.release[start] and not self.after[start]

    def is_fetch(self, start: int) -> bool:
        """Return whether a start only fetches data for later compute, so that it need not run as early as possible."""
        return self.is_reload[start] or self.reads_inputs_alone(start) or self.is_fed(start)

    def is_fed(self, start: int) -> bool:
        """Return whether a collective needs copies to the device, and no compute."""
        after = self.after[start]
        return bool(after) and not self.release[start] and all(self.is_reload[one] for one in after)

    def output_chains(self) -> dict[tuple[int, ...], list[int]]:
        """Return the chains of nodes that turn results of collectives into graph outputs, keyed by the collectives.

        Waits that free memory are included, because no node before the output needs them.
        """
        output = self.compute_order[-1]
        chains: dict[tuple[int, ...], list[int]] = {}
        for number in self.needs[output]:
            needs_more = self.release[number] > max((self.release[start] for start in self.after[number]), default=-1)
            if self.movable[number] and not needs_more and self.use[number] == self.rank[output]:
                chains.setdefault(self.after[number], []).append(number)
        for number in filter(self.is_release.__getitem__, range(len(self.needs))):
            chains.setdefault(self.after[number], [number])
        return chains

    def _fed(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for start, is_start in enumerate(self.is_start):
            if is_start and not self.is_reload[start] and self.is_fed(start):
                for one in self.after[start]:
                    found.setdefault(one, []).append(start)
        return found

    def _look_back(self, update_of: Mapping[int, int]) -> tuple[list[int], list[tuple[int, ...]]]:
        release = [0] * len(self.movable)
        after: list[tuple[int, ...]] = [()] * len(self.movable)
        for number, moves in enumerate(self.movable):
            if not moves:
                continue
            nearest: dict[int, None] = {}
            for source in self.needs[number]:
                if self.movable[source]:
                    release[number] = max(release[number], release[source])
                    nearest |= dict.fromkeys((source,) if self.is_start[source] else after[source])
                elif source in self.rank:
                    release[number] = max(release[number], self.rank[source] + 1)
            after[number] = (update_of[number],) if number in update_of else tuple(nearest)
        return release, after

    def _look_ahead(self, following: dict[int, int]) -> list[int]:
        use = [len(self.compute_order) - 1] * len(self.movable)
        for number in reversed(range(len(use))):
            if self.movable[number]:
                users = [*self.users[number], *([following[number]] if number in following else ())]
                slots = [use[user] if self.movable[user] else self.rank[user] for user in users]
                use[number] = min(slots, default=use[number])
        return use


def _is_release(node: fx.Node) -> bool:
    return nodes.is_update_wait(node) or (nodes.is_copy_wait(node) and not nodes.is_reload(nodes.start_of(node)))
