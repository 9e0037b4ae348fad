"""Random training loops: each trains as the plain model does, or is refused by name on every rank.

A failure prints the loop, made as small as it can be, as a script to paste.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.random_loops import Program, draw, judge_together, shrunk
from tests.support.ranks import RankFailure, Ranks

# How many of forty, and of two thousand: what compiles takes a hundred times as long.
SHARES = {"eager": 37, "fx": 2, "step": 1}
LONG = {"eager": 1600, "fx": 250, "step": 150}
PARTS = 10


def failure(ranks: Ranks, program: Program) -> str:
    """Why a program is neither right nor refused; empty where it is."""
    try:
        found = ranks.run(judge_together, program)
    except RankFailure as error:
        return str(error)
    return "" if len({kind for kind, _ in found}) == 1 else f"ranks disagree: {found}"


def run_all(ranks: Ranks, programs: list[Program]) -> Counter[str]:
    kinds = Counter[str]()
    for program in programs:
        try:
            found = ranks.run(judge_together, program)
            assert len({kind for kind, _ in found}) == 1, found
        except AssertionError as error:
            least = shrunk(program, lambda smaller: failure(ranks, smaller) != "")
            pytest.fail(f"{least.script}\n{failure(ranks, least) or error}", pytrace=False)
        kinds[found[0][0]] += 1
    return kinds


@pytest.mark.parametrize("mode", SHARES)
def test_a_random_loop_is_right_or_refused(ranks: Ranks, mode: str) -> None:
    kinds = run_all(ranks, [draw(seed, mode) for seed in range(SHARES[mode])])
    assert kinds["right"] >= 0.8 * SHARES[mode]  # what is refused, or raises on the plain model, tells little


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", SHARES)
def test_many_random_loops_are_right_or_refused(ranks: Ranks, mode: str, part: int) -> None:
    count = -(-(LONG[mode] - SHARES[mode]) // PARTS)
    first = SHARES[mode] + part * count
    kinds = run_all(ranks, [draw(seed, mode) for seed in range(first, first + count)])
    assert kinds["right"] >= 0.8 * count


@pytest.mark.parametrize("seed", [66, 80])
def test_drawn_loops_that_were_wrong(ranks: Ranks, seed: int) -> None:
    """Gradients of a window by torch.autograd.grad; two forwards in a window that is then set to zero in place."""
    assert failure(ranks, draw(seed, "eager")) == ""
