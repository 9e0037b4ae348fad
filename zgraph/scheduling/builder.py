"""A schedule under construction: which nodes are issued, which may be issued next, and the costs so far.

Compute nodes keep their order. Into the slots between compute nodes, a scheduler places the starts of collectives (with
copies into buffers) and their waits (with copies out of buffers):

    slot 0   slot 1   slot 2
      |  mm_0  |  mm_1  |  output          a gather of w1 starts in slot 0; its wait is in slot 1, as mm_1 reads w1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.storages import Storage
from zgraph.scheduling.problem import SAME, Limits, Problem
from zgraph.scheduling.simulate import Clock, Work
from zgraph.scheduling.timeline import Sharing


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a schedule, compared field by field; less is better.

    Attributes:
        excess_bytes: bytes above the limits.
        step_us: time of the schedule.
        peak_bytes: most bytes alive.
    """

    excess_bytes: int
    step_us: float
    peak_bytes: int


def problem_of(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing,
    storages: Iterable[Storage],
    limits: Limits,
) -> Problem:
    """Return the scheduling problem of a graph.

    The problem does not depend on the present places of collectives, so scheduling a scheduled graph changes nothing.
    """
    storages = list(storages)
    builder = Builder(Problem.of(Work.of(order, costs, sharing), storages, limits))
    for number in builder.problem.dependencies.compute_order:
        builder.pull(number)
    return Problem.of(Work.of(builder.nodes(), costs, sharing), storages, limits)


