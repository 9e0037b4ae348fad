"""How many bytes of gathered ZeRO-3 parameters each pipeline stage can keep during a step within a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zgraph.planner.schedules.order import ranks_of
from zgraph.planner.schedules.pipeline_run import StageCost, rank_memory
from zgraph.sharding.pipeline.kept_parameters import first_fit


def kept_bytes(sizes: Sequence[int], room_bytes: float) -> int:
    """Return the bytes of the parameters that `first_fit` keeps in `room_bytes`."""
    return sum(sizes[place] for place in first_fit(sizes, room_bytes))


def next_room(sizes: Sequence[int], room_bytes: int) -> int | None:
    """Return the least room above `room_bytes` in which `first_fit` keeps another parameter; None if it keeps all."""
    missing: list[int] = []
    left = room_bytes
    for size in sizes:
        if size <= left:
            left -= size
        else:
            missing.append(size - left)
    return room_bytes + min(missing) if missing else None


def most_kept(sizes: Sequence[int], left_with: Callable[[int], float], kept: int = 0) -> int:
    """Return the most bytes of parameters that can be kept within a budget.

    If `kept` does not fit, larger values are tried as long as the needed memory falls: keeping a little may need less
    memory than keeping nothing, for example if a bucket's buffer becomes smaller. Above the first value that fits, the
    search assumes that memory grows with the kept bytes.

    Args:
        sizes: bytes of each parameter, in the order in which `first_fit` keeps them.
        left_with: returns the bytes left of the budget for a number of kept bytes; negative: over budget.
        kept: kept bytes to begin with.

    Returns:
        The most kept bytes that fit. If no value fits, the tried value that exceeds the budget least.
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
        room = int(kept + left)  # keeping n bytes usually needs at most n
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
    """Return the peak bytes of a rank in a step, not counting parameters, buffers and optimizer state.

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
    """Return the bytes that each stage can keep gathered such that no rank exceeds its budget.

    The stages of a rank are filled in order, until none can keep more. If no choice fits, the result exceeds the budget
    by the least amount found.

    Args:
        budget_bytes: budget of each rank, after subtracting parameters, buffers and optimizer state.
        schedule: a schedule that `schedules_for` returns for these numbers.
        ranks: number of ranks in the pipeline.
        sizes: for each stage, the gathered bytes of each parameter that may be kept.
        cost_of: returns the cost of a stage (by index) that keeps a number of bytes; None: its graphs exceed the
            budget.
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
