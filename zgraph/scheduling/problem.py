"""The scheduling problem: a graph's nodes by number, which of them move, and between which slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from zgraph.analysis.liveness import Ledger
from zgraph.analysis.storages import Storage
from zgraph.graph import meta, nodes
from zgraph.runtime.chunks import payload_bytes
from zgraph.scheduling.simulate import Work
from zgraph.torch_compat.operators import written_arguments


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a schedule may hold.

    Attributes:
        budget_bytes: alive at any moment, as the memory curve counts; None: whatever it takes.
        in_flight_bytes: of whole parameters and gradients whose collectives are started and not yet waited for, as
            `limited_bytes` counts them. Two may be under way in any case: the one that is waited for, and the next.
    """

    budget_bytes: int | None = None
    in_flight_bytes: int


class Problem:
    """A graph to be scheduled, its nodes by number (`Work`).

    Attributes:
        work, limits: as given.
        given: whether each node is an input, and so takes part in no order.
        movable: whether the scheduler puts it somewhere.
        compute_order: the numbers of all others, in the order they keep, the output last. Slot p is before the p-th.
        rank: of each node of the compute order, its place there.
        inputs, users: of each node.
        needs: what must be issued before each node: its inputs, and of a start the one before it in its queue.
        is_start, limited_bytes: of each movable node, and of each start (`limited_bytes`).
        comes_along: whether each node is a view of what arrives or sets out, to be issued with it. Views are not for a
            schedule to place: which ones there are differs between ranks.
        start_of, wait_of: the one of each wait for a movable start, the other of each such start: of several the first.
        release: of each movable node: the first slot in which everything that it needs of the compute_order is there.
        use: of each movable node: the slot of the first node of the compute_order that needs it.
        after: of each movable node: the starts whose waits lie behind it, back to the next start.
        queues: starts that keep their order among themselves: of one lane, reading inputs of the graph alone or not,
            with as many collectives behind them. Gathers of parameters come first.
        output_chains: what only leaves the graph, by the starts that it is the result of.
        output_chains_of: the keys of `output_chains` that contain a start.
        compute_at: microseconds of compute ahead of each slot, when each copy stands where its result is needed; all of
            it in the last.
        compute_order_at: the same without copies, which may stand elsewhere.
    """

    def __init__(self, work: Work, storages: Iterable[Storage], limits: Limits) -> None:
        self.work = work
        self.limits = limits
        self.ledger = Ledger.of(work.numbers, storages)
        count = len(work.nodes)
        self.inputs = [[work.numbers[source] for source in node.all_input_nodes] for node in work.nodes]
        self.users = [[work.numbers[user] for user in node.users] for node in work.nodes]
        self.given = [node.op in ("placeholder", "get_attr") for node in work.nodes]
        written = _written(work.nodes)
        self.movable = [
            is_movable(node) and not any(source in written for source in node.all_input_nodes) for node in work.nodes
        ]
        self.compute_order = [number for number in range(count) if not self.movable[number] and not self.given[number]]
        self.rank = {number: place for place, number in enumerate(self.compute_order)}
        self.is_start = [self.movable[number] and nodes.is_start(node) for number, node in enumerate(work.nodes)]
        self.limited_bytes = {n: limited_bytes(work.nodes[n]) for n in range(count) if self.is_start[n]}
        self.start_of = {
            number: start
            for number, node in enumerate(work.nodes)
            if nodes.is_wait(node) and self.is_start[start := work.numbers[nodes.start_of(node)]]
        }
        self.comes_along = [
            self.movable[number] and not self.is_start[number] and lane == Work.IN_NO_TIME
            for number, lane in enumerate(work.lane)
        ]
        self.wait_of = {start: wait for wait, start in reversed(self.start_of.items())}
        self.release, self.after, depth = self._look_back()
        self.queues = self._form_queues(depth)
        self.needs = list(self.inputs)
        for queue in self.queues:
            for before, start in pairwise(queue):
                self.needs[start] = [before, *self.inputs[start]]
                self.release[start] = max(self.release[start], self.release[before])
        self.use = self._look_ahead()
        self.output_chains = self._find_output_chains()
        self.output_chains_of: dict[int, list[tuple[int, ...]]] = {}
        for after in self.output_chains:
            for start in after:
                self.output_chains_of.setdefault(start, []).append(after)
        at_use = {n: self.use[n] if self.movable[n] else self.rank.get(n, 0) for n in range(count)}
        self.compute_at = self._sum_compute(at_use)
        self.compute_order_at = self._sum_compute(self.rank)

    def gathers_parameter(self, start: int) -> bool:
        """Whether a collective reads inputs of the graph alone, so that it can start as soon as the graph does."""
        return not self.release[start] and not self.after[start]

    def link_of(self, start: int) -> str:
        """What the start's lane shares with others; "" where it takes no time."""
        lane = self.work.lane[start]
        return self.work.sharing.link_of(self.work.lanes[lane]) if lane >= 0 else ""

    def capacity_of(self, start: int) -> float:
        """How many collectives at their speed alone the start's link gets through; 1 where it takes no time."""
        return self.work.capacities.get(self.link_of(start), 1.0)

    def _look_back(self) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
        count = len(self.work.nodes)
        release, depth = [0] * count, [0] * count
        after: list[tuple[int, ...]] = [()] * count
        for number in range(count):
            if not self.movable[number]:
                continue
            behind: dict[int, None] = {}
            for source in self.inputs[number]:
                if self.movable[source]:
                    release[number] = max(release[number], release[source])
                    behind |= dict.fromkeys((source,) if self.is_start[source] else after[source])
                elif source in self.rank:
                    release[number] = max(release[number], self.rank[source] + 1)
            after[number] = tuple(behind)
            depth[number] = max((depth[start] + 1 for start in behind), default=0)
        return release, after, depth

    def _form_queues(self, depth: Sequence[int]) -> list[tuple[int, ...]]:
        queues: dict[tuple[int, bool, int], list[int]] = {}
        for start in self.limited_bytes:
            key = (self.work.lane[start], self.gathers_parameter(start), depth[start])
            queues.setdefault(key, []).append(start)
        return sorted(map(tuple, queues.values()), key=lambda queue: not self.gathers_parameter(queue[0]))

    def _look_ahead(self) -> list[int]:
        use = [len(self.compute_order) - 1] * len(self.work.nodes)
        following = {before: start for queue in self.queues for before, start in pairwise(queue)}
        for number in reversed(range(len(self.work.nodes))):
            if self.movable[number]:
                users = self.users[number] + ([following[number]] if number in following else [])
                slots = [use[user] if self.movable[user] else self.rank[user] for user in users]
                use[number] = min(slots, default=use[number])
        return use

    def _find_output_chains(self) -> dict[tuple[int, ...], list[int]]:
        output = self.compute_order[-1]
        output_chains: dict[tuple[int, ...], list[int]] = {}
        for number in self.inputs[output]:
            needs_more = self.release[number] > max((self.release[start] for start in self.after[number]), default=-1)
            if self.movable[number] and not needs_more and self.use[number] == self.rank[output]:
                output_chains.setdefault(self.after[number], []).append(number)
        return output_chains

    def _sum_compute(self, slots: Mapping[int, int]) -> list[float]:
        spent = [0.0] * (len(self.compute_order) + 1)
        for number, slot in slots.items():
            if self.work.lane[number] == Work.ON_COMPUTE:
                spent[slot + 1] += self.work.us[number]
        return list(accumulate(spent))