class Builder:
    """A schedule under construction: issues nodes one after another, and simulates their time and memory.

    Attributes:
        order: nodes issued so far.
        peaks: bytes alive while each node of `order` runs.
        in_flight: `limited_bytes` of each start whose wait is not issued yet; oldest start first.
        heads: number of issued starts of each queue.
        unfinished: keys of `output_chains` with all starts issued but other nodes left to issue; oldest first.
        pending_copies: copies out of buffers that can be issued next.
        compute_us: microseconds of compute issued so far.
        most_in_flight: most bytes of `in_flight` at any moment when more than two of its starts had bytes.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.clock = Clock(problem.work)
        self.ledger = problem.ledger.copy()
        self.order: list[int] = []
        self.peaks: list[int] = []
        self.in_flight: dict[int, int] = {}
        self.heads = [0] * len(problem.queues.queues)
        self.unfinished: dict[tuple[int, ...], None] = {}
        self.pending_copies: dict[int, None] = {}
        self.compute_us = 0.0
        self.peak_bytes = 0
        self.most_in_flight = 0
        self.placed = bytearray(len(problem.work.nodes))
        for number, given in enumerate(problem.dependencies.given):
            if given:
                self.issue(number)

    def copy(self) -> Builder:
        """Return an independent copy of this state."""
        new = object.__new__(Builder)
        new.__dict__.update(self.__dict__)  # faster than copy.copy, and searches copy often
        new.clock, new.ledger = self.clock.copy(), self.ledger.copy()
        new.order, new.peaks, new.placed = self.order.copy(), self.peaks.copy(), self.placed.copy()
        new.in_flight, new.heads = self.in_flight.copy(), self.heads.copy()
        new.unfinished, new.pending_copies = self.unfinished.copy(), self.pending_copies.copy()
        return new

    def next_starts(self) -> Iterator[int]:
        """Yield the next start of each queue."""
        for queue, head in zip(self.problem.queues.queues, self.heads, strict=True):
            if head < len(queue):
                yield queue[head]

    def is_there(self, starts: Iterable[int]) -> bool:
        """Return whether all these collectives have finished, so that their waits would not block."""
        return all(map(self.clock.is_done, starts))

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """Return all nodes that must still be issued so that the `wanted` nodes are issued."""
        needs = self.problem.dependencies.needs
        pending, found = list(wanted), dict[int, None]()
        while pending:
            number = pending.pop()
            if number not in found and not self.placed[number]:
                found[number] = None
                pending.extend(needs[number])
        return list(found)

    def new_bytes(self, wanted: Iterable[int]) -> int:
        """Return the bytes that issuing the `wanted` nodes, and all nodes that they need, would allocate."""
        ledger = self.ledger
        return sum(ledger.sizes[storage] for number in self.missing(wanted) for storage in ledger.allocates[number])

    def pull(self, number: int) -> None:
        """Issue a node, and before it all nodes that it needs, unless they are already issued."""
        needs = self.problem.dependencies.needs
        pending = [number]
        while pending:
            node = pending[-1]
            missing = [] if self.placed[node] else [one for one in needs[node] if not self.placed[one]]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if not self.placed[node]:
                self.issue(node)

    def finish(self, after: tuple[int, ...]) -> None:
        """Issue the nodes of the output chain `after`, which turn results of collectives into graph outputs."""
        for number in self.problem.output_chains[after]:
            self.pull(number)

    def issue(self, number: int, *, views_along: bool = True) -> None:
        """Issue a node.

        Args:
            number: the node; all nodes that it needs must already be issued.
            views_along: whether to also issue views of a collective's input or result, once all their needs are issued.
        """
        problem, dependencies, start_of = self.problem, self.problem.dependencies, self.problem.queues.start_of
        self.clock.issue(number)
        self.peaks.append(self.ledger.issue(number))
        self.peak_bytes = max(self.peak_bytes, self.peaks[-1])
        self.order.append(number)
        self.placed[number] = True
        if problem.work.lane[number] == Work.ON_COMPUTE:
            self.compute_us += problem.work.us[number]
        for after in problem.output_chains_of.get(number, ()):
            if all(self.placed[one] for one in after):
                self.unfinished[after] = None
        if dependencies.is_start[number]:
            self._note_start(number)
        elif number in start_of:
            self.in_flight.pop(start_of[number], None)
        if dependencies.movable[number]:
            self._note_copies(number, views_along)

    def _note_start(self, start: int) -> None:
        queues = self.problem.queues
        self.heads[queues.queue_of[start]] += 1
        self.in_flight[start] = queues.limited_bytes[start]
        limited = [size for size in self.in_flight.values() if size]
        if len(limited) > 2:
            self.most_in_flight = max(self.most_in_flight, sum(limited))

    def _note_copies(self, number: int, views_along: bool) -> None:
        dependencies, start_of = self.problem.dependencies, self.problem.queues.start_of
        after = dependencies.after[number]
        self.pending_copies.pop(number, None)
        for user in dependencies.users[number] if after or dependencies.is_start[number] else ():
            if (
                views_along
                and dependencies.comes_along[user]
                and all(self.placed[one] for one in dependencies.needs[user])
            ):
                self.issue(user)
            elif dependencies.movable[user] and not dependencies.is_start[user] and user not in start_of:
                self.pending_copies[user] = None
        if after in self.unfinished and all(self.placed[one] for one in self.problem.output_chains[after]):
            del self.unfinished[after]

    def nodes(self) -> list[fx.Node]:
        return [self.problem.work.nodes[number] for number in self.order]

    def excess_bytes(self, limits: Limits) -> int:
        """Return the largest excess over the limits so far, in bytes."""
        memory = 0 if limits.budget_bytes is None else self.peak_bytes - limits.budget_bytes
        return max(0, memory, self.most_in_flight - limits.in_flight_bytes)

    def score(self, limits: Limits | None = None) -> Score:
        """Return the score of the complete schedule; `limits` are by default those of the problem."""
        self.clock.drain()
        return Score(self.excess_bytes(limits or self.problem.limits), self.clock.now, self.peak_bytes)


def scheduled(problem: Problem, order: Iterable[fx.Node]) -> Builder:
    """Return a schedule with all nodes in exactly the given order."""
    builder = Builder(problem)
    for node in order:
        number = problem.work.numbers[node]
        if not builder.placed[number]:
            builder.issue(number, views_along=False)
    return builder


def choose(found: Sequence[Builder], known: Builder | None = None, limits: Limits | None = None) -> Builder:
    """Return the best schedule: least excess over the limits, then shortest time, then lowest peak.

    Args:
        found: candidates; of equally good ones, the first is returned.
        known: None, or one of the candidates: the result is not worse than `known` (see `is_worse`), unless `known`
            exceeds the limits by more than the result.
        limits: limits for the scores; None: the limits of each schedule's problem.
    """
    scores = [builder.score(limits) for builder in found]
    excess = min(score.excess_bytes for score in scores)
    good = [place for place, score in enumerate(scores) if score.excess_bytes == excess]
    bar = None if known is None else known.score(limits)
    if bar is not None and bar.excess_bytes == excess:
        good = [place for place in good if not is_worse(scores[place], bar)]
    fastest = min(scores[place].step_us for place in good)
    good = [place for place in good if _is_as_fast(scores[place].step_us, fastest)]
    return found[min(good, key=lambda place: (scores[place].peak_bytes, scores[place].step_us))]


def is_worse(score: Score, known: Score) -> bool:
    """Return whether a schedule is slower than a known one, or equally fast with a higher peak."""
    if score.step_us > known.step_us and not math.isclose(score.step_us, known.step_us, rel_tol=1e-9):
        return True
    return score.peak_bytes > known.peak_bytes and _is_as_fast(known.step_us, score.step_us)


def _is_as_fast(us: float, fastest_us: float) -> bool:
    """Return whether a time exceeds `fastest_us` by no more than the error of predictions."""
    return us <= fastest_us * (1 + SAME)
