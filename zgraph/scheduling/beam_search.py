"""Beam search for a schedule: extends several partial schedules in parallel, and keeps those with the best bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from zgraph.scheduling.builder import Builder, choose
from zgraph.scheduling.problem import Problem

AHEAD = 16  # collectives of each queue that a bound considers one by one


class Promise(NamedTuple):
    """Lower bound on the score of all schedules that extend a partial schedule; less is better.

    Attributes:
        excess_bytes: bytes above the limits so far.
        end_us: lower bound on the time of the step, from the remaining compute, the remaining transfers on each link,
            and the compute that must follow each remaining collective.
        left_us: total time of collectives that have not started.
        alive_bytes: bytes alive after the last issued node.
    """

    excess_bytes: int
    end_us: float
    left_us: float
    alive_bytes: int

    @property
    def frugal(self) -> tuple[float, ...]:
        return (self.excess_bytes, self.end_us, self.alive_bytes, self.left_us)


class Bounds:
    """Computes the `Promise` of partial schedules of one problem.

    Attributes:
        ahead: [queue][number of issued starts]: list of the next starts, each as (time on the link in microseconds,
            microseconds of compute before the node that needs the result).
        todo: [queue][number of issued starts]: microseconds that the remaining starts take on the link.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        us, use, before = problem.work.us, problem.dependencies.use, problem.compute_order_at
        self.ahead: list[list[list[tuple[float, float]]]] = []
        self.todo: list[list[float]] = []
        for queue in problem.queues.queues:
            capacity = problem.queues.capacity_of[queue[0]]
            each = [(us[start] / capacity, before[use[start]]) for start in queue]
            heads = range(len(queue) + 1)
            self.ahead.append([each[head : head + AHEAD] for head in heads])
            self.todo.append([sum(us[start] for start in queue[head:]) / capacity for head in heads])
        self.link_of = [problem.queues.link_of[queue[0]] for queue in problem.queues.queues]

    def of(self, state: Builder) -> Promise:
        problem, clock = self.problem, state.clock
        work, compute_us = problem.work, problem.compute_order_at[-1]
        end = clock.now + problem.compute_at[-1] - state.compute_us
        free: dict[str, float] = {}
        for lane, link in enumerate(work.links):
            free[link] = free.get(link, clock.now) + clock.backlog_us(lane) / work.capacities[link]
        done = dict(free)
        left = 0.0
        for link, ahead, todo, head in zip(self.link_of, self.ahead, self.todo, state.heads, strict=True):
            at = free.get(link, clock.now)
            for us, before_us in ahead[head]:
                at += us
                bound = at + compute_us - before_us
                if bound > end:
                    end = bound
            left += todo[head]
            done[link] = done.get(link, clock.now) + todo[head]
        return Promise(state.excess_bytes(problem.limits), max(end, *done.values()), left, state.ledger.alive_bytes)


class Beam:
    """Beam search that fills one slot (gap between compute nodes) after another.

    Half of the partial schedules that it keeps have the best bound on time, the other half use the least memory.
    """

    STEPS = 5  # most options taken in one slot
    OLDEST = 3  # options of each kind that are considered, the oldest first

    def __init__(self, problem: Problem, width: int) -> None:
        self.problem = problem
        self.bounds = Bounds(problem)
        self.width = width

    def run(self) -> Builder:
        problem = self.problem
        states = [Builder(problem)]
        compute_order, needs = problem.dependencies.compute_order, problem.dependencies.needs
        last = len(compute_order) - 1
        for slot, number in enumerate(compute_order):
            free = slot < last and not problem.work.us[number]
            if free and all(state.placed[source] for state in states for source in needs[number]):
                for state in states:
                    state.pull(number)
            else:
                states = self._fill(states, slot, len(problem.work.nodes) if slot == last else self.STEPS)
        return choose(states)

    def _fill(self, states: list[Builder], slot: int, steps: int) -> list[Builder]:
        """Issue at most `steps` options in `slot`, then the compute node after the slot; return the best states."""
        behind = self.problem.dependencies.compute_order[slot]
        filled = [_with(state, [behind]) for state in states]
        for _ in range(steps):
            states = self._best([_with(state, option) for state in states for option in self._options(state, slot)])
            if not states:
                break
            filled += [_with(state, [behind]) for state in states]
        return self._best(filled)

    def _options(self, state: Builder, slot: int) -> Iterator[list[int]]:
        """Yield lists of nodes that may be issued next.

        A list has one node, which starts or awaits a collective or copies out of a buffer, or it is the chain of nodes
        that ends a reduction.
        """
        problem, dependencies, wait_of = self.problem, self.problem.dependencies, self.problem.queues.wait_of
        last = slot == len(dependencies.compute_order) - 1
        for start in state.next_starts():
            after = dependencies.after[start]
            if dependencies.release[start] <= slot and (
                state.is_there(after) or (last and all(state.placed[one] for one in after))
            ):
                yield [start]
        for start in islice(state.in_flight, self.OLDEST):
            # Waiting for a collective that has not finished only pays if it frees memory.
            pays = state.clock.is_done(start) or problem.limits.budget_bytes is not None or last
            if pays and dependencies.movable[wait_of[start]]:
                yield [wait_of[start]]
        yield from (
            [number] for number in islice(state.pending_copies, self.OLDEST) if dependencies.release[number] <= slot
        )
        yield from (problem.output_chains[after] for after in islice(state.unfinished, self.OLDEST))

    def _best(self, states: list[Builder]) -> list[Builder]:
        unique: dict[bytes, tuple[Promise, Builder]] = {}
        for state in states:
            key, promise = bytes(state.placed), self.bounds.of(state)
            if key not in unique or promise < unique[key][0]:
                unique[key] = (promise, state)
        eager = sorted(unique.values(), key=lambda entry: entry[0])
        taken, rest = eager[: self.width // 2], eager[self.width // 2 :]
        taken += sorted(rest, key=lambda entry: entry[0].frugal)[: self.width - len(taken)]
        return [state for _, state in taken]


def _with(state: Builder, option: Sequence[int]) -> Builder:
    new = state.copy()
    for number in option:
        new.pull(number)
    return new
