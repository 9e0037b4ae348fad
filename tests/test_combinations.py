"""Every two features together, and in the long tests every three, train as the replicated model does.

Where a case fails: `python -m tests.support.combinations CASE` runs it alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from covertable import make

from tests.support.combinations import LEVELS, Combination, train
from tests.support.ranks import Ranks


def covering(strength: int) -> list[Combination]:
    """Few combinations in which any `strength` features meet at each of their levels, the same in every process."""
    return [Combination(*row) for row in make(list(LEVELS.values()), strength=strength)]


PAIRS = covering(2)
TRIPLES = [one for one in covering(3) if one not in PAIRS]


def cases(found: list[Combination], *marks: pytest.MarkDecorator) -> list[Any]:
    """Those that compile C++, or need more than two ranks, are slow."""
    return [
        pytest.param(
            one.ranks,
            one,
            id=str(one),
            marks=[*marks, *([pytest.mark.slow] if one.lowering == "inductor" or one.ranks > 2 else [])],
        )
        for one in found
    ]


@pytest.mark.parametrize(("ranks", "one"), cases(PAIRS), indirect=["ranks"], scope="session")
def test_any_two_features_train_as_the_replicated_model(ranks: Ranks, one: Combination) -> None:
    assert min(found["compared"] for found in ranks.run(train, one)) > 0


@pytest.mark.parametrize(("ranks", "one"), cases(TRIPLES, pytest.mark.long), indirect=["ranks"], scope="session")
def test_any_three_features_train_as_the_replicated_model(ranks: Ranks, one: Combination) -> None:
    assert min(found["compared"] for found in ranks.run(train, one)) > 0


@pytest.mark.parametrize(("strength", "found"), [(2, PAIRS), (3, [*PAIRS, *TRIPLES])])
def test_every_pair_and_triple_of_levels_is_there(strength: int, found: list[Combination]) -> None:
    for names in itertools.combinations(LEVELS, strength):
        met = {tuple(getattr(one, name) for name in names) for one in found}
        assert met == set(itertools.product(*(LEVELS[name] for name in names)))
