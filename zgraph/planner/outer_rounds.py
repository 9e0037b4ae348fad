"""Plans the rounds of `zgraph.OuterSteps` over a link between sites, so that steps hide them."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from zgraph.compression.methods import BlockMethod, CompressionMethod
from zgraph.compression.payload import BucketLayout
from zgraph.errors import check_least, is_count
from zgraph.reporting.tables import duration, size
from zgraph.step.outer.fragments import pack
from zgraph.step.outer.rounds import WEIGHT_BYTES

LATENCY_US = 20_000.0  # of each of a round's two exchanges, between distant sites
_LANE = 60  # characters
_LABELS = string.digits + string.ascii_letters
_UNITS = MappingProxyType({"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})


@dataclass(frozen=True)
class OuterPlan:
    """Predicted rounds of outer steps; `print` it.

    Attributes:
        every, fragments, delay: options for `zgraph.OuterSteps`.
        sent_bytes: bytes that all ranks of a site send to other sites, for each step.
        round_us: time of a fragment's round, in microseconds.
        exposed_us: time for which a step waits for other sites, on average.
        kept_bytes: bytes that a rank keeps: anchors, momentum and errors.
        step_us: time of a step without waits, in microseconds.
    """

    every: int
    fragments: int
    delay: int
    sent_bytes: float
    round_us: float
    exposed_us: float
    kept_bytes: int
    step_us: float

    def __str__(self) -> str:
        waits = f"a step waits {duration(self.exposed_us)}" if self.exposed_us else "hidden"
        return (
            f"zgraph.OuterSteps(model, sites, every={self.every}, fragments={self.fragments}, delay={self.delay})\n"
            f"  a round of a fragment {duration(self.round_us)}, {waits}; a site sends {size(self.sent_bytes)} a step, "
            f"a rank keeps {size(self.kept_bytes)}\n"
            f"  link |{self.lane()}| {self.every} steps, each with the fragment that is sent"
        )

    def lane(self) -> str:
        """Return the link between sites during `every` steps, as text of one character for each step.

        Rounds run one after another, each as soon as its step has ended and the link is free. A digit or letter names
        the fragment that is sent during this step; a dot marks an idle link. With more than 60 steps, each character
        covers several steps.
        """
        columns = min(self.every, _LANE)
        drawn = ["."] * columns
        for fragment, begin, end in self.rounds():
            first, last = math.floor(begin * columns / self.every), math.ceil(end * columns / self.every)
            for column in range(max(first, 0), min(last, columns)):
                drawn[column] = _LABELS[fragment % len(_LABELS)]
        return "".join(drawn)

    def rounds(self) -> list[tuple[int, float, float]]:
        """Return fragment, begin and end of each round that runs during `every` steps, in steps since their beginning.

        A round that began before has a negative begin, and one that ends afterwards an end above `every`.
        """
        found: list[tuple[int, float, float]] = []
        free = 0.0  # the step in which the link is free again
        for turn in range(2 * self.fragments):  # of two periods, so that the second one begins as all others
            begin = max(free, float(turn * self.every // self.fragments))
            free = begin + self.round_us / self.step_us
            if free > self.every:
                found.append((turn % self.fragments, begin - self.every, free - self.every))
        return [one for one in found if one[1] < self.every]

    def document(self) -> dict[str, Any]:
        """Return the plan as plain tables, for `sites.json`."""
        names = ("fragment", "start_us", "end_us")
        scales = (1, self.step_us, self.step_us)
        columns = zip(*self.rounds(), strict=True)
        rounds = {
            name: [scale * one for one in column] for name, scale, column in zip(names, scales, columns, strict=True)
        }
        return asdict(self) | {"rounds": rounds}


def plan_rounds(
    numels: Sequence[int],
    step_us: float,
    *,
    ranks: int,
    sites: int,
    link: str,
    every: int,
    codec: CompressionMethod | None,
    latency_us: float = LATENCY_US,
) -> OuterPlan:
    """Choose the number of fragments with which steps wait least, then with the smallest delay.

    Args:
        numels: number of elements that a rank exchanges, of each trained parameter.
        step_us: time of a step.
        ranks: number of ranks of a site, which share its link.
        sites: number of sites.
        link: rate of a site's link in each direction, such as "100mbit".
        every, codec: as for `zgraph.OuterSteps`.
        latency_us: latency of an exchange.

    Raises:
        ValueError: an option is invalid.
    """
    who = "zgraph.Plan.outer_steps"
    if not is_count(sites, 2):
        raise ValueError(f"{who}: sites={sites!r}; write a number of sites, at least 2.")
    if not is_count(every):
        raise ValueError(f"{who}: every={every!r}; write a number of steps, at least 1.")
    check_least(who, 0, "microseconds, at least 0", latency_us=latency_us)
    bytes_per_us = _bytes_per_us(who, link)

    def sent_bytes(numel: int) -> int:
        """Bytes that a rank sends in a round of `numel` elements."""
        align = codec.group if isinstance(codec, BlockMethod) else 1
        rows = math.ceil(numel / align / sites) * align
        row = rows * 4 if codec is None else BucketLayout(codec, (rows,), 1).payload_bytes
        return (sites - 1) * (2 * row + WEIGHT_BYTES)

    def round_us(packed: Sequence[Sequence[int]]) -> float:
        """Time of the largest fragment's round."""
        largest = max(sum(numels[place] for place in places) for places in packed)
        return 2 * latency_us + ranks * sent_bytes(largest) / bytes_per_us

    def exposed_us(packed: Sequence[Sequence[int]]) -> float:
        """Time by which all rounds, which run one after another, exceed that of `every` steps."""
        return max(0.0, len(packed) * 2 * latency_us + all_bytes(packed) / bytes_per_us - every * step_us)

    def all_bytes(packed: Sequence[Sequence[int]]) -> int:
        return ranks * sum(sent_bytes(sum(numels[place] for place in places)) for places in packed)

    def delay_of(packed: Sequence[Sequence[int]]) -> int:
        return min(every, math.ceil(round_us(packed) / step_us))

    choices = [pack(numels, count) for count in range(1, 1 + min(every, len(numels)))]
    packed = min(
        choices,  # waits that differ by less than a hundredth of a step count as equal
        key=lambda packed: (round(100 * exposed_us(packed) / every / step_us), delay_of(packed), len(packed)),
    )
    numel = sum(numels)
    errors = 0
    if codec is not None:
        state = codec.state(math.ceil(numel / sites), sites).values()
        errors = sum(math.prod(shape) * dtype.itemsize for shape, dtype in state)
    return OuterPlan(
        every,
        len(packed),
        delay_of(packed),
        all_bytes(packed) / every,
        round_us(packed),
        exposed_us(packed) / every,
        kept_bytes=4 * numel + 4 * math.ceil(numel / sites) + errors + errors // sites,
        step_us=step_us,
    )


def _bytes_per_us(who: str, link: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", link)
    if found is None or not float(found[1]):
        raise ValueError(f'{who}: link={link!r}; write a number and a unit, such as "100mbit" or "1gbit".')
    return float(found[1]) * _UNITS[found[2]] / 8 / 1e6
