"""What became of a schedule: when each node ran, what was exposed, and what lanes take from one another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from zgraph.analysis.liveness import MemoryCurve

GROUP = "group:"


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What lanes take from one another.

    Attributes:
        links: the link behind a lane. A lane that is not listed has a link to itself.
        at_once: how many collectives of one group run at once; they begin in order.
        gains: by link, how much more several transfers at once get through than one alone, which some transports do not
            let fill a link. n of them run at gain/n of their speed alone, or at all of it. 1 where none is listed.
        issue_us: what the program itself spends on each collective, on the compute lane, before it is queued.
        compute_share: the part of a collective's time that it takes from compute which runs beside it: 0 where copies
            have engines of their own, up to 1 where one core does both (gloo).
    """

    links: Mapping[str, str] = field(default_factory=dict[str, str])
    at_once: int = 1
    gains: Mapping[str, float] = field(default_factory=dict[str, float])
    issue_us: float = 0.0
    compute_share: float = 0.0

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"simulate: at_once={self.at_once} collectives of a group; write 1 or more.")
        for link, gain in self.gains.items():
            if not (math.isfinite(gain) and gain >= 1):
                raise ValueError(
                    f"simulate: transfers at once get {gain} times as much through {link} as one alone does; write 1 "
                    "or more."
                )
        if not (math.isfinite(self.issue_us) and self.issue_us >= 0):
            raise ValueError(f"simulate: issue_us={self.issue_us}; write a finite time that is not negative.")
        if not 0 <= self.compute_share <= 1:
            raise ValueError(
                f"simulate: compute_share={self.compute_share} is the part of a collective's time that it takes from "
                "compute; write a number from 0 to 1."
            )

    def link_of(self, lane: str) -> str:
        return self.links.get(lane, lane)

    def at_once_on(self, lane: str) -> int:
        return self.at_once if lane.startswith(GROUP) else 1

    def capacities(self, lanes: Iterable[str]) -> dict[str, float]:
        """The most that runs on each link, in transfers at their speed alone."""
        at_once = dict[str, int]()
        for lane in lanes:
            link = self.link_of(lane)
            at_once[link] = at_once.get(link, 0) + self.at_once_on(lane)
        return {link: min(float(count), self.gains.get(link, 1.0)) for link, count in at_once.items()}


@dataclass(frozen=True, slots=True)
class Span:
    """When a node ran, in microseconds from the beginning, and on which lane ("" for waits and views)."""

    begin_us: float
    end_us: float
    lane: str

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Timeline:
    """What became of a schedule.

    Attributes:
        step_us: until every lane is done.
        spans: of every node. A wait's is the time for which it blocked.
        exposed_us: for each collective or copy how long the compute lane waited for it.
        hidden_us: for each how long it ran while the compute lane did not wait.
        busy_us: by lane.
        memory: over the order, of its storages alone.
        causes: for each node that took time or blocked: the node that had to end before it could begin.
        last: the node that ended last, None where nothing takes time.
    """

    step_us: float
    spans: Mapping[fx.Node, Span]
    exposed_us: Mapping[fx.Node, float]
    hidden_us: Mapping[fx.Node, float]
    busy_us: Mapping[str, float]
    memory: MemoryCurve
    causes: Mapping[fx.Node, fx.Node]
    last: fx.Node | None

    def utilisation(self, lane: str) -> float:
        """The part of the step for which a lane is busy."""
        return self.busy_us.get(lane, 0.0) / self.step_us if self.step_us else 0.0

    def critical_path(self, end: fx.Node | None = None) -> list[fx.Node]:
        """Nodes each of which began when the one before it ended, up to `end`, by default the end of the step."""
        node = self.last if end is None else end
        path: list[fx.Node] = []
        while node is not None:
            path.append(node)
            node = self.causes.get(node)
        return path[::-1]
