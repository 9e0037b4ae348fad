"""Simulate a schedule: time on each lane, exposed time, memory curve.

The simulated program issues nodes in order. Compute runs in this order on its own lane. The start of a collective is
added to the queue of its process group, which runs concurrently with compute. A wait blocks the compute lane until its
collective has ended:

    compute   [mm][mm]......[mm]          . exposed: the compute lane waits
    group:0    [-----gather----]

Copies to and from host and disk have their own lanes, with queues like those of groups. Nodes that read a copy's result
wait for the copy. Host updates have their own lane, too, and run concurrently with compute until their wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from zgraph.analysis.cost import FREE, NodeCost
from zgraph.analysis.liveness import MemoryCurve, curve_of
from zgraph.analysis.storages import Storage, storages_of
from zgraph.graph import meta, nodes
from zgraph.scheduling.timeline import Sharing, Span, Timeline
from zgraph.tiers.lanes import COMPUTE, Lane


def simulate(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing | None = None,
    storages: Iterable[Storage] | None = None,
) -> Timeline:
    """Simulate nodes in the given order.

    Args:
        order: all nodes of a graph, each after its inputs.
        costs: cost of every call; other nodes take no time.
        sharing: how lanes slow each other down; None: they do not.
        storages: storages for the memory curve; None: `storages_of(order)`.

    Raises:
        ValueError: a call has no cost, or a node comes before one of its inputs.
    """
    work = Work.of(order, costs, sharing or Sharing())
    clock = Clock(work)
    for node in range(len(work.nodes)):
        clock.issue(node)
    clock.drain()
    return clock.timeline(curve_of(order, storages_of(order) if storages is None else storages))


@dataclass(frozen=True)
class Work:
    """The nodes of a graph as numbers, with their times and lanes.

    Attributes:
        nodes: nodes by number.
        numbers: numbers by node.
        us: microseconds of each node.
        lanes: all lanes but compute.
        links: link that each lane of `lanes` uses.
        capacities: throughput of each link, as a multiple of the speed of one transfer.
        lane: lane of each node: an index into `lanes`, or one of ON_COMPUTE, IN_NO_TIME and WAITS.
        pending: for each node, the collectives and copies whose results it reads, directly or through views.
        update_of: for each wait for a host update, the update.
        sharing: how lanes slow each other down.
    """

    nodes: tuple[fx.Node, ...]
    numbers: Mapping[fx.Node, int]
    us: list[float]
    lanes: tuple[Lane, ...]
    links: tuple[str, ...]
    capacities: Mapping[str, float]
    lane: list[int]
    pending: list[tuple[int, ...]]
    update_of: Mapping[int, int]
    sharing: Sharing

    ON_COMPUTE = -1
    IN_NO_TIME = -2
    WAITS = -3

    @classmethod
    def of(cls, order: Sequence[fx.Node], costs: Mapping[fx.Node, NodeCost], sharing: Sharing) -> Work:
        numbers = {node: number for number, node in enumerate(order)}
        lanes: dict[Lane, int] = {}
        us: list[float] = []
        lane: list[int] = []
        pending: list[tuple[int, ...]] = []
        updates: dict[int | None, int] = {}
        update_of: dict[int, int] = {}
        for number, node in enumerate(order):
            cost = _cost_of(node, costs)
            us.append(cost.us)
            if cost.lane == COMPUTE:
                lane.append(cls.ON_COMPUTE)
            elif cost.lane is not None:
                lane.append(lanes.setdefault(cost.lane, len(lanes)))
            else:
                lane.append(cls.WAITS if nodes.is_wait(node) or nodes.is_update_wait(node) else cls.IN_NO_TIME)
            behind: dict[int, None] = {}
            if nodes.is_update_wait(node):
                update_of[number] = updates[meta.beside(node)]
                if lane[update_of[number]] >= 0:  # else it was costed as compute
                    behind[update_of[number]] = None
            elif meta.beside(node) is not None:
                updates[meta.beside(node)] = number
            for source in node.all_input_nodes:
                position = numbers.get(source, number)
                if position >= number:
                    raise ValueError(f"simulate: {node.name} comes before {source.name}, which it reads.")
                if lane[position] >= 0:
                    behind[position] = None
                elif lane[position] == cls.IN_NO_TIME:
                    behind |= dict.fromkeys(pending[position])
            pending.append(tuple(behind))
        return cls(
            nodes=tuple(order),
            numbers=numbers,
            us=us,
            lanes=tuple(lanes),
            links=tuple(map(sharing.link_of, lanes)),
            capacities=sharing.capacities(lanes),
            lane=lane,
            pending=pending,
            update_of=update_of,
            sharing=sharing,
        )


def _cost_of(node: fx.Node, costs: Mapping[fx.Node, NodeCost]) -> NodeCost:
    cost = costs.get(node)
    if cost is None:
        if node.op == "call_function":
            raise ValueError(f"simulate: {node.name} has no cost; give one to every call, NodeCost(None, 0.0) if free.")
        return FREE
    if not (math.isfinite(cost.us) and cost.us >= 0):
        raise ValueError(f"simulate: {node.name} costs {cost.us} us; write a finite number that is not negative.")
    return cost


_NOTHING = -1


class Clock:
    """State of the simulated program while nodes are issued. Times are in microseconds.

    Attributes:
        now: time at which the program issues its next node.
        end: end of each node; infinite until it is known.
        exposed: for each collective or copy, the time for which compute waited.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        count = len(work.nodes)
        self.now = 0.0
        self.begin = [math.inf] * count
        self.end = [math.inf] * count
        self.exposed: dict[int, float] = {}
        self.hidden: dict[int, float] = {}
        self.cause = [_NOTHING] * count  # node that had to end before each could begin
        self.last = _NOTHING  # node that delayed the program last
        self._link = [work.links.index(link) for link in work.links]
        self._gain = [work.sharing.gains.get(link, 1.0) for link in work.links]
        self._speed = [1.0] * len(work.links)  # of each running node on a link, relative to running alone
        self._takes = [work.sharing.compute_share if lane.is_group else 0.0 for lane in work.lanes]
        self._issues = [work.sharing.issue_us if lane.is_group else 0.0 for lane in work.lanes]
        self._free = [work.sharing.at_once_on(lane) for lane in work.lanes]  # how many more may run on each lane
        self._on_link = [0] * len(work.links)  # how many are running on each link
        self._queues: list[deque[int]] = [deque() for _ in work.lanes]  # issued, not begun
        self._left: dict[int, float] = {}  # time left at `_stamp` of each running node, at the speed it has alone
        self._stamp = 0.0
        self._next = math.inf  # when the first running node ends, at present speeds
        self._rate = 1.0  # speed of compute while they run
        self._idle = 0.0  # how long the compute lane has waited so far

    def issue(self, node: int) -> None:
        """Issue a node, and advance `now` to the time at which the program can issue the next one."""
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
        """Return an independent copy of this state."""
        new = object.__new__(Clock)
        new.__dict__.update(self.__dict__)  # faster than copy.copy, and searches copy often
        new.begin, new.end = self.begin.copy(), self.end.copy()
        new.exposed, new.hidden, new.cause = self.exposed.copy(), self.hidden.copy(), self.cause.copy()
        new._queues = [queue.copy() for queue in self._queues]
        new._left, new._free = self._left.copy(), self._free.copy()
        new._on_link, new._speed = self._on_link.copy(), self._speed.copy()
        return new

    def backlog_us(self, lane: int, until: int | None = None) -> float:
        """Return the time that a lane needs to run its queue, one node at a time.

        Args:
            lane: index of the lane.
            until: node at whose end to stop; None: the end of the queue.
        """
        passed = self.now - self._stamp
        backlog = 0.0
        for node, left in self._left.items():  # ordered by when they began
            if self.work.lane[node] == lane:
                backlog += max(0.0, left - passed * self._speed[self._link[lane]])
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
        """Advance the time until all running and queued nodes have ended."""
        while self._left:
            self._advance_idle()

    def timeline(self, memory: MemoryCurve) -> Timeline:
        """Return the timeline. All nodes must have been issued, and must have ended."""
        work = self.work
        lane_of = {Work.ON_COMPUTE: COMPUTE, Work.IN_NO_TIME: None, Work.WAITS: None} | dict(enumerate(work.lanes))
        spans = {
            node: Span(begin, end, lane_of[lane])
            for node, begin, end, lane in zip(work.nodes, self.begin, self.end, work.lane, strict=True)
        }
        busy = dict.fromkeys([COMPUTE, *work.lanes], 0.0)
        until = dict.fromkeys(busy, 0.0)
        for span in spans.values():
            if span.lane is not None:  # on a lane they begin in order, and may overlap
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
        """Begin nodes from the head of a lane's queue while the lane has room and the nodes' inputs are ready."""
        queue = self._queues[lane]
        while queue and self._free[lane]:
            node = queue[0]
            if any(self.end[start] > self.now for start in self.work.pending[node]):
                return  # called again when its inputs end
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
        """End the node that is due, and begin queued nodes that can run now."""
        left, speed, link, lane_of = self._left, self._speed, self._link, self.work.lane
        node = min(left, key=lambda node: left[node] / speed[link[lane_of[node]]])
        lane = lane_of[node]
        left[node] = speed[link[lane]] * (self._next - self._stamp)  # exact despite rounding
        self._catch_up()
        del self._left[node]
        self._count(lane, -1)
        self.end[node] = self.now
        self.hidden[node] = self.now - self.begin[node] - (self._idle - self.hidden[node])
        self._look_ahead()
        for other, queue in enumerate(self._queues):
            if queue:
                self._begin(other, node)

    def _count(self, lane: int, more: int) -> None:
        self._free[lane] -= more
        link = self._link[lane]
        self._on_link[link] += more
        if self._on_link[link]:
            self._speed[link] = min(1.0, self._gain[link] / self._on_link[link])

    def _catch_up(self) -> None:
        """Subtract the time that has passed from the remaining time of all running nodes."""
        passed, lane_of = self.now - self._stamp, self.work.lane
        for node, left in self._left.items():
            self._left[node] = max(0.0, left - passed * self._speed[self._link[lane_of[node]]])
        self._stamp = self.now

    def _look_ahead(self) -> None:
        """Compute when the next running node ends, and the speed of compute until then."""
        self._next, taken = math.inf, 0.0
        for node, left in self._left.items():
            lane = self.work.lane[node]
            speed = self._speed[self._link[lane]]
            self._next = min(self._next, self._stamp + left / speed)
            taken += self._takes[lane] * speed
        self._rate = max(0.0, 1.0 - taken)
