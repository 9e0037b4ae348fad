"""Find good schedules, by greedy searches in several styles, and by a beam search if the graph is small enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Literal

from zgraph.scheduling.beam_search import Beam, Bounds
from zgraph.scheduling.builder import Builder, choose, scheduled
from zgraph.scheduling.problem import Problem

WIDTH = 24  # most schedules that the beam search keeps; it does not run with fewer than 4
SLOTS = 600  # slots that it may fill over all kept schedules: a second or two
RETRIES = 3  # of a greedy search that exceeds the budget


def find_schedules(problem: Problem) -> list[Builder]:
    """Return candidate schedules, some of which may exceed the limits: one for each style, and one by beam search.

    All ranks get the same result, even if they make different numbers of copies for their rows. The time is nearly
    linear in the number of nodes.
    """
    frugal = Greedy(problem, FRUGAL)
    found = [frugal.run()]
    if problem.queues.queues:
        found += [_within_budget(problem, style, frugal.slot_peaks) for style in STYLES]
        width = min(WIDTH, SLOTS // len(problem.dependencies.compute_order))
        if width >= 4 and not _is_perfect(choose(found)):
            found.append(Beam(problem, width).run())
    return found


def _within_budget(problem: Problem, style: Style, expected_peaks: Sequence[int]) -> Builder:
    """Return the schedule of a greedy search, which is repeated if it exceeds the budget.

    A search expects each slot to hold what the frugal search held there. Early fetches can meet temporary values that
    the frugal search had freed before its fetches began: each attempt expects what surprised the one before.
    """
    greedy = Greedy(problem, style, expected_peaks)
    found = greedy.run()
    budget = problem.limits.budget_bytes
    for _ in range(RETRIES):
        if budget is None or found.peak_bytes <= budget:
            break
        expected_peaks = list(map(add, expected_peaks, greedy.unexpected_bytes()))
        greedy = Greedy(problem, style, expected_peaks)
        found = greedy.run()
    return found


class Search:
    """Search for schedules with a cache, for passes that schedule copies of a graph before the graph itself.

    The keys of the cache are problems with numbers in place of nodes, so the cache keeps no graph alive.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Problem, list[list[int]]]] = []

    def schedules(self, problem: Problem) -> list[Builder]:
        """Return the result of `find_schedules`; from the cache if an equal problem is in it."""
        numbers = problem.by_numbers()
        orders = next((orders for known, orders in self._known if known == numbers), None)
        if orders is not None:
            nodes = problem.work.nodes
            return [scheduled(problem, [nodes[number] for number in order]) for order in orders]
        found = find_schedules(problem)
        self._known.append((numbers, [one.order for one in found]))
        return found


def _is_perfect(found: Builder) -> bool:
    """Return whether a schedule keeps the limits and is as fast as the lower bound of its problem."""
    score = found.score()
    least = Bounds(found.problem).of(Builder(found.problem)).end_us
    return not score.excess_bytes and math.isclose(score.step_us, least, rel_tol=1e-9)


@dataclass(frozen=True, kw_only=True)
class Style:
    """Rules of one greedy search, which fills the slots (gaps between compute nodes).

    Attributes:
        gathers: when to start each gather: where its result is needed ("at_use"), just early enough to be hidden
            ("ahead"), just before its link becomes idle ("in_time"), or as soon as the limits allow ("at_once"). Copies
            from the host start "at_use" if gathers do, else "ahead".
        finish: when to run the nodes that turn results of collectives into outputs: immediately, even if this blocks
            ("at_once"); when the collective has finished ("done"); or when memory is needed or compute must wait anyway
            ("late").
    """

    gathers: Literal["at_use", "ahead", "in_time", "at_once"]
    finish: Literal["at_once", "done", "late"]


FRUGAL = Style(gathers="at_use", finish="at_once")
STYLES = (
    Style(gathers="ahead", finish="late"),
    Style(gathers="ahead", finish="done"),
    Style(gathers="in_time", finish="late"),
    Style(gathers="in_time", finish="done"),
    Style(gathers="at_once", finish="late"),
    Style(gathers="at_once", finish="done"),
    Style(gathers="at_use", finish="done"),
)


