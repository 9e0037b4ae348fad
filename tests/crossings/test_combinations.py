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


def covering(strength: int, levels: dict[str, list[Any]], salt: str = "") -> list[Combination]:
    """Few combinations in which any `strength` features meet at each of their levels, the same in every process."""
    return [Combination(*row) for row in make(list(levels.values()), strength=strength, salt=salt)]


# Where any lowering would do, fx: it compiles no C++, and is compared to the bit. With this salt 7 rows of 30 are of
# Inductor.
PAIRS = covering(2, LEVELS | {"lowering": ["fx", "inductor"]}, salt="9")
TRIPLES = [one for one in covering(3, LEVELS) if one not in PAIRS]


def cases(found: list[Combination], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(one.ranks, one, id=str(one), marks=marks) for one in found]


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
