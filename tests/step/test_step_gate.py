"""Any two features of a training loop, captured, train for twenty steps as the plain loop does, bit for bit.

Where a case fails: `python -m tests.support.step_gate CASE` runs it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from covertable import make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.ranks import Ranks, worlds
from tests.support.step_gate import LEVELS, Gate, train

PAIRS = [Gate(*row) for row in make(list(LEVELS.values()), strength=2)]


def pairs(gate: Gate) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(((name, getattr(gate, name)) for name in LEVELS), 2))


def brought(gate: Gate) -> set[Any]:
    """Pairs of features, the optimizer not counted as one, and the optimizer itself."""
    return {pair for pair in pairs(gate) if pair[0][0] != "optimizer"} | {gate.optimizer}


def enough() -> Iterator[Gate]:
    """Enough for every optimizer and every pair of other features."""
    left = set[Any]().union(*map(brought, PAIRS))
    while left:
        chosen = max(PAIRS, key=lambda one: len(brought(one) & left))
        left -= brought(chosen)
        yield chosen


def cases() -> Iterator[Any]:
    """Long those that only bring an optimizer another stage or feature."""
    chosen = set(enough())
    for one in PAIRS:
        yield pytest.param(one.ranks, one, id=str(one), marks=[] if one in chosen else [pytest.mark.long])


@pytest.mark.parametrize(("ranks", "gate"), list(cases()), indirect=["ranks"], scope="session")
def test_any_two_features_train_as_the_plain_loop(ranks: Ranks, gate: Gate) -> None:
    assert min(ranks.run(train, gate)) > 0


def test_every_pair_of_levels_is_there() -> None:
    met = set[Any]().union(*map(pairs, PAIRS))
    for one, other in itertools.combinations(LEVELS, 2):
        assert met >= {((one, left), (other, right)) for left in LEVELS[one] for right in LEVELS[other]}


def gates(ranks: int) -> st.SearchStrategy[Gate]:
    levels = {name: st.sampled_from(values) for name, values in LEVELS.items() if name != "ranks"}
    widths = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    return st.builds(Gate, ranks=st.just(ranks), widths=widths, **levels)


def drawn(examples: int) -> Any:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # what fails is small enough
        suppress_health_check=checks,
    )


@worlds(2)
@drawn(2)
@given(gates(2))
def test_drawn_steps_train_as_the_plain_loop(ranks: Ranks, gate: Gate) -> None:
    assert min(ranks.run(train, gate, 6)) > 0


@worlds(2, 3)
@pytest.mark.long
@given(data=st.data())
@drawn(60)
def test_many_drawn_steps_train_as_the_plain_loop(ranks: Ranks, data: st.DataObject) -> None:
    gate = data.draw(gates(ranks.world))
    assert min(ranks.run(train, gate)) > 0
