"""A schedule of a graph's communication while it is made: what may stand where, what is there already, what that costs.

Compute keeps its order. Between its nodes stand, where a scheduler puts them, the starts of
collectives with the copies into their buffers, and the waits with the copies out of them:

    slot 0   slot 1   slot 2
      |  mm_0  |  mm_1  |  output          the start of w1 goes to slot 0, its wait to where mm_1 needs it
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import Ledger
from zgraph.analysis.simulate import Clock, Sharing, Work
from zgraph.analysis.storages import Storage
from zgraph.graph import meta, nodes
from zgraph.runtime.chunks import payload_bytes
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


@dataclass(frozen=True, slots=True)
class Score:
    """How good a schedule is, less is better: bytes above the limits, then time, then the peak."""

    excess_bytes: int
    step_us: float
    peak_bytes: int


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


def problem_of(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing,
    storages: Iterable[Storage],
    limits: Limits,
) -> Problem:
    """The problem, with numbers that do not depend on where communication stands now.

    So the plan for a graph that has been scheduled is the plan by which it was.
    """
    storages = list(storages)
    builder = Builder(Problem(Work.of(order, costs, sharing), storages, limits))
    for number in builder.problem.compute_order:
        builder.pull(number)
    return Problem(Work.of(builder.nodes(), costs, sharing), storages, limits)


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


class Builder:
    """A schedule while it is made: issues nodes to the clock and the ledger, each with what it needs.

    Attributes:
        order: what is issued.
        peaks: the bytes alive while each of these runs.
        in_flight: what of the limit is taken by what is started and not yet waited for, by start, the oldest first.
        heads: of each queue, how many of its starts are issued.
        unfinished: results that only leave the graph and are not computed yet though their collectives are started, by
            these, the oldest first.
        pending_copies: copies out of buffers that are there, not issued yet.
        compute_us: compute issued so far.
        most_under_way: what of the limit was taken at worst, where it was by more than two.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.clock = Clock(problem.work)
        self.ledger = problem.ledger.copy()
        self.order: list[int] = []
        self.peaks: list[int] = []
        self.in_flight: dict[int, int] = {}
        self.heads = [0] * len(problem.queues)
        self.unfinished: dict[tuple[int, ...], None] = {}
        self.pending_copies: dict[int, None] = {}
        self.compute_us = 0.0
        self.peak_bytes = 0
        self.most_under_way = 0
        self.placed = bytearray(len(problem.work.nodes))
        self._queue_of = {start: place for place, queue in enumerate(problem.queues) for start in queue}
        for number, given in enumerate(problem.given):
            if given:
                self.issue(number)

    def copy(self) -> Builder:
        """The same state, to go on from in another way."""
        new = copy.copy(self)
        new.clock, new.ledger = self.clock.copy(), self.ledger.copy()
        new.order, new.peaks, new.placed = self.order.copy(), self.peaks.copy(), self.placed.copy()
        new.in_flight, new.heads = self.in_flight.copy(), self.heads.copy()
        new.unfinished, new.pending_copies = self.unfinished.copy(), self.pending_copies.copy()
        return new

    def next_starts(self) -> Iterator[int]:
        """The next of each queue."""
        for queue, head in zip(self.problem.queues, self.heads, strict=True):
            if head < len(queue):
                yield queue[head]

    def is_there(self, starts: Iterable[int]) -> bool:
        """Whether all these collectives are done, so that nobody waits who waits for them."""
        return all(map(self.clock.is_done, starts))

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """What these nodes need and is not issued yet, themselves included."""
        pending, found = list(wanted), dict[int, None]()
        while pending:
            number = pending.pop()
            if number not in found and not self.placed[number]:
                found[number] = None
                pending.extend(self.problem.needs[number])
        return list(found)

    def new_bytes(self, wanted: Iterable[int]) -> int:
        """What issuing these nodes, with what they need, allocates."""
        ledger = self.ledger
        return sum(ledger.sizes[storage] for number in self.missing(wanted) for storage in ledger.allocates[number])

    def pull(self, number: int) -> None:
        """Issue what a node needs, then the node; nothing where it is issued already."""
        pending = [number]
        while pending:
            node = pending[-1]
            missing = [] if self.placed[node] else [one for one in self.problem.needs[node] if not self.placed[one]]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if not self.placed[node]:
                self.issue(node)

    def finish(self, after: tuple[int, ...]) -> None:
        """Compute what only leaves the graph and is the result of these starts."""
        for number in self.problem.output_chains[after]:
            self.pull(number)

    def issue(self, number: int) -> None:
        """Issue a node whose needs are met."""
        problem = self.problem
        self.clock.issue(number)
        self.peaks.append(self.ledger.issue(number))
        self.peak_bytes = max(self.peak_bytes, self.peaks[-1])
        self.order.append(number)
        self.placed[number] = True
        if problem.work.lane[number] == Work.ON_COMPUTE:
            self.compute_us += problem.work.us[number]
        if problem.is_start[number]:
            self._note_start(number)
        elif number in problem.start_of:
            self.in_flight.pop(problem.start_of[number], None)
        if problem.movable[number]:
            self._note_copies(number)

    def _note_start(self, start: int) -> None:
        problem = self.problem
        self.heads[self._queue_of[start]] += 1
        self.in_flight[start] = problem.limited_bytes[start]
        limited = [size for size in self.in_flight.values() if size]
        if len(limited) > 2:
            self.most_under_way = max(self.most_under_way, sum(limited))
        for after in problem.output_chains_of.get(start, ()):
            if all(self.placed[one] for one in after):
                self.unfinished[after] = None

    def _note_copies(self, number: int) -> None:
        problem, after = self.problem, self.problem.after[number]
        self.pending_copies.pop(number, None)
        for user in problem.users[number] if after or problem.is_start[number] else ():
            if problem.comes_along[user] and all(self.placed[one] for one in problem.needs[user]):
                self.issue(user)
            elif problem.movable[user] and not problem.is_start[user] and user not in problem.start_of:
                self.pending_copies[user] = None
        if after in self.unfinished and all(self.placed[one] for one in problem.output_chains[after]):
            del self.unfinished[after]

    def nodes(self) -> list[fx.Node]:
        return [self.problem.work.nodes[number] for number in self.order]

    def excess_bytes(self, limits: Limits) -> int:
        """By how much limits were exceeded at worst, so far."""
        memory = 0 if limits.budget_bytes is None else self.peak_bytes - limits.budget_bytes
        return max(0, memory, self.most_under_way - limits.in_flight_bytes)

    def score(self, limits: Limits | None = None) -> Score:
        """Of the whole, when everything is issued, against the problem's limits or others."""
        self.clock.drain()
        return Score(self.excess_bytes(limits or self.problem.limits), self.clock.now, self.peak_bytes)


SAME = 1e-2  # of the step: no prediction is better than that


def choose(found: Sequence[Builder]) -> Builder:
    """The best of several schedules: within the limits, fast, and of equally fast ones that with the least peak."""
    scores = [builder.score() for builder in found]
    excess = min(score.excess_bytes for score in scores)
    fastest = min(score.step_us for score in scores if score.excess_bytes == excess)
    good = [
        place
        for place, score in enumerate(scores)
        if score.excess_bytes == excess and score.step_us <= fastest * (1 + SAME)
    ]
    return found[min(good, key=lambda place: (scores[place].peak_bytes, scores[place].step_us))]


def is_no_better(score: Score, known: Score) -> bool:
    """Whether a schedule gains nothing over a known one."""
    if score.excess_bytes != known.excess_bytes:
        return score.excess_bytes > known.excess_bytes
    if not math.isclose(score.step_us, known.step_us, rel_tol=1e-9):
        return score.step_us > known.step_us
    return score.peak_bytes >= known.peak_bytes
