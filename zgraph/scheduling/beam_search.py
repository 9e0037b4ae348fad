"""Searches for a schedule along many paths at once, each judged by what it can still become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from zgraph.scheduling.builder import Builder, choose
from zgraph.scheduling.problem import Problem

AHEAD = 16  # collectives of each queue that a promise looks at one by one


@dataclass(frozen=True, slots=True)
class Promise:
    """What a schedule that is not whole yet can still become: less is better.

    Attributes:
        excess_bytes: above the limits so far.
        end_us: the step takes at least that long: what is left of compute, of each link, and of compute behind each
            collective that has not started.
        left_us: of collectives that have not started.
        alive_bytes: at the moment.
    """

    excess_bytes: int
    end_us: float
    left_us: float
    alive_bytes: int

    @classmethod
    def of(cls, state: Builder) -> Promise:
        problem, clock = state.problem, state.clock
        end = clock.now + problem.compute_at[-1] - state.compute_us
        free: dict[str, float] = {}
        for lane, name in enumerate(problem.work.lanes):
            link = problem.work.sharing.link_of(name)
            free[link] = free.get(link, clock.now) + clock.backlog_us(lane) / problem.work.capacities[link]
        done = dict(free)
        left = 0.0
        for queue, head in zip(problem.queues, state.heads, strict=True):
            link = problem.link_of(queue[0])
            at = free.get(link, clock.now)
            capacity = problem.capacity_of(queue[0])
            for start in queue[head : head + AHEAD]:
                at += problem.work.us[start] / capacity
                end = max(end, at + problem.compute_order_at[-1] - problem.compute_order_at[problem.use[start]])
            todo = sum(problem.work.us[start] for start in queue[head:]) / capacity
            left += todo
            done[link] = done.get(link, clock.now) + todo
        return cls(state.excess_bytes(problem.limits), max(end, *done.values()), left, state.ledger.alive_bytes)

    @property
    def eager(self) -> tuple[float, ...]:
        return (self.excess_bytes, self.end_us, self.left_us, self.alive_bytes)

    @property
    def frugal(self) -> tuple[float, ...]:
        return (self.excess_bytes, self.end_us, self.alive_bytes, self.left_us)


class Beam:
    """Fills slot after slot in many ways at once, and goes on with the most promising.

    Half of these are those with the least left to communicate, half those that hold the least.
    """

    STEPS = 5  # that may be put into one slot
    OLDEST = 3  # of each kind of option that are looked at

    def __init__(self, problem: Problem, width: int) -> None:
        self.problem = problem
        self.width = width

    def run(self) -> Builder:
        problem = self.problem
        states = [Builder(problem)]
        last = len(problem.compute_order) - 1
        for slot, number in enumerate(problem.compute_order):
            free = slot < last and not problem.work.us[number]
            if free and all(state.placed[source] for state in states for source in problem.needs[number]):
                for state in states:
                    state.pull(number)
            else:
                states = self._fill(states, slot, len(problem.work.nodes) if slot == last else self.STEPS)
        return choose(states)

    def _fill(self, states: list[Builder], slot: int, steps: int) -> list[Builder]:
        """Every state with up to so many things put into the slot, and then the node behind it."""
        filled: list[Builder] = []
        for _ in range(steps + 1):
            filled += [_with(state, [self.problem.compute_order[slot]]) for state in states]
            states = self._best([_with(state, option) for state in states for option in self._options(state, slot)])
            if not states:
                break
        return self._best(filled)

    def _options(self, state: Builder, slot: int) -> Iterator[list[int]]:
        """What can come next: the start of a collective, its wait, a copy out, the end of a reduction."""
        problem = self.problem
        last = slot == len(problem.compute_order) - 1
        for start in state.next_starts():
            after = problem.after[start]
            if problem.release[start] <= slot and (
                state.is_there(after) or (last and all(state.placed[one] for one in after))
            ):
                yield [start]
        for start in islice(state.in_flight, self.OLDEST):
            # To wait for what is not there yet only pays where it makes room.
            pays = state.clock.is_done(start) or problem.limits.budget_bytes is not None or last
            if pays and problem.movable[problem.wait_of[start]]:
                yield [problem.wait_of[start]]
        yield from ([number] for number in islice(state.pending_copies, self.OLDEST) if problem.release[number] <= slot)
        yield from (problem.output_chains[after] for after in islice(state.unfinished, self.OLDEST))

    def _best(self, states: list[Builder]) -> list[Builder]:
        unique: dict[bytes, tuple[Promise, Builder]] = {}
        for state in states:
            key, promise = bytes(state.placed), Promise.of(state)
            if key not in unique or promise.eager < unique[key][0].eager:
                unique[key] = (promise, state)
        eager = sorted(unique.values(), key=lambda entry: entry[0].eager)
        taken, rest = eager[: self.width // 2], eager[self.width // 2 :]
        taken += sorted(rest, key=lambda entry: entry[0].frugal)[: self.width - len(taken)]
        return [state for _, state in taken]


def _with(state: Builder, option: Sequence[int]) -> Builder:
    new = state.copy()
    for number in option:
        new.pull(number)
    return new
