"""Any two features of a training loop, captured, train for twenty steps as the plain loop does, bit for bit.

Where a case fails: `python -m tests.support.step_gate CASE` runs it alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from covertable import make
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.ranks import Ranks, worlds
from tests.support.step_gate import LEVELS, Gate, train

PAIRS = [Gate(*row) for row in make(list(LEVELS.values()), strength=2)]
# A few; the others take as long, about five seconds each.
QUICK = [
    next(one for one in PAIRS if (one.optimizer, one.ranks) == (name, 2)) for name in ("adamw_fused", "sgd", "own")
]


def cases() -> list[Any]:
    return [
        pytest.param(one.ranks, one, id=str(one), marks=[] if one in QUICK else [pytest.mark.slow]) for one in PAIRS
    ]


@pytest.mark.parametrize(("ranks", "gate"), cases(), indirect=["ranks"], scope="session")
def test_any_two_features_train_as_the_plain_loop(ranks: Ranks, gate: Gate) -> None:
    assert min(ranks.run(train, gate)) > 0


def test_every_pair_of_levels_is_there() -> None:
    for names in itertools.combinations(LEVELS, 2):
        met = {tuple(getattr(one, name) for name in names) for one in PAIRS}
        assert met == set(itertools.product(*(LEVELS[name] for name in names)))


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
@drawn(2)  # seconds each
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
