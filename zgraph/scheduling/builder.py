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

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.storages import Storage
from zgraph.scheduling.problem import SAME, Limits, Problem
from zgraph.scheduling.simulate import Clock, Work
from zgraph.scheduling.timeline import Sharing


@dataclass(frozen=True, slots=True)
class Score:
    """How good a schedule is, less is better: bytes above the limits, then time, then the peak."""

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
    """The problem, with numbers that do not depend on where communication stands now.

    So the plan for a graph that has been scheduled is the plan by which it was.
    """
    storages = list(storages)
    builder = Builder(Problem(Work.of(order, costs, sharing), storages, limits))
    for number in builder.problem.compute_order:
        builder.pull(number)
    return Problem(Work.of(builder.nodes(), costs, sharing), storages, limits)


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
        """Score of the whole, once everything is issued, against the problem's limits or others."""
        self.clock.drain()
        return Score(self.excess_bytes(limits or self.problem.limits), self.clock.now, self.peak_bytes)


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
