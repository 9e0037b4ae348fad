"""Which rows of a table of parameters `make test` leaves to `make test-all` or to `make test-long`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Rows (values, or tuples of them) that bring nothing for which there is no faster test; say beside it which."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


def long(*rows: Any) -> list[Any]:
    """Rows of which others look at the same; only `make test-long` runs them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]
