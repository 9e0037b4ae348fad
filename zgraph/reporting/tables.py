"""Tables of texts, which a terminal prints and a notebook shows as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        title: text above the table.
        columns: names of the columns; empty for a table whose rows start with their labels.
        rows: cells of each row, one per column.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_html(tables: Iterable[Table]) -> str:
    """Return tables as HTML; all cells are escaped."""
    return "\n".join(_html_of(table) for table in tables if table.rows)


def _html_of(table: Table) -> str:
    rows = [_row(table.columns, "th")] if table.columns else []
    rows += [_row(row, "td") for row in table.rows]
    return f"<table><caption>{html.escape(table.title)}</caption>\n" + "\n".join(rows) + "\n</table>"


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def size(count: float) -> str:
    """Format bytes in the largest unit with a value of at least 1: "1.50 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(count) >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count:.0f} bytes"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: "1 graph", "2 graphs"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(us: float) -> str:
    """Format microseconds in the largest unit with a value of at least 1: "1.50 ms"."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= factor:
            return f"{us / factor:.2f} {unit}"
    return f"{us:.1f} us"


def rate(bytes_per_us: float) -> str:
    """Format bytes per microsecond as a rate in powers of ten: "1.25 GB/s"."""
    return f"{bytes_per_us / 1e3:.3g} GB/s" if bytes_per_us < 1e6 else f"{bytes_per_us / 1e6:.3g} TB/s"
