"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, RanksPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", help="the release that test_versions.py expects, instead of that in constraints.txt")
    parser.addoption("--kills", type=int, default=20, help="how often test_kills.py kills its run")
    parser.addoption("--graphs", type=int, default=20, help="how many schedules test_plan_schedule.py compares")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave worlds of one and of four ranks to `make test-all`."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            world = item.callspec.params.get("ranks", 2)
            if world not in (2, 3):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def pool() -> Iterator[RanksPool]:
    """Ranks of any number, for a test that needs two groups."""
    running = RanksPool()
    yield running
    running.close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, pool: RanksPool) -> Ranks:
    """Two real gloo ranks, or as many as the test says: see `worlds` and `every_world` in tests/support/ranks.py."""
    return pool.of(getattr(request, "param", 2))
