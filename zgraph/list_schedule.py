"""Orders a graph's communication by list scheduling on the simulator.

Compute keeps its order. Between its nodes stand, where the scheduler puts them, the starts of collectives with the
copies into their buffers, and the waits with the copies out of them:

    slot 0   slot 1   slot 2
      |  mm_0  |  mm_1  |  output          start w1 goes to slot 0, its wait to where mm_1 pulls it
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from zgraph import meta, nodes
from zgraph.simulate import Clock, Ledger, Work
from zgraph.storages import Storage
from zgraph.torch_compat import written_arguments


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a schedule may hold.

    Attributes:
        budget_bytes: alive at any moment, as the memory curve counts; None: whatever it takes.
        in_flight_bytes: of whole parameters and gradients whose collectives are started and not yet waited for. Two may
            be under way in any case: the one that is waited for, and the next.
    """

    budget_bytes: int | None = None
    in_flight_bytes: int


@dataclass(frozen=True, slots=True)
class Score:
    """How good a schedule is: less is better, the first difference decides."""

    excess_bytes: int
    step_us: float
    peak_bytes: int

    def beats(self, other: Score) -> bool:
        """Whether it is better by more than rounding."""
        if self.excess_bytes != other.excess_bytes:
            return self.excess_bytes < other.excess_bytes
        if not math.isclose(self.step_us, other.step_us, rel_tol=1e-9):
            return self.step_us < other.step_us
        return self.peak_bytes < other.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Style:
    """One way to fill the slots.

    Attributes:
        lead: starts gathers earlier than needed: their durations count as so many times themselves. 0: each where its
            result is needed; infinite: as early as the limits allow.
        finish: when a reduction whose result only leaves the graph is finished: "at_once", as soon as it is "done", or
            "late", where the limits ask for it.
    """

    lead: float
    finish: str


STYLES = (
    Style(lead=1.0, finish="late"),
    Style(lead=1.0, finish="done"),
    Style(lead=2.0, finish="late"),
    Style(lead=math.inf, finish="late"),
    Style(lead=math.inf, finish="done"),
    Style(lead=0.0, finish="done"),
    Style(lead=0.0, finish="at_once"),
)


