"""Which rounds begin and end at a step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Running:
    """A round that has begun.

    Attributes:
        place: index of the fragment.
        number: number of the round at a meeting; of steps so far, if sites are fixed.
        sent: [numel], the values of this site when the round began.
        weight: weight of this site.
        begun_at, begun_s: number of the step at which the round began, and its time on the monotonic clock.
        found: the new anchor, once the round has run; None if it was given up.
    """

    place: int
    number: int
    sent: Tensor
    weight: float
    begun_at: int
    begun_s: float
    found: Future[Tensor | None]


@dataclass(frozen=True)
class Turn:
    """Rounds that end and begin at a step.

    Attributes:
        ending: rounds that end.
        beginning: (number of the round, index of its fragment).
        giving: numbers of newcomers' requests for values, to be answered.
    """

    ending: Sequence[Running]
    beginning: Sequence[tuple[int, int]]
    giving: Sequence[int]


@dataclass(frozen=True)
class Timetable:
    """When rounds begin and end.

    Attributes:
        every: number of steps between two rounds of a fragment.
        delay: number of steps that a round may take.
        fragments: number of fragments.
    """

    every: int
    delay: int
    fragments: int

    def begins(self, place: int, steps: int) -> bool:
        """Return whether a fragment's round begins after so many steps."""
        since = steps - place * self.every // self.fragments
        return since > 0 and since % self.every == 0
