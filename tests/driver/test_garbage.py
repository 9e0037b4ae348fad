"""Searches for garbage are rare while something is compiled, and as the user has set them afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from zgraph.driver.garbage import rarely_collected


@pytest.fixture
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "inside"), [(700, 20_000), (50_000, 50_000), (0, 0)])
@pytest.mark.usefixtures("threshold")
def test_searches_are_rare_inside(before: int, inside: int) -> None:
    gc.set_threshold(before, 5, 7)

    @rarely_collected()
    def fail() -> None:
        assert gc.get_threshold() == (inside, 5, 7)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.get_threshold() == (before, 5, 7)
