"""How many bytes of gathered parameters each stage of a pipeline may keep over a step, within a budget of its rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zgraph.planner.schedules.order import ranks_of
from zgraph.planner.schedules.pipeline_run import StageCost, rank_memory
from zgraph.sharding.pipeline.kept_parameters import first_fit


def kept_bytes(sizes: Sequence[int], room_bytes: float) -> int:
    """Bytes that `first_fit` keeps; as much room keeps the same."""
    return sum(sizes[place] for place in first_fit(sizes, room_bytes))


def next_room(sizes: Sequence[int], room_bytes: int) -> int | None:
    """The least room above this one in which more is kept; None: everything is kept."""
    missing: list[int] = []
    left = room_bytes
    for size in sizes:
        if size <= left:
            left -= size
        else:
            missing.append(size - left)
    return room_bytes + min(missing) if missing else None


def most_kept(sizes: Sequence[int], left_with: Callable[[int], float], kept: int = 0) -> int:
    """The most bytes that can be kept of things that come one after the other.

    To keep a little may hold less than to keep nothing, as where the buffer of a bucket gets smaller. So the least
    choice that fits is looked for as long as each next one exceeds the budget by less; above it, more is assumed to
    hold more. What is found has been asked for, and so has the next larger choice, which does not fit.

    Args:
        sizes: of each.
        left_with: what is left of the budget where `first_fit` keeps so many bytes; negative: it is exceeded.
        kept: to begin with.

    Returns:
        The most that fits; or, if nothing was found that does, what exceeds the budget by least.
    """
    left = left_with(kept)
    while left < 0:
        room = next_room(sizes, kept)
        left_then = left if room is None else left_with(kept_bytes(sizes, room))
        if room is None or left_then <= left:
            return kept
        kept, left = kept_bytes(sizes, room), left_then
    too_much = None
    while True:
        room = int(kept + left)  # to keep n bytes takes n at most, as a rule
        if too_much is not None and room >= too_much:
            room = (kept + too_much) // 2
        if kept_bytes(sizes, room) <= kept:
            following = next_room(sizes, kept)
            if following is None:
                return kept
            room = following
        found = kept_bytes(sizes, room)
        if too_much is not None and found >= too_much:
            return kept
        left_then = left_with(found)
        if left_then < 0:
            too_much = found
        else:
            kept, left = found, left_then


def beside_rest(schedule: str, rank: int, ranks: int, costs: Sequence[StageCost]) -> int:
    """Most that a rank holds in a step beside parameters, buffers and the optimizer's state.

    Args:
        schedule, rank, ranks, costs: as in `rank_memory`.
    """
    places = ranks_of(schedule, ranks, len(costs))
    resting = sum(cost.resting_bytes for cost, place in zip(costs, places, strict=True) if place == rank)
    return rank_memory(schedule, rank, ranks, costs)[0] - resting


def keep_within(
    budget_bytes: float,
    schedule: str,
    ranks: int,
    sizes: Sequence[Sequence[int]],
    cost_of: Callable[[int, int], StageCost | None],
) -> list[int]:
    """Bytes that each stage may keep, so that no rank holds more than the budget beside what rests there.

    The stages of one rank are filled in their order, each with the most that the others leave room for, until none of
    them can keep more. Where nothing is found that fits, the rank exceeds the budget by as little as was found.

    Args:
        budget_bytes: of a rank.
        schedule: one of `schedules_for` these numbers.
        ranks: of the pipeline.
        sizes: of each stage's parameters that may be kept, gathered, in the order in which they are.
        cost_of: of a stage that keeps so many bytes; None: its graphs do not fit into the budget alone.
    """
    kept = [0] * len(sizes)
    before: list[int] | None = None
    while kept != before:
        before = list(kept)
        for number, rank in enumerate(ranks_of(schedule, ranks, len(sizes))):

            def left_with(count: int, number: int = number, rank: int = rank) -> float:
                tried = [*kept[:number], count, *kept[number + 1 :]]
                costs = [cost for cost in map(cost_of, range(len(tried)), tried) if cost is not None]
                if len(costs) < len(tried):
                    return -math.inf
                return budget_bytes - beside_rest(schedule, rank, ranks, costs)

            kept[number] = most_kept(sizes[number], left_with, kept[number])
    return kept