class Problem:
    """A graph to be scheduled, its nodes by number (`Work`).

    Attributes:
        spine: nodes that keep their order, the output last; slot p is before the p-th of them.
        rank: of each node of the spine, its place there.
        inputs: of each node.
        release: of each movable node: the first slot in which what it reads of the spine is there.
        use: of each movable node: the slot of the first node of the spine that needs it.
        after: of each movable node: the starts whose waits lie behind it, back to the next start.
        starts: those that are movable, in the order of the graph.
        queues: starts that keep their order among themselves: of one lane, reading inputs of the graph alone or not,
            with as many collectives behind them.
        needs: what must be issued before each node: its inputs, and of a start the one before it in its queue.
        tails: what only leaves the graph, by the starts that it is the result of; tails_of: the same, by each of them.
    """

    def __init__(self, work: Work, storages: Iterable[Storage], limits: Limits) -> None:
        self.work = work
        self.limits = limits
        self.ledger = Ledger.of(work, storages)
        self.inputs = [[work.numbers[source] for source in node.all_input_nodes] for node in work.nodes]
        self.users = [[work.numbers[user] for user in node.users] for node in work.nodes]
        self.given = [node.op in ("placeholder", "get_attr") for node in work.nodes]
        written = _written(work.nodes)
        self.movable = [
            is_movable(node) and not any(source in written for source in node.all_input_nodes) for node in work.nodes
        ]
        self.spine = [number for number in range(len(work.nodes)) if not self.movable[number] and not self.given[number]]
        self.rank = {number: place for place, number in enumerate(self.spine)}
        self.is_start = [movable and nodes.is_start(node) for movable, node in zip(self.movable, work.nodes, strict=True)]
        self.starts = [number for number, found in enumerate(self.is_start) if found]
        self.whole_bytes = {start: nodes.whole_bytes(work.nodes[start]) for start in self.starts}
        self.started_by = {
            number: source
            for number, node in enumerate(work.nodes)
            if nodes.is_wait(node)
            for source in self.inputs[number]
            if self.is_start[source]
        }
        self._look_back()
        self._look_ahead()
        self._form_queues()

    def _look_back(self) -> None:
        count = len(self.work.nodes)
        self.release = [0] * count
        self.after: list[tuple[int, ...]] = [()] * count
        self.depth = [0] * count
        for number in range(count):
            if not self.movable[number]:
                continue
            after: dict[int, None] = {}
            for source in self.inputs[number]:
                if self.movable[source]:
                    self.release[number] = max(self.release[number], self.release[source])
                    after |= dict.fromkeys((source,) if self.is_start[source] else self.after[source])
                elif source in self.rank:
                    self.release[number] = max(self.release[number], self.rank[source] + 1)
            self.after[number] = tuple(after)
            self.depth[number] = max((self.depth[start] + 1 for start in after), default=0)

    def _look_ahead(self) -> None:
        last = len(self.spine) - 1
        self.use = [last] * len(self.work.nodes)
        for number in reversed(range(len(self.work.nodes))):
            if self.movable[number]:
                self.use[number] = min(
                    (self.use[user] if self.movable[user] else self.rank[user] for user in self.users[number]),
                    default=last,
                )

    def _form_queues(self) -> None:
        queues: dict[tuple[object, ...], list[int]] = {}
        for start in self.starts:
            key = (self.work.lane[start], self.reads_inputs_alone(start), self.depth[start])
            queues.setdefault(key, []).append(start)
        self.queues = tuple(map(tuple, queues.values()))
        self.needs = list(self.inputs)
        for queue in self.queues:
            for before, start in pairwise(queue):
                self.needs[start] = [before, *self.inputs[start]]
                self.release[start] = max(self.release[start], self.release[before])
        output = self.spine[-1]
        tails: dict[tuple[int, ...], list[int]] = {}
        for number in self.inputs[output]:
            if self.movable[number] and self.use[number] == self.rank[output]:
                tails.setdefault(self.after[number], []).append(number)
        self.tails = {after: tuple(tail) for after, tail in tails.items() if after}
        self.tails_of: dict[int, list[tuple[int, ...]]] = {}
        for after in self.tails:
            for start in after:
                self.tails_of.setdefault(start, []).append(after)

    def is_token(self, number: int) -> bool:
        """Whether a schedule is told by where this node stands: the others come along with it."""
        return not self.movable[number] or self.is_start[number] or any(user in self.rank for user in self.users[number])

    def reads_inputs_alone(self, start: int) -> bool:
        """Whether a collective can start as soon as the graph does: a gather of a parameter."""
        return not self.release[start] and not self.after[start]

    def link(self, start: int) -> str:
        lane = self.work.lane[start]
        return self.work.sharing.link_of(self.work.lanes[lane]) if lane >= 0 else ""

    @cached_property
    def clock_at(self) -> list[float]:
        """Microseconds of compute ahead of each slot, when each copy stands where its result is needed."""
        spent = [0.0] * (len(self.spine) + 1)
        for number, us in enumerate(self.work.us):
            if self.work.lane[number] == Work.ON_COMPUTE:
                at = self.use[number] if self.movable[number] else self.rank.get(number, 0)
                spent[at + 1] += us
        for at in range(len(self.spine)):
            spent[at + 1] += spent[at]
        return spent

    def latest_starts(self, lead: float) -> dict[int, float]:
        """When each gather must start at the latest to be hidden, as compute time gone by.

        From the last to the first: before its result is needed, before the next gather of its link starts, and around
        the reductions, which are taken to run as soon as they can.
        """
        if not math.isfinite(lead) or not lead:
            return {start: -lead if lead else math.inf for start in self.starts}
        found: dict[int, float] = {}
        for link in dict.fromkeys(map(self.link, self.starts)):
            on_link = [start for start in self.starts if self.link(start) == link]
            gathers = [start for start in on_link if self.reads_inputs_alone(start)]
            busy = self._reserved([start for start in on_link if not self.reads_inputs_alone(start)])
            latest = math.inf
            for start in sorted(gathers, key=self._needed_at, reverse=True):
                latest = min(latest, self.clock_at[self._needed_at(start)])
                latest = _back(latest, self._hides(start) * lead, busy)
                found[start] = latest
        return found

    @cached_property
    def _first_needed(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for queue in self.queues:
            needed = len(self.spine) - 1
            for start in reversed(queue):
                needed = min(needed, self.use[start])
                found[start] = needed
        return found

    def _needed_at(self, start: int) -> int:
        """The slot in which its result or that of a later one of its queue is needed."""
        return self._first_needed[start]

    def _hides(self, start: int) -> float:
        """How much compute fits beside a collective."""
        return self.work.us[start] * (1 - self.work.sharing.compute_share)

    def _reserved(self, reductions: Sequence[int]) -> list[tuple[float, float]]:
        """When the link carries reductions, as compute time gone by."""
        busy: list[tuple[float, float]] = []
        free = 0.0
        for start in sorted(reductions, key=lambda start: (self.release[start], self.depth[start])):
            begin = max(free, self.clock_at[self.release[start]])
            free = begin + self._hides(start)
            busy.append((begin, free))
        return busy


def is_movable(node: fx.Node) -> bool:
    """Whether the scheduler may put the node elsewhere: the communication of a parameter, and its copies.

    What only adds to a sum that waits for its window has no collective to hide, and releases its gradient.
    """
    return (
        nodes.is_communication(node)
        and bool(meta.parameters(node))
        and node.target is not torch.ops.zgraph.accumulate_grad.default
    )


def _written(order: Iterable[fx.Node]) -> set[fx.Node]:
    """Every value that shares a storage with one that is written to: its readers must not move past the writer."""
    written: dict[fx.Node, None] = {}
    for node in order:
        for argument in written_arguments(node):
            pending = [argument]
            while nodes.is_reshaping(pending[-1]):
                pending.append(pending[-1].all_input_nodes[0])
            written |= dict.fromkeys(nodes.reshaped_values(pending[-1]))
    return set(written)


def _back(until: float, us: float, busy: list[tuple[float, float]]) -> float:
    """The latest time from which `us` are free up to `until`; drops from busy what lies behind it."""
    while busy:
        begin, end = busy[-1]
        if begin < until:
            free = max(0.0, until - end)
            if free >= us:
                break
            us -= free
            until = min(until, begin)
        busy.pop()
    return until - us


class Builder:
    """A schedule while it is made: issues nodes to the clock and the ledger, each with what it needs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.clock = Clock(problem.work)
        self.ledger = problem.ledger.copy()
        self.order: list[int] = []
        self.peaks: list[int] = []  # by node issued
        self.excess_bytes = 0
        self.spent_us = 0.0
        self.under_way: dict[int, int] = {}  # whole bytes by start
        self._placed = [False] * len(problem.work.nodes)
        for number, given in enumerate(problem.given):
            if given:
                self._issue(number)

    def copy(self) -> Builder:
        new = copy.copy(self)
        new.clock, new.ledger = self.clock.copy(), self.ledger.copy()
        new.order, new.peaks, new._placed = self.order.copy(), self.peaks.copy(), self._placed.copy()
        new.under_way = self.under_way.copy()
        return new

    def is_placed(self, number: int) -> bool:
        return self._placed[number]

    def pull(self, number: int) -> bool:
        """Issue what stands before a node, then the node. False where that is not allowed here."""
        pending = [] if self._placed[number] else [number]
        while pending:
            node = pending[-1]
            missing = [source for source in self.problem.needs[node] if not self._placed[source]]
            if not missing:
                self._issue(pending.pop())
            elif any(not self.problem.movable[source] for source in missing):
                return False
            else:
                pending.extend(reversed(missing))
            while pending and self._placed[pending[-1]]:
                pending.pop()
        return True

    def _issue(self, number: int) -> None:
        problem = self.problem
        self.clock.issue(number)
        peak = self.ledger.issue(number)
        if problem.work.lane[number] == Work.ON_COMPUTE:
            self.spent_us += problem.work.us[number]
        self.peaks.append(peak)
        self.order.append(number)
        self._placed[number] = True
        over = 0 if problem.limits.budget_bytes is None else peak - problem.limits.budget_bytes
        if problem.is_start[number]:
            self.under_way[number] = problem.whole_bytes[number]
            if len(self.under_way) > 2:
                over = max(over, sum(self.under_way.values()) - problem.limits.in_flight_bytes)
        elif number in problem.started_by:
            self.under_way.pop(problem.started_by[number], None)
        self.excess_bytes = max(self.excess_bytes, over)

    def score(self) -> Score:
        self.clock.drain()
        return Score(self.excess_bytes, self.clock.now, max(self.peaks, default=0))


class Greedy:
    """Fills slot after slot in one style."""

    def __init__(self, problem: Problem, style: Style, jit_peaks: torch.Tensor | None) -> None:
        self.problem = problem
        self.style = style
        self.builder = Builder(problem)
        self.latest = problem.latest_starts(style.lead)
        self.curve = None if jit_peaks is None else jit_peaks.clone()
        self.slot_peaks: list[int] = []
        self._heads = [0] * len(problem.queues)
        # Gathers first: a reduction that is ready can wait, and compute cannot.
        self._by_urgency = sorted(
            range(len(problem.queues)), key=lambda place: not problem.reads_inputs_alone(problem.queues[place][0])
        )
        self._tails = deque[tuple[int, ...]]()  # not finished yet, in the order of their starts
        self._listed = 0

    def run(self) -> Builder:
        problem, builder = self.problem, self.builder
        for slot, number in enumerate(problem.spine):
            issued = len(builder.peaks)
            demanded = [source for source in problem.needs[number] if not builder.is_placed(source)]
            if slot == len(problem.spine) - 1:
                self._wind_up(slot)
            elif demanded or problem.work.us[number]:
                self._fill(slot)
                self._make_room(demanded, number)
            builder.pull(number)
            self.slot_peaks.append(max(builder.peaks[issued:]))
        return builder

    def _fill(self, slot: int) -> None:
        """Start what should start in this slot."""
        again = True
        while again:
            again = False
            if self.style.finish != "late":
                self._finish_tails(wait=self.style.finish == "at_once")
            for place in self._by_urgency:
                start = self._head(place)
                if start is not None and self._is_due(start, slot) and self._fits(start, slot):
                    self._start(start, slot)
                    again = True
                    break

    def _head(self, place: int) -> int | None:
        queue = self.problem.queues[place]
        while self._heads[place] < len(queue) and self.builder.is_placed(queue[self._heads[place]]):
            self._heads[place] += 1
        return queue[self._heads[place]] if self._heads[place] < len(queue) else None

    def _is_due(self, start: int, slot: int) -> bool:
        problem = self.problem
        if problem.reads_inputs_alone(start):
            return self.latest[start] < problem.clock_at[slot + 1]
        return problem.release[start] <= slot and all(map(self.builder.clock.is_done, problem.after[start]))

    def _fits(self, start: int, slot: int) -> bool:
        """Whether the limits let it start here, where need be after what is done has been finished."""
        while True:
            if self._fits_in_flight(start) and self._fits_in_memory(start, slot):
                return True
            if not self._finish_tail(wait=False):
                return False

    def _fits_in_flight(self, start: int) -> bool:
        under_way = self.builder.under_way
        return (
            len(under_way) < 2
            or sum(under_way.values()) + self.problem.whole_bytes[start] <= self.problem.limits.in_flight_bytes
        )

    def _fits_in_memory(self, start: int, slot: int) -> bool:
        budget = self.problem.limits.budget_bytes
        if budget is None:
            return True
        needed = self._new_bytes([start])
        if self.builder.ledger.alive_bytes + needed > budget:
            # A reduction that waits for room keeps its gradient alive: it may, while others will make some.
            return not self.problem.reads_inputs_alone(start) and not self.builder.under_way
        if self.curve is None or not self.problem.reads_inputs_alone(start):
            return True
        ahead = self.curve[slot : max(slot + 1, self.problem.use[start])]
        return int(ahead.max()) + needed <= budget

    def _start(self, start: int, slot: int) -> None:
        if self.curve is not None and self.problem.reads_inputs_alone(start):
            self.curve[slot : self.problem.use[start]] += self._new_bytes([start])
        self.builder.pull(start)

    def _new_bytes(self, wanted: Iterable[int]) -> int:
        """What issuing these nodes, and what they bring along, allocates."""
        ledger = self.builder.ledger
        pending, found = list(wanted), dict[int, None]()
        while pending:
            number = pending.pop()
            if number not in found and not self.builder.is_placed(number):
                found[number] = None
                pending.extend(self.problem.needs[number])
        return sum(ledger.sizes[storage] for number in found for storage in ledger.allocates[number])

    def _make_room(self, demanded: Sequence[int], number: int) -> None:
        """Finish reductions where what comes next needs their memory, or the time until it can run."""
        problem, builder = self.problem, self.builder
        waited_for = dict.fromkeys(start for source in demanded for start in _behind(self.problem, source))
        while not all(map(builder.clock.is_done, waited_for)) and self._finish_tail(wait=False):
            pass
        for start in waited_for:
            while not builder.is_placed(start) and not self._fits_in_flight(start) and self._finish_tail(wait=True):
                pass
        budget = problem.limits.budget_bytes
        if budget is None:
            return
        needed = self._new_bytes([number])
        while builder.ledger.alive_bytes + needed > budget and self._finish_tail(wait=True):
            pass

    def _list_tails(self) -> None:
        order = self.builder.order
        for number in order[self._listed :]:
            if self.problem.is_start[number]:
                self._tails.extend(
                    after for after in self.problem.tails_of.get(number, ()) if all(map(self.builder.is_placed, after))
                )
        self._listed = len(order)

    def _finish_tail(self, *, wait: bool) -> bool:
        """Finish the oldest reduction; False where there is none, or where that would mean to wait and must not."""
        self._list_tails()
        if not self._tails or not (wait or all(map(self.builder.clock.is_done, self._tails[0]))):
            return False
        for number in self.problem.tails[self._tails.popleft()]:
            self.builder.pull(number)
        return True

    def _finish_tails(self, *, wait: bool) -> None:
        while self._finish_tail(wait=wait):
            pass

    def _wind_up(self, slot: int) -> None:
        """Issue all that is left: what can start, then what fills the time, then whatever is there first."""
        while True:
            self._fill(slot)
            if self._finish_tail(wait=False):
                continue
            left = [start for place in self._by_urgency if (start := self._head(place)) is not None]
            if left:
                start = min(left, key=self._ready)
                if self._fits(start, slot) or not self._finish_tail(wait=True):
                    self.builder.pull(start)
            elif not self._finish_tail(wait=True):
                return

    def _ready(self, start: int) -> float:
        """When the last of the collectives began that the start waits for."""
        return max((self.builder.clock.begin[before] for before in self.problem.after[start]), default=0.0)


def greedy(problem: Problem) -> Iterator[Builder]:
    """One schedule in each style."""
    jit_peaks = None
    if problem.limits.budget_bytes is not None:
        frugal = Greedy(problem, Style(lead=0.0, finish="at_once"), None)
        frugal.run()
        jit_peaks = torch.tensor(frugal.slot_peaks)
    for style in STYLES:
        yield Greedy(problem, style, jit_peaks).run()


class Beam:
    """Fills slot after slot in several ways at once, and goes on with the most promising."""

    def __init__(self, problem: Problem, width: int) -> None:
        self.problem = problem
        self.width = width
        self.compute_us = sum(us for us, lane in zip(problem.work.us, problem.work.lane, strict=True) if lane == Work.ON_COMPUTE)

    def run(self) -> Builder:
        problem = self.problem
        states = [Builder(problem)]
        for slot, number in enumerate(problem.spine):
            last = slot == len(problem.spine) - 1
            if not last and not problem.work.us[number] and all(states[0].is_placed(s) or not problem.movable[s] for s in problem.needs[number]):
                for state in states:
                    state.pull(number)
                continue
            found: list[Builder] = []
            layer = states
            for _ in range(len(problem.work.nodes) if last else 4):
                following: list[Builder] = []
                for state in layer:
                    for option in self._options(state, slot, last):
                        new = state.copy()
                        if new.pull(option):
                            following.append(new)
                    new = state.copy()
                    new.pull(number)
                    found.append(new)
                layer = self._best(following)
                if not layer:
                    break
            states = self._best(found)
        return states[0]

    def _options(self, state: Builder, slot: int, last: bool) -> Iterator[int]:
        problem = self.problem
        for queue in problem.queues:
            start = next((start for start in queue if not state.is_placed(start)), None)
            if start is None or problem.release[start] > slot:
                continue
            if all(state.clock.is_done(before) or last and state.is_placed(before) for before in problem.after[start]):
                yield start
        for after, tail in problem.tails.items():
            if all(map(state.is_placed, after)):
                left = [number for number in tail if not state.is_placed(number)]
                if left:
                    yield left[0]

    def _best(self, states: list[Builder]) -> list[Builder]:
        unique: dict[bytes, tuple[Any, Builder]] = {}
        for state in states:
            key = bytes(state._placed)
            score = self._bound(state)
            if key not in unique or score < unique[key][0]:
                unique[key] = (score, state)
        return [state for _, state in sorted(unique.values(), key=lambda entry: entry[0])[: self.width]]

    def _bound(self, state: Builder) -> tuple[float, ...]:
        problem, clock = self.problem, state.clock
        left = self.compute_us - state.spent_us
        end = clock.now + left
        lanes: dict[str, float] = {}
        for lane, name in enumerate(problem.work.lanes):
            link = problem.work.sharing.link_of(name)
            lanes[link] = lanes.get(link, clock.now) + clock.backlog_us(lane)
        todo = 0.0
        for link, free in lanes.items():
            time = free
            for queue in problem.queues:
                if problem.link(queue[0]) != link: continue
                at = free
                for start in queue:
                    if not state.is_placed(start):
                        at += problem.work.us[start]
                        time += problem.work.us[start]
                        todo += problem.work.us[start]
                        end = max(end, at + problem.clock_at[-1] - problem.clock_at[problem.use[start]])
            end = max(end, time)
        return (state.excess_bytes, end, todo, state.ledger.alive_bytes)


class Search:
    """Improves a schedule by moving one thing at a time.

    Attributes:
        effort: how many nodes may still be issued to try schedules.
    """

    def __init__(self, problem: Problem, effort: int) -> None:
        self.problem = problem
        self.effort = effort

    def improve(self, found: Builder) -> Builder:
        """The best schedule found, or the one given."""
        best, score = found, found.score()
        while (better := self._step(best, score)) is not None:
            best, score = better, better.score()
        return best

    def _step(self, found: Builder, score: Score) -> Builder | None:
        """The first better schedule that moving one thing makes."""
        pulled = [number for number in found.order if self.problem.is_token(number)]
        for place in self._by_exposure(pulled, found):
            for target in self._targets(pulled, place):
                if self.effort < 0:
                    return None
                moved = [*pulled[:place], *pulled[place + 1 :]]
                moved.insert(target, pulled[place])
                tried = self._replay(moved)
                if tried is not None and tried.score().beats(score):
                    return tried
        return None

    def _by_exposure(self, pulled: list[int], builder: Builder) -> list[int]:
        """What can be moved, as places; what is exposed longest comes first."""
        exposed = builder.clock.exposed
        return sorted(
            (place for place, number in enumerate(pulled) if self.problem.movable[number]),
            key=lambda place: max((exposed.get(start, 0.0) for start in _behind(self.problem, pulled[place])), default=0),
            reverse=True,
        )

    def _targets(self, pulled: list[int], place: int) -> Iterator[int]:
        few = len(pulled) <= 64
        for step in range(1, len(pulled)) if few else (2**power for power in range(len(pulled).bit_length())):
            yield from (target for target in (place - step, place + step) if 0 <= target < len(pulled))

    def _replay(self, pulled: Iterable[int]) -> Builder | None:
        """The schedule that pulls these nodes one after the other; None where one of them cannot stand there."""
        builder = Builder(self.problem)
        for number in pulled:
            self.effort -= 1
            if not builder.pull(number):
                return None
        return builder


def _behind(problem: Problem, number: int) -> tuple[int, ...]:
    return (number,) if problem.is_start[number] else problem.after[number]


def plan_order(problem: Problem, *, effort: int) -> tuple[list[fx.Node], Score]:
    best: Builder | None = None
    for built in greedy(problem):
        if best is None or built.score().beats(best.score()):
            best = built
    assert best is not None
    wide = Beam(problem, 16).run()
    if wide.score().beats(best.score()):
        best = wide
    best = Search(problem, effort).improve(best)
    return [problem.work.nodes[number] for number in best.order], best.score()