class Greedy:
    """Greedy search in one style, which fills one slot (gap between compute nodes) after another.

    Attributes:
        slot_peaks: most bytes alive between the begin of each slot and the end of the compute node after the slot.
    """

    def __init__(self, problem: Problem, style: Style, frugal_peaks: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.style = style
        self.builder = Builder(problem)
        self.slot_peaks: list[int] = []
        self._latest = {} if style.gathers == "at_use" else latest_starts(problem)
        # Least bytes that each slot will hold, including gathers started before their use.
        self._expected = None
        if frugal_peaks is not None and problem.limits.budget_bytes is not None:
            self._expected = Skyline(frugal_peaks)

    def run(self) -> Builder:
        problem, builder = self.problem, self.builder
        compute_order, needs = problem.dependencies.compute_order, problem.dependencies.needs
        last = len(compute_order) - 1
        for slot, number in enumerate(compute_order):
            issued = len(builder.peaks)
            if slot == last:
                self._wind_up(slot)
            elif problem.work.us[number] or not all(builder.placed[source] for source in needs[number]):
                self._fill(slot)
                self._make_room(number)
            builder.pull(number)
            self.slot_peaks.append(max(builder.peaks[issued:]))
        return builder

    def unexpected_bytes(self) -> list[int]:
        """Return by how many bytes the peak of each slot exceeded the peak that the search expected there."""
        assert self._expected is not None  # there is a budget
        expected = (self._expected.highest(slot, slot + 1) for slot in range(len(self.slot_peaks)))
        return [max(0, peak - most) for peak, most in zip(self.slot_peaks, expected, strict=True)]

    def _fill(self, slot: int) -> None:
        """Start all collectives that are due in this slot, in the order of the queues."""
        again = True
        while again:
            again = False
            while self.style.finish != "late" and self._finish_oldest(wait=self.style.finish == "at_once"):
                pass
            for start in self.builder.next_starts():
                if self._is_due(start, slot) and self._fits(start, slot):
                    self._start(start, slot)
                    again = True
                    break

    def _is_due(self, start: int, slot: int) -> bool:
        dependencies = self.problem.dependencies
        if dependencies.release[start] > slot:
            return False
        if (dependencies.is_reload[start] or dependencies.is_fed(start)) and not self._is_ready(start):
            return False  # compute would wait for its inputs
        gathers = dependencies.is_fetch(start) and not dependencies.is_reload[start]
        if gathers and self.style.gathers == "in_time":
            return self._runs_dry(start, slot)
        if dependencies.is_reload[start] or (gathers and self.style.gathers != "at_once"):
            return self._latest.get(start, math.inf) < self.problem.compute_at[slot + 1]
        return self.builder.is_there(dependencies.after[start])

    def _is_ready(self, start: int) -> bool:
        return self.builder.is_there(self.problem.dependencies.after[start])

    def _runs_dry(self, start: int, slot: int) -> bool:
        """Return whether `start` must be issued now to keep its link busy until the program can next issue a start.

        The estimate has a margin of (1 + the link's capacity) times the time of `start`.
        """
        queues, clock, work = self.problem.queues, self.builder.clock, self.problem.work
        link = queues.link_of[start]
        capacity = queues.capacity_of[start]
        number = self.problem.dependencies.compute_order[slot]
        waited_for = [queues.start_of[one] for one in self.builder.missing([number]) if one in queues.start_of]
        blocked_us = [
            clock.backlog_us(work.lane[one], one) / queues.capacity_of[one]
            for one in waited_for
            if self.builder.placed[one] and not clock.is_done(one)
        ]
        until_next_us = max(blocked_us, default=0.0) + work.us[number]
        queued_us = sum(clock.backlog_us(lane) for lane, other in enumerate(work.links) if other == link)
        turn_us = (1 + math.ceil(capacity)) * work.us[start]
        return (queued_us - turn_us) / capacity < until_next_us

    def _fits(self, start: int, slot: int) -> bool:
        """Return whether the limits allow `start` in this slot, after finishing reductions if this makes room."""
        while not (self._fits_in_flight(start) and self._fits_in_memory(start, slot)):
            if not self._finish_oldest(wait=False):
                return False
        return True

    def _fits_in_flight(self, start: int) -> bool:
        size = self.problem.queues.limited_bytes[start]
        outstanding = [other for other in self.builder.in_flight.values() if other]
        return not size or len(outstanding) < 2 or sum(outstanding) + size <= self.problem.limits.in_flight_bytes

    def _fits_in_memory(self, start: int, slot: int) -> bool:
        builder, dependencies = self.builder, self.problem.dependencies
        budget = self.problem.limits.budget_bytes
        if budget is None:
            return True
        needed = builder.new_bytes([start])
        if builder.ledger.alive_bytes + needed > budget:
            # A reduction can wait for collectives in flight to free memory; with none, waiting only keeps its gradient.
            return not dependencies.is_fetch(start) and not builder.in_flight
        if self._expected is None or not dependencies.is_fetch(start):
            return True
        return self._expected.highest(slot, max(slot + 1, dependencies.use[start])) + needed <= budget

    def _start(self, start: int, slot: int) -> None:
        dependencies = self.problem.dependencies
        if self._expected is not None and dependencies.is_fetch(start):
            self._expected.raise_by(self.builder.new_bytes([start]), slot, dependencies.use[start])
        self.builder.pull(start)

    def _make_room(self, number: int) -> None:
        """Finish reductions while node `number` waits for collectives anyway, or if it needs the reductions' memory."""
        builder, start_of = self.builder, self.problem.queues.start_of
        missing = builder.missing([number])
        waited_for = dict.fromkeys(start_of[one] for one in missing if one in start_of)
        while not builder.is_there(waited_for) and self._finish_oldest(wait=False):
            pass
        for start in waited_for:
            while not builder.placed[start] and not self._fits_in_flight(start) and self._finish_oldest(wait=True):
                pass
        budget = self.problem.limits.budget_bytes
        if budget is not None:
            needed = builder.new_bytes([number])
            while builder.ledger.alive_bytes + needed > budget and self._finish_oldest(wait=True):
                pass

    def _finish_oldest(self, *, wait: bool) -> bool:
        """Finish the oldest reduction, and return whether one was finished.

        If `wait` is False, a reduction that would block is not finished.
        """
        after = next(iter(self.builder.unfinished), None)
        if after is None or not (wait or self.builder.is_there(after)):
            return False
        self.builder.finish(after)
        return True

    def _wind_up(self, slot: int) -> None:
        """Issue all remaining nodes: due starts, finished reductions, then the start whose inputs are ready first."""
        while True:
            self._fill(slot)
            if self._finish_oldest(wait=False):
                continue
            start = min(self.builder.next_starts(), key=self._ready, default=None)
            if start is not None and (self._fits(start, slot) or not self._finish_oldest(wait=True)):
                self.builder.pull(start)
            elif start is None and not self._finish_oldest(wait=True):
                return

    def _ready(self, start: int) -> float:
        """Return when the last collective on which `start` depends begins, in microseconds."""
        return max((self.builder.clock.begin[before] for before in self.problem.dependencies.after[start]), default=0.0)


class Skyline:
    """List of heights in which raising a range and finding the maximum of a range take logarithmic time."""

    def __init__(self, heights: Sequence[int]) -> None:
        self.size = len(heights)
        # A binary tree, leaves stored after inner nodes: each node is the higher of its children, plus its own raise.
        self._highest = [0] * self.size + list(heights)
        self._raised = [0] * self.size
        for node in reversed(range(1, self.size)):
            self._highest[node] = max(self._highest[2 * node], self._highest[2 * node + 1])

    def raise_by(self, amount: int, begin: int, end: int) -> None:
        """Add `amount` to the heights with indices begin to end - 1."""
        left, right = begin + self.size, end + self.size
        for node in self._cover(begin, end):
            self._highest[node] += amount
            if node < self.size:
                self._raised[node] += amount
        for node in (left, right - 1) if begin < end else ():
            while node > 1:
                node >>= 1
                below = max(self._highest[2 * node], self._highest[2 * node + 1])
                self._highest[node] = below + self._raised[node]

    def highest(self, begin: int, end: int) -> int:
        """Return the maximum of the heights with indices begin to end - 1; the range must not be empty."""
        found = [self._raised_above(node) + self._highest[node] for node in self._cover(begin, end)]
        return max(found)

    def _cover(self, begin: int, end: int) -> Iterator[int]:
        left, right = begin + self.size, end + self.size
        while left < right:
            if left & 1:
                yield left
            if right & 1:
                yield right - 1
            left, right = (left + 1) >> 1, right >> 1

    def _raised_above(self, node: int) -> int:
        raised = 0
        while node > 1:
            node >>= 1
            raised += self._raised[node]
        return raised


def latest_starts(problem: Problem) -> dict[int, float]:
    """Return the latest start time of each gather, and of each copy from the host, at which compute still hides it.

    Times are microseconds of compute done. Each gather or copy must end before its result is needed, and before the
    next one on its link starts. Reductions are assumed to start as early as possible and to occupy their link.
    """
    dependencies = problem.dependencies
    starts: dict[str, list[int]] = {}
    for start, link in problem.queues.link_of.items():
        starts.setdefault(link, []).append(start)
    latest: dict[int, float] = {}
    # First gathers, then the copies that bring their inputs, on other links.
    for reloads in (False, True):
        for on_link in starts.values():
            fetches = [start for start in on_link if dependencies.is_fetch(start)]
            if any(dependencies.is_reload[start] for start in fetches) == reloads:
                latest |= _latest_on(problem, on_link, fetches, latest)
    return latest


def _latest_on(
    problem: Problem, on_link: Sequence[int], fetches: Sequence[int], known: Mapping[int, float]
) -> dict[int, float]:
    """Return the latest start times on one link.

    Args:
        problem: the scheduling problem.
        on_link: all starts on the link.
        fetches: those of `on_link` that fetch data: gathers, or copies to the device.
        known: latest start times of gathers on other links; a copy must end before the gathers of its result.
    """
    dependencies = problem.dependencies
    busy = _reserved(problem, [start for start in on_link if not dependencies.is_fetch(start)])
    until = math.inf
    latest: dict[int, float] = {}
    for start in sorted(fetches, key=dependencies.use.__getitem__, reverse=True):
        needed = [problem.compute_at[dependencies.use[start]]]
        needed += [known[gather] for gather in dependencies.feeds.get(start, ()) if gather in known]
        until = latest[start] = _back(min(until, *needed), _hides(problem, start), busy)
    return latest


def _hides(problem: Problem, start: int) -> float:
    """Return the microseconds of compute that can run during one collective, if its link is never idle."""
    work = problem.work
    return work.us[start] * max(0.0, 1 / problem.queues.capacity_of[start] - work.sharing.compute_share)


def _reserved(problem: Problem, reductions: Sequence[int]) -> list[tuple[float, float]]:
    """Return the intervals in which reductions occupy a link, in microseconds of compute done."""
    release = problem.dependencies.release
    busy: list[tuple[float, float]] = []
    free = 0.0
    for start in sorted(reductions, key=release.__getitem__):
        begin = max(free, problem.compute_at[release[start]])
        free = begin + _hides(problem, start)
        busy.append((begin, free))
    return busy


def _back(until: float, us: float, busy: list[tuple[float, float]]) -> float:
    """Return the latest begin from which `us` microseconds outside the intervals `busy` remain before `until`.

    Intervals of `busy` that end after the result are removed from the list.
    """
    while busy:
        begin, end = busy[-1]
        if begin < until:
            free = max(0.0, until - end)
            if free >= us:
                break
            us -= free
            until = begin
        busy.pop()
    return until - us
