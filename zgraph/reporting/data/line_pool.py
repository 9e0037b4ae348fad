"""Compact storage of graph texts: each distinct line is stored once, and each pass as a diff of line numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import fx

from zgraph.graph.text import Line, line_of
from zgraph.reporting.data.frame import LineColumns, Strings

Runs = list[tuple[int, int]]
Hunk = tuple[int, int, Runs]


class LinePool:
    """Numbers code lines: equal lines of different graphs share a number, but each line of one graph has its own."""

    def __init__(self, strings: Strings) -> None:
        self.strings = strings
        self.columns = LineColumns()
        self._numbers: dict[tuple[Line, int], int] = {}

    def lines_of(self, graph: fx.Graph) -> list[int]:
        """Return the numbers of a graph's lines, in program order; new lines are added to the pool."""
        met: dict[Line, int] = {}
        found: list[int] = []
        for node in list(graph.nodes):
            line = line_of(node)
            again = met[line] = met.get(line, -1) + 1
            found.append(self._number(line, again))
        return found

    def _number(self, line: Line, again: int) -> int:
        key = line, again
        if key not in self._numbers:
            self._numbers[key] = len(self.columns.name)
            self.columns.name.append(line.name)
            self.columns.value.append(self.strings.number(line.value))
            self.columns.call.append(line.call)
            self.columns.parameters.append(self.strings.number(line.parameters))
        return self._numbers[key]


def runs_of(numbers: Sequence[int]) -> Runs:
    """Return numbers as runs (first, count) of consecutive numbers: [4, 5, 6, 2] becomes [(4, 3), (2, 1)]."""
    runs: Runs = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs


def hunks_between(before: Sequence[int], after: Sequence[int]) -> list[Hunk]:
    """Return the diff that turns the line numbers `before` into `after`, with as many unchanged lines as possible.

    Each argument lists every number at most once. Unchanged lines are a longest increasing subsequence, found in
    O(n log n).
    """
    hunks: list[Hunk] = []
    old = new = 0
    for kept_old, kept_new in [*_kept(before, after), (len(before), len(after))]:
        if kept_old > old or kept_new > new:
            hunks.append((old, kept_old - old, runs_of(after[new:kept_new])))
        old, new = kept_old + 1, kept_new + 1
    return hunks


def _kept(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Return the unchanged lines as pairs (position in `before`, position in `after`), by patience sorting."""
    place_of = {number: place for place, number in enumerate(before)}
    pairs = [(place_of[number], place) for place, number in enumerate(after) if number in place_of]
    ends: list[int] = []  # smallest end of an increasing subsequence, by its length
    last: list[int] = []  # index of the pair at this end
    previous: list[int] = []
    for number, (old, _) in enumerate(pairs):
        length = bisect_left(ends, old)
        previous.append(last[length - 1] if length else -1)
        if length == len(ends):
            ends.append(old)
            last.append(number)
        else:
            ends[length], last[length] = old, number
    kept: list[tuple[int, int]] = []
    number = last[-1] if last else -1
    while number >= 0:
        kept.append(pairs[number])
        number = previous[number]
    return kept[::-1]
