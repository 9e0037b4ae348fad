"""How ranks share islands: each goes through all, in an order by which little is compiled twice."""

from __future__ import annotations

import random

import pytest

from zgraph.codegen.inductor import order_of_rank


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_every_rank_goes_through_all(ranks: int, count: int) -> None:
    orders = [order_of_rank(rank, ranks, count) for rank in range(ranks)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count >= 2 * ranks:
        assert len({order[0] for order in orders}) == ranks


def test_neighbours_meet() -> None:
    assert order_of_rank(0, 1, 4) == [0, 1, 2, 3]
    assert [order_of_rank(rank, 2, 4) for rank in range(2)] == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert [order_of_rank(rank, 4, 4) for rank in range(4)] == [[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]


def seconds_of(durations: list[int], ranks: int) -> int:
    """When the last rank is done, if each skips what is in the cache, and compiles anew what another is still at."""
    pending = [order_of_rank(rank, ranks, len(durations)) for rank in range(ranks)]
    free = [0] * ranks
    kept: dict[int, int] = {}
    while any(pending):
        rank = min((rank for rank in range(ranks) if pending[rank]), key=free.__getitem__)
        island = pending[rank].pop(0)
        if kept.get(island, free[rank] + 1) > free[rank]:
            free[rank] += durations[island]
            kept[island] = min(kept.get(island, free[rank]), free[rank])
    return max(free)


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_need_half_the_time_plus_one_island(seed: int) -> None:
    """However unequal islands are, and wherever the large ones lie."""
    draw = random.Random(seed)
    durations = sorted(draw.randint(1, 100) for _ in range(30))
    assert seconds_of(durations, 2) <= sum(durations) // 2 + 2 * max(durations)
