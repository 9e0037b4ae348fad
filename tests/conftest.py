"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import breakages, budget
from tests.support.checkpoints import save_both_ways
from tests.support.hash_seeds import HashSeeds
from tests.support.ranks import Ranks, RanksPool

POOL = pytest.StashKey[RanksPool]()


def _part(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)  # which the parser of options reports
    return part, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", help="the release that test_versions.py expects, instead of that in constraints.txt")
    parser.addoption("--slow-part", type=_part, default="1/1", help="K/N: of the slow tests, run the K-th of N parts")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")
    parser.addoption("--kills", type=int, default=10, help="how often test_kills.py kills its run")
    parser.addoption("--graphs", type=int, default=20, help="how many schedules test_plan_schedule.py compares")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Say which tests are slow or long, and leave out the slow tests of another part."""
    _leave_worlds(items)
    budget.mark_slow(items)
    part, parts = config.option.slow_part
    # By a checksum of the name: neighbours in a table differ in one parameter, and which part has which should not.
    others = [
        item
        for item in items
        if item.get_closest_marker("slow") and 1 + zlib.crc32(item.nodeid.encode()) % parts != part
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


def _leave_worlds(items: list[pytest.Item]) -> None:
    """Leave half of a table that runs on one to four ranks to `make test-long`.

    `make test-all` runs every other row on one rank and on two, and those between on three and on four, so that each
    number of ranks meets each value of each other parameter.
    """
    rows: dict[tuple[Any, ...], dict[int, pytest.Item]] = {}
    levels: dict[tuple[Any, ...], dict[str, int]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec") or "pool" not in item.fixturenames:
            continue  # without ranks, or with a mere number of that name
        places: list[int] = []
        for name, value in item.callspec.params.items():
            if name != "ranks":
                known = levels.setdefault((item.parent, item.originalname, name), {})
                places.append(known.setdefault(repr(value), len(known)))
        if places:
            world = item.callspec.params.get("ranks", 2)
            rows.setdefault((item.parent, item.originalname, *places), {})[world] = item
    for (_, _, *places), by_world in rows.items():
        if {1, 2, 3, 4} <= by_world.keys():
            for world in (3, 4) if sum(places) % 2 else (1, 2):
                by_world[world].add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what another torch breaks."""
    if config.getoption("--torch") is None:
        return
    terminalreporter.section("what this torch breaks")
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    for line in breakages.summary((one.nodeid, _message_of(one)) for one in reports):
        terminalreporter.write_line(line)


def _message_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """What a test raised; where only text of it is left, as of a worker that has died, that text."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return report.longreprtext if crash is None else crash.message


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where all tests report, which is not in a worker of xdist; find no plans of other runs."""
    os.environ.setdefault("ZGRAPH_CACHE_DIR", "")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(budget.Recorder())


def pytest_sessionstart() -> None:
    """Look for no garbage among tests that are all kept."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what is loaded, and thousands of tests, out of every collection of garbage to come.

    A compile makes hundreds of thousands of objects that live to its end. By default it is searched every 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[RanksPool]:
    """Ranks of any number, for a test that needs two groups."""
    running = pytestconfig.stash[POOL] = RanksPool()
    yield running
    running.close()


@pytest.fixture(scope="session")
def hash_seeds() -> Iterator[HashSeeds]:
    """Processes with different seeds of Python's hash."""
    running = HashSeeds()
    yield running
    running.close()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Between two tests, never between two calls of one, which may rely on what the first has left."""
    running = item.config.stash.get(POOL, None)
    if running is not None:
        running.renew()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, pool: RanksPool) -> Ranks:
    """Two real gloo ranks, or as many as the test says: see `worlds` and `every_world` in tests/support/ranks.py."""
    return pool.of(getattr(request, "param", 2))


@pytest.fixture(scope="session")
def saved(pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks after three steps: dcp/, own/step_00000003/, and whole values in expected.pt."""
    folder = tmp_path_factory.mktemp("saved")
    pool.of(2).run(save_both_ways, str(folder))
    return folder
