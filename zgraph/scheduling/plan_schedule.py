"""Finds good schedules: a greedy look-ahead in several styles, and a beam search where the graph is small enough."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zgraph.scheduling.beam_search import Beam, Bounds
from zgraph.scheduling.builder import Builder, choose, scheduled
from zgraph.scheduling.problem import Problem

WIDTH = 24  # schedules that the beam search goes on with, 4 at the least
SLOTS = 600  # that it may fill, in all of them together: a second or two


def find_schedules(problem: Problem) -> list[Builder]:
    """Several schedules, within the limits where some are found, to choose from.

    Deterministic: decides by the problem alone, and not by how many copies of its own rows a rank makes. Takes time
    nearly linear in nodes.
    """
    frugal = Greedy(problem, FRUGAL)
    found = [frugal.run()]
    if problem.queues.queues:
        found += [Greedy(problem, style, frugal.slot_peaks).run() for style in STYLES]
        width = min(WIDTH, SLOTS // len(problem.dependencies.compute_order))
        if width >= 4 and not _is_perfect(choose(found)):
            found.append(Beam(problem, width).run())
    return found


class Search:
    """Finds schedules, and those of equal problems once: a graph may be tried on copies before it is ordered itself.

    What is kept refers to no graph: whatever tells two problems apart is in their numbers.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Problem, list[list[int]]]] = []

    def schedules(self, problem: Problem) -> list[Builder]:
        """What `find_schedules` returns."""
        numbers = problem.by_numbers()
        orders = next((orders for known, orders in self._known if known == numbers), None)
        if orders is not None:
            nodes = problem.work.nodes
            return [scheduled(problem, [nodes[number] for number in order]) for order in orders]
        found = find_schedules(problem)
        self._known.append((numbers, [one.order for one in found]))
        return found


def _is_perfect(found: Builder) -> bool:
    """Whether nothing can be faster."""
    score = found.score()
    least = Bounds(found.problem).of(Builder(found.problem)).end_us
    return not score.excess_bytes and math.isclose(score.step_us, least, rel_tol=1e-9)


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to fill the slots.

    Attributes:
        gathers: start each where its result is needed ("at_use"), early enough to be hidden ("ahead"), before its link
            would have nothing to do ("in_time"), or as soon as the limits allow ("at_once"). Started earlier than its
            link comes to it, a gather holds memory for nothing. Copies from the host start ahead, unless at their use.
        finish: when to compute what only leaves the graph: "at_once", as soon as its collective is "done", or "late":
            when others need the room, or the time for which they would wait.
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
    """Fills slot after slot in one style.

    Attributes:
        slot_peaks: the bytes alive in each slot at worst.
    """

    def __init__(self, problem: Problem, style: Style, frugal_peaks: Sequence[int] | None = None) -> None:
        self.problem = problem
        self.style = style
        self.builder = Builder(problem)
        self.slot_peaks: list[int] = []
        self._latest = {} if style.gathers == "at_use" else latest_starts(problem)
        # What each slot will hold at least, gathers that are ahead of their use included.
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

    def _fill(self, slot: int) -> None:
        """Start what should start in this slot, gathers first: a gradient can wait, and compute cannot."""
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
            return False  # compute would wait for what it reads
        gathers = dependencies.is_fetch(start) and not dependencies.is_reload[start]
        if gathers and self.style.gathers == "in_time":
            return self._runs_dry(start, slot)
        if dependencies.is_reload[start] or (gathers and self.style.gathers != "at_once"):
            return self._latest.get(start, math.inf) < self.problem.compute_at[slot + 1]
        return self.builder.is_there(dependencies.after[start])

    def _is_ready(self, start: int) -> bool:
        return self.builder.is_there(self.problem.dependencies.after[start])

    def _runs_dry(self, start: int, slot: int) -> bool:
        """Whether a link, when the program next comes to start something, has less to do than fills it and one more."""
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
        """Whether the limits let it start here, where need be after what is done has been finished."""
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
            # Where others will make room a reduction can wait for it; where nobody will, that only keeps its gradient.
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
        """Finish reductions where what comes next needs their memory, or the time until it can run."""
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
        """Finish the oldest reduction; False where there is none, or where that would mean to wait and must not."""
        after = next(iter(self.builder.unfinished), None)
        if after is None or not (wait or self.builder.is_there(after)):
            return False
        self.builder.finish(after)
        return True

    def _wind_up(self, slot: int) -> None:
        """Issue all that is left: what can start, then what fills the time, then whatever is there first."""
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
        """When the last of the collectives began that the start waits for."""
        return max((self.builder.clock.begin[before] for before in self.problem.dependencies.after[start]), default=0.0)


class Skyline:
    """Heights in a row, of which ranges can be raised and asked for their highest, each in logarithmic time."""

    def __init__(self, heights: Sequence[int]) -> None:
        self.size = len(heights)
        # A binary tree, its leaves behind its inner nodes: each is the higher of two, plus what it was raised itself.
        self._highest = [0] * self.size + list(heights)
        self._raised = [0] * self.size
        for node in reversed(range(1, self.size)):
            self._highest[node] = max(self._highest[2 * node], self._highest[2 * node + 1])

    def raise_by(self, amount: int, begin: int, end: int) -> None:
        """Raise the heights begin ... end - 1."""
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
        """The highest of begin ... end - 1, which are not none."""
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
    """When each gather, and each copy from the host, must start at the latest to be hidden, as compute time gone by.

    From the last to the first: before its result is needed, before the next gather of its link starts, and around the
    reductions, which are taken to run as soon as they can.
    """
    dependencies = problem.dependencies
    starts: dict[str, list[int]] = {}
    for start, link in problem.queues.link_of.items():
        starts.setdefault(link, []).append(start)
    latest: dict[int, float] = {}
    # First gathers, and then the copies that bring what they send, on other links.
    for reloads in (False, True):
        for on_link in starts.values():
            fetches = [start for start in on_link if dependencies.is_fetch(start)]
            if any(dependencies.is_reload[start] for start in fetches) == reloads:
                latest |= _latest_on(problem, on_link, fetches, latest)
    return latest


def _latest_on(
    problem: Problem, on_link: Sequence[int], fetches: Sequence[int], known: Mapping[int, float]
) -> dict[int, float]:
    """The latest starts of one link, behind those of gathers that are known."""
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
    """How much compute fits beside a collective, in a stream of them."""
    work = problem.work
    return work.us[start] * max(0.0, 1 / problem.queues.capacity_of[start] - work.sharing.compute_share)


def _reserved(problem: Problem, reductions: Sequence[int]) -> list[tuple[float, float]]:
    """When a link carries reductions, as compute time gone by."""
    release = problem.dependencies.release
    busy: list[tuple[float, float]] = []
    free = 0.0
    for start in sorted(reductions, key=release.__getitem__):
        begin = max(free, problem.compute_at[release[start]])
        free = begin + _hides(problem, start)
        busy.append((begin, free))
    return busy


def _back(until: float, us: float, busy: list[tuple[float, float]]) -> float:
    """The latest time from which `us` are free up to `until`; drops from busy what lies behind it."""
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
