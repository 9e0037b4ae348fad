"""Which tests `make test` runs: of each test function, the rows that fit into a budget of seconds.

`tests/durations.json` has the seconds of each test, as `make durations` measured them; no test is marked as slow by
hand. A table of parameters is thinned to the rows that show most per second: first each value of each parameter, then
each pair of values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).parents[1] / "durations.json"
BUDGET_S = 0.8  # of a test function in `make test`
MOST_S = 1.6  # of its cheapest row, if none fits
KEPT_S = 0.3  # shorter tests are not in the file
SHORT_S = 0.1  # what one of them costs

Durations = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Row:
    """One row of a table: its seconds, and its parameters by name."""

    seconds: float
    parameters: dict[str, Any]

    @property
    def shows(self) -> set[frozenset[tuple[str, Any]]]:
        """Return its values and its pairs of values."""
        values = self.parameters.items()
        return {frozenset(some) for size in (1, 2) for some in combinations(values, size)}


def chosen(rows: Sequence[Row], *, budget_s: float = BUDGET_S, most_s: float = MOST_S) -> set[int]:
    """Return the places of the rows that a test function may run within its budget.

    Each choice is the row with the most new values and pairs per second among those that still fit. Where none fits,
    the cheapest row runs if it needs at most `most_s`.
    """
    found: set[int] = set()
    met: set[frozenset[tuple[str, Any]]] = set()
    left = budget_s
    while fitting := [place for place, row in enumerate(rows) if place not in found and row.seconds <= left]:
        best = max(fitting, key=lambda place: (len(rows[place].shows - met) / rows[place].seconds, -place))
        found.add(best)
        met |= rows[best].shows
        left -= rows[best].seconds
    if not found:
        cheapest = min(range(len(rows)), key=lambda place: rows[place].seconds)
        found |= {cheapest} if rows[cheapest].seconds <= most_s else set()
    return found


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what does not fit into the budgets, and worlds of one and of four ranks, which cost a start."""
    durations: Durations = json.loads(FILE.read_text())
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if "pool" in item.fixturenames and _parameters(item).get("ranks", 2) not in (2, 3):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("long") is None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, table in tables.items():
        seconds = durations.get(name, {})
        rows = [Row(seconds.get(_row(item), SHORT_S), _parameters(item)) for item in table]
        fast = chosen(rows)
        for place, item in enumerate(table):
            if place not in fast:
                item.add_marker(pytest.mark.slow)


def _row(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """Return its parameters; an object, which may have no text of its own, is the number of its row."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return {}
    plain = (str, int, float, type(None), torch.dtype)
    return {name: value if isinstance(value, plain) else spec.indices[name] for name, value in spec.params.items()}


def long(*rows: Any) -> list[Any]:
    """Return rows (values, or tuples of them) of which others show the same; only `make test-long` runs them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]


class Recorder:
    """A pytest plugin that adds up the seconds of each test and writes them to `tests/durations.json`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one of setup, call and teardown."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the tests that are not short, in the order of their names."""
        write(self.seconds)


def write(seconds: dict[str, float]) -> None:
    """Write the seconds of tests, by their ids; tests that did not run keep theirs."""
    known: Durations = json.loads(FILE.read_text()) if FILE.exists() else {}
    for nodeid, duration in seconds.items():
        name, _, row = nodeid.partition("[")
        known.setdefault(name, {})[row.removesuffix("]")] = round(duration, 1)
    kept = {
        name: {row: value for row, value in sorted(rows.items()) if value >= KEPT_S} for name, rows in known.items()
    }
    FILE.write_text(json.dumps({name: kept[name] for name in sorted(kept) if kept[name]}, indent=0) + "\n")
