"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks

WORLDS = [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4))]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", help="the release that test_versions.py expects, instead of that in constraints.txt")
    parser.addoption("--kills", type=int, default=20, help="how often test_kills.py kills its run")
    parser.addoption("--graphs", type=int, default=20, help="how many schedules test_plan_schedule.py compares")


@pytest.fixture(scope="session", params=WORLDS, ids=lambda world: f"ranks{world}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """1, 2, 3 and 4 real gloo ranks; pytest runs all tests of one size before it starts the next."""
    running = Ranks(request.param)
    yield running
    running.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    running = Ranks(2)
    yield running
    running.close()