def is_movable(node: fx.Node) -> bool:
    """Whether the scheduler may put the node elsewhere: the communication of a parameter, and its copies.

    What only adds to a sum that waits for its window has no collective to hide, and releases its gradient. A gather
    that was put where its result is needed stays there.
    """
    if not nodes.is_communication(node) or not meta.parameters(node) or meta.is_tagged_at_use(node):
        return False
    if nodes.is_start(node):
        return nodes.wait_of(node) is not None
    return node.target is not torch.ops.zgraph.accumulate_grad.default


def limited_bytes(start: fx.Node) -> int:
    """What a collective counts against `Limits.in_flight_bytes`: the whole tensor, where its end gives memory back.

    The end of a reduction whose results are as large as what it has sent frees nothing, so that to wait for it would
    cost time and gain nothing: replicated gradients, of which each rank keeps the whole mean, and codes.
    """
    whole = nodes.whole_bytes(start)
    return 0 if nodes.copy_in(start) is None and _returned_bytes(start) >= whole else whole


def _returned_bytes(start: fx.Node) -> int:
    """Outputs of the graph that are made of what a collective brings, by communication alone."""
    pending, seen = [start], {start}
    returned = 0
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op == "output":
                value = meta.value(node)
                returned += payload_bytes(value.shape, value.dtype) if isinstance(value, torch.Tensor) else 0
            elif nodes.is_communication(user) and user not in seen:
                seen.add(user)
                pending.append(user)
    return returned


def _written(order: Iterable[fx.Node]) -> set[fx.Node]:
    """Every value that may share a storage with one that is written to: its readers must not move past the writer."""
    written: set[fx.Node] = set()
    for node in order:
        for argument in written_arguments(node):
            while nodes.is_reshaping(argument) and argument.all_input_nodes:
                argument = argument.all_input_nodes[0]
            written.update(nodes.reshaped_values(argument))
    return written


SAME = 1e-2  # of the step: no prediction is better than that
