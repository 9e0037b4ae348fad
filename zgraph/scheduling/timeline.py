"""Result of a simulation: when each node ran, and what was exposed; also a model of how lanes slow each other down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from zgraph.analysis.liveness import MemoryCurve
from zgraph.errors import check_least
from zgraph.tiers.lanes import Lane


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How concurrent lanes slow each other down.

    Attributes:
        links: link that each lane uses; a lane that is not listed has a link of its own.
        at_once: how many collectives of one group run concurrently; they begin in order.
        gains: for each link, the throughput of concurrent transfers divided by that of a single transfer, which may not
            fill the link. Each of n transfers runs at min(1, gain/n) of its full speed. A link that is not listed has a
            gain of 1.
        issue_us: time on the compute lane for issuing each collective.
        compute_share: compute time that a concurrent collective costs, as a fraction of the collective's time: 0 with
            separate copy engines, up to 1 if one core does both (gloo).
    """

    links: Mapping[Lane, str] = field(default_factory=dict[Lane, str])
    at_once: int = 1
    gains: Mapping[str, float] = field(default_factory=dict[str, float])
    issue_us: float = 0.0
    compute_share: float = 0.0

    def __post_init__(self) -> None:
        check_least("simulate", 1, "1 or more", " collectives of a group", at_once=self.at_once)
        for link, gain in self.gains.items():
            if not (math.isfinite(gain) and gain >= 1):
                raise ValueError(
                    f"simulate: gain={gain} of {link} is the throughput of concurrent transfers relative to one alone; "
                    "write 1 or more."
                )
        if not (math.isfinite(self.issue_us) and self.issue_us >= 0):
            raise ValueError(f"simulate: issue_us={self.issue_us}; write a finite time that is not negative.")
        if not 0 <= self.compute_share <= 1:
            raise ValueError(
                f"simulate: compute_share={self.compute_share} is the part of a collective's time that it takes from "
                "compute; write a number from 0 to 1."
            )

    def link_of(self, lane: Lane) -> str:
        return self.links.get(lane, str(lane))

    def at_once_on(self, lane: Lane) -> int:
        return self.at_once if lane.is_group else 1

    def capacities(self, lanes: Iterable[Lane]) -> dict[str, float]:
        """Return the throughput of each link, as a multiple of the speed of one transfer."""
        at_once = dict[str, int]()
        for lane in lanes:
            link = self.link_of(lane)
            at_once[link] = at_once.get(link, 0) + self.at_once_on(lane)
        return {link: min(float(count), self.gains.get(link, 1.0)) for link, count in at_once.items()}


@dataclass(frozen=True, slots=True)
class Span:
    """Begin and end of a node, in microseconds from the graph's start, and its lane; waits and views have no lane."""

    begin_us: float
    end_us: float
    lane: Lane | None

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Timeline:
    """The simulated run of a schedule.

    Attributes:
        step_us: time until every lane is done.
        spans: begin and end of each node; for a wait, begin and end of its blocking.
        exposed_us: for each collective or copy, the time for which the compute lane waited for it.
        hidden_us: for each collective or copy, the part of its run in which the compute lane did not wait.
        busy_us: time for which each lane is busy.
        memory: bytes of storages alive over the order.
        causes: for each node that took time or blocked, the node that had to end before it could begin.
        last: node that ended last; None if no node takes time.
    """

    step_us: float
    spans: Mapping[fx.Node, Span]
    exposed_us: Mapping[fx.Node, float]
    hidden_us: Mapping[fx.Node, float]
    busy_us: Mapping[Lane, float]
    memory: MemoryCurve
    causes: Mapping[fx.Node, fx.Node]
    last: fx.Node | None

    def utilisation(self, lane: Lane) -> float:
        """Return the fraction of the step in which a lane is busy."""
        return self.busy_us.get(lane, 0.0) / self.step_us if self.step_us else 0.0

    def critical_path(self) -> list[fx.Node]:
        """Return the chain of nodes up to `last`, in which each node waited for the previous one."""
        node = self.last
        path: list[fx.Node] = []
        while node is not None:
            path.append(node)
            node = self.causes.get(node)
        return path[::-1]
