"""Which rows of a table of parameters `make test` leaves to `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Rows (values, or tuples of them) that bring nothing for which there is no faster test; say beside it which."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]
