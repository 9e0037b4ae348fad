"""Runs a schedule on paper: lanes, exposed time, memory curve.

The machine: one host program issues nodes in order. Compute runs in that order on its lane; a collective's start puts
it at the end of its group's queue, whose first run beside compute, and a wait blocks the compute lane until it is done:

    compute   [mm][mm]......[mm]          . exposed: the compute lane waits
    group:0    [-----gather----]

Host and disk copies are queued on lanes of their own in the same way; whoever reads their result waits for it.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import MemoryCurve, curve_of
from zgraph.analysis.storages import Storage, storages_of
from zgraph.graph import nodes
from zgraph.scheduling.timeline import GROUP, Sharing, Span, Timeline

COMPUTE = "compute"


def simulate(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing | None = None,
    storages: Iterable[Storage] | None = None,
) -> Timeline:
    """Run nodes in an order on paper.

    Args:
        order: all nodes of a graph, each behind its inputs.
        costs: of every call; what is not a call takes no time.
        sharing: what lanes take from one another; None: nothing.
        storages: as the memory curve counts them; None: `storages_of(order)`.

    Raises:
        ValueError: a call has no cost, or a node stands before what it reads.
    """
    work = Work.of(order, costs, sharing or Sharing())
    clock = Clock(work)
    for node in range(len(work.nodes)):
        clock.issue(node)
    clock.drain()
    return clock.timeline(curve_of(order, storages_of(order) if storages is None else storages))


@dataclass(frozen=True)
class Work:
    """The nodes of a graph by number, with what the machine must know of each.

    Attributes:
        nodes: in the order of the numbers.
        numbers: the same, the other way round.
        us: of each node.
        lanes: the names of the lanes beside compute.
        capacities: of the links behind them.
        lane: of each node: a position in `lanes`, or one of the constants below.
        pending: of each node: the collectives and copies whose results it reads, directly or through views.
        sharing: of the lanes.
    """

    nodes: tuple[fx.Node, ...]
    numbers: Mapping[fx.Node, int]
    us: list[float]
    lanes: tuple[str, ...]
    capacities: Mapping[str, float]
    lane: list[int]
    pending: list[tuple[int, ...]]
    sharing: Sharing

    ON_COMPUTE = -1
    IN_NO_TIME = -2
    WAITS = -3

    @classmethod
    def of(cls, order: Sequence[fx.Node], costs: Mapping[fx.Node, NodeCost], sharing: Sharing) -> Work:
        numbers = {node: number for number, node in enumerate(order)}
        lanes: dict[str, int] = {}
        us: list[float] = []
        lane: list[int] = []
        pending: list[tuple[int, ...]] = []
        for number, node in enumerate(order):
            cost = _cost_of(node, costs)
            us.append(cost.us)
            if cost.lane == COMPUTE:
                lane.append(cls.ON_COMPUTE)
            elif cost.lane:
                lane.append(lanes.setdefault(cost.lane, len(lanes)))
            else:
                lane.append(cls.WAITS if nodes.is_wait(node) else cls.IN_NO_TIME)
            behind: dict[int, None] = {}
            for source in node.all_input_nodes:
                position = numbers.get(source, number)
                if position >= number:
                    raise ValueError(f"simulate: {node.name} stands before {source.name}, which it reads.")
                if lane[position] >= 0:
                    behind[position] = None
                elif lane[position] == cls.IN_NO_TIME:
                    behind |= dict.fromkeys(pending[position])
            pending.append(tuple(behind))
        return cls(tuple(order), numbers, us, tuple(lanes), sharing.capacities(lanes), lane, pending, sharing)


def _cost_of(node: fx.Node, costs: Mapping[fx.Node, NodeCost]) -> NodeCost:
    cost = costs.get(node)
    if cost is None:
        if node.op == "call_function":
            raise ValueError(f"simulate: {node.name} has no cost; give one to every call, NodeCost('', 0.0) if free.")
        return _FREE
    if not (math.isfinite(cost.us) and cost.us >= 0):
        raise ValueError(f"simulate: {node.name} costs {cost.us} us; write a finite number that is not negative.")
    return cost


_FREE = NodeCost("", 0.0)
_NOTHING = -1


class Clock:
    """The machine while nodes are issued to it, one after the other; times are in microseconds.

    Attributes:
        now: when the program issues its next node.
        end: of each node, infinite until it is known.
        exposed: for each collective or copy that was waited for, how long.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        count = len(work.nodes)
        self.now = 0.0
        self.begin = [math.inf] * count
        self.end = [math.inf] * count
        self.exposed: dict[int, float] = {}
        self.hidden: dict[int, float] = {}
        self.cause = [_NOTHING] * count  # what had to end before each could begin
        self.last = _NOTHING  # what the program was held up by last
        links = [work.sharing.link_of(name) for name in work.lanes]
        self._link = [links.index(link) for link in links]
        self._gain = [work.sharing.gains.get(link, 1.0) for link in links]
        self._takes = [work.sharing.compute_share if name.startswith(GROUP) else 0.0 for name in work.lanes]
        self._issues = [work.sharing.issue_us if name.startswith(GROUP) else 0.0 for name in work.lanes]
        self._free = [work.sharing.at_once_on(name) for name in work.lanes]  # how many more may run
        self._on_link = [0] * len(links)  # how many run
        self._queues: list[deque[int]] = [deque() for _ in work.lanes]  # those that have not begun
        self._left: dict[int, float] = {}  # of those that run: what is left at `_stamp`, at their speed alone
        self._stamp = 0.0
        self._next = math.inf  # when the first of those running ends, at present speeds
        self._rate = 1.0  # of compute, while they run
        self._idle = 0.0  # for how long the compute lane has waited

    def issue(self, node: int) -> None:
        """Let the program come to a node, and go past it."""
        lane = self.work.lane[node]
        if lane == Work.IN_NO_TIME:
            self.begin[node] = self.end[node] = self.now
        elif lane >= 0:
            if self._issues[lane]:
                self._compute(self._issues[lane])
            self._queues[lane].append(node)
            self._begin(lane, self.last)
            self._finish_due()
        else:
            self.begin[node] = self.now
            self.cause[node] = self.last
            for start in self.work.pending[node]:
                self._wait(node, start)
            if lane == Work.ON_COMPUTE:
                self.begin[node] = self.now
                self._compute(self.work.us[node])
                if self.work.us[node]:
                    self.last = node
            self.end[node] = self.now

    def copy(self) -> Clock:
        """The same state, to go on from in another way."""
        new = copy.copy(self)
        new.begin, new.end = self.begin.copy(), self.end.copy()
        new.exposed, new.hidden, new.cause = self.exposed.copy(), self.hidden.copy(), self.cause.copy()
        new._queues = [queue.copy() for queue in self._queues]
        new._left, new._free, new._on_link = self._left.copy(), self._free.copy(), self._on_link.copy()
        return new

    def backlog_us(self, lane: int, until: int | None = None) -> float:
        """How long a lane would take for what it has been given, one after the other; up to a node, that included."""
        passed = self.now - self._stamp
        backlog = 0.0
        for node, left in self._left.items():  # in the order in which they began
            if self.work.lane[node] == lane:
                backlog += max(0.0, left - passed * self._speed(lane))
                if node == until:
                    return backlog
        for node in self._queues[lane]:
            backlog += self.work.us[node]
            if node == until:
                break
        return backlog

    def is_done(self, node: int) -> bool:
        return self.end[node] <= self.now

    def drain(self) -> None:
        """Let everything under way come to its end."""
        while self._left:
            self._advance_idle()

    def timeline(self, memory: MemoryCurve) -> Timeline:
        """What became of the nodes, when all are issued and done."""
        work = self.work
        names = {Work.ON_COMPUTE: COMPUTE, Work.IN_NO_TIME: "", Work.WAITS: ""} | dict(enumerate(work.lanes))
        spans = {
            node: Span(begin, end, names[lane])
            for node, begin, end, lane in zip(work.nodes, self.begin, self.end, work.lane, strict=True)
        }
        busy = dict.fromkeys([COMPUTE, *work.lanes], 0.0)
        until = dict.fromkeys(busy, 0.0)
        for span in spans.values():
            if span.lane:  # those of one lane begin in order, and some run at once
                busy[span.lane] += max(0.0, span.end_us - max(span.begin_us, until[span.lane]))
                until[span.lane] = max(until[span.lane], span.end_us)
        last = max(
            (number for number, us in enumerate(work.us) if us), key=lambda number: self.end[number], default=None
        )
        return Timeline(
            step_us=self.now,
            spans=spans,
            exposed_us={work.nodes[start]: self.exposed.get(start, 0.0) for start in self.hidden},
            hidden_us={work.nodes[start]: us for start, us in self.hidden.items()},
            busy_us=busy,
            memory=memory,
            causes={work.nodes[n]: work.nodes[cause] for n, cause in enumerate(self.cause) if cause != _NOTHING},
            last=None if last is None else work.nodes[last],
        )

    def _compute(self, us: float) -> None:
        while us > 0:
            end = self.now + us / self._rate if self._rate > 0 else math.inf
            us -= (self._next - self.now) * self._rate if end > self._next else us
            self.now = min(end, self._next)
            self._finish_due()

    def _wait(self, node: int, start: int) -> None:
        since = self.now
        while self.end[start] > self.now:
            self._advance_idle()
        if self.now > since:
            self.exposed[start] = self.exposed.get(start, 0.0) + self.now - since
            self.cause[node] = self.last = start

    def _advance_idle(self) -> None:
        self._idle += self._next - self.now
        self.now = self._next
        self._finish_due()

    def _begin(self, lane: int, cause: int) -> None:
        """Let the first of a lane's queue run, while there is room and what they read is there."""
        queue = self._queues[lane]
        while queue and self._free[lane]:
            node = queue[0]
            if any(self.end[start] > self.now for start in self.work.pending[node]):
                return  # the end of what it reads will come back to it
            self._catch_up()
            queue.popleft()
            self._count(lane, 1)
            self.begin[node] = self.now
            self.hidden[node] = self._idle
            self.cause[node] = cause
            self._left[node] = self.work.us[node]
            self._look_ahead()

    def _finish_due(self) -> None:
        while self._next <= self.now:
            self._finish_first()

    def _finish_first(self) -> None:
        """End what ends now, and let what waits for it begin."""
        node = min(self._left, key=lambda node: self._left[node] / self._speed(self.work.lane[node]))
        lane = self.work.lane[node]
        self._left[node] = self._speed(lane) * (self._next - self._stamp)  # exactly, whatever was rounded
        self._catch_up()
        del self._left[node]
        self._count(lane, -1)
        self.end[node] = self.now
        self.hidden[node] = self.now - self.begin[node] - (self._idle - self.hidden[node])
        self._look_ahead()
        for other in range(len(self._queues)):
            self._begin(other, node)

    def _count(self, lane: int, more: int) -> None:
        self._free[lane] -= more
        self._on_link[self._link[lane]] += more

    def _catch_up(self) -> None:
        """Bring what is left of those running up to now."""
        for node in self._left:
            speed = self._speed(self.work.lane[node])
            self._left[node] = max(0.0, self._left[node] - (self.now - self._stamp) * speed)
        self._stamp = self.now

    def _look_ahead(self) -> None:
        """When the first of those running ends, and how fast compute is until then."""
        self._next, taken = math.inf, 0.0
        for node, left in self._left.items():
            lane = self.work.lane[node]
            speed = self._speed(lane)
            self._next = min(self._next, self._stamp + left / speed)
            taken += self._takes[lane] * speed
        self._rate = max(0.0, 1.0 - taken)

    def _speed(self, lane: int) -> float:
        return min(1.0, self._gain[lane] / self._on_link[self._link[lane]])
