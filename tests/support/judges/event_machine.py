"""A second account of the machine that schedules are simulated on: the world goes on from one change to the next.

A judge of `zgraph.scheduling.simulate`: exact fractions, one loop for the program and all lanes, memory counted anew at
each node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import fx

from zgraph.analysis.cost import FREE, NodeCost
from zgraph.analysis.storages import Storage
from zgraph.graph import nodes
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import COMPUTE, Lane


@dataclass
class World:
    """What has happened so far.

    Attributes:
        now: microseconds.
        left: of what is queued on each lane, the first of which run.
        done: nodes whose results are there.
        exposed: how long the program stood still for each collective or copy.
    """

    now: Fraction = Fraction(0)
    left: dict[Lane, list[list[Any]]] = field(default_factory=dict)
    done: dict[fx.Node, None] = field(default_factory=dict)
    exposed: dict[fx.Node, Fraction] = field(default_factory=dict)


def replay(order: Sequence[fx.Node], costs: Mapping[fx.Node, NodeCost], sharing: Sharing | None = None) -> World:
    """Run a schedule; `now` is the step's time."""
    sharing = sharing or Sharing()
    share = Fraction(sharing.compute_share)
    world = World()
    program = list(order)
    computing: Fraction | None = None
    issued: tuple[Lane, list[Any]] | None = None  # a collective, on which the program is still at work
    while program or any(world.left.values()):
        blocked: fx.Node | None = None
        if program and computing is None:
            node = program[0]
            cost = costs.get(node, FREE)
            blocked = _blocked(node, cost, world)
            if blocked is None:
                program.pop(0)
                if cost.lane == COMPUTE:
                    computing = Fraction(cost.us)
                elif cost.lane is not None and cost.lane.is_group and sharing.issue_us:
                    computing = Fraction(sharing.issue_us)
                    issued = cost.lane, [node, Fraction(cost.us)]
                elif cost.lane is not None:
                    world.left.setdefault(cost.lane, []).append([node, Fraction(cost.us)])
                elif all(_is_there(source, world) for source in node.all_input_nodes):
                    world.done[node] = None
                if computing is None:
                    continue
        running = _running(world, sharing)
        links = [sharing.link_of(lane) for lane, _ in running]
        gain = {link: Fraction(sharing.gains.get(link, 1.0)) for link in links}
        speeds = [min(Fraction(1), gain[link] / links.count(link)) for link in links]
        moving = list(zip(running, speeds, strict=True))
        taken = sum((speed * share for (lane, _), speed in moving if lane.is_group), Fraction(0))
        pace = max(Fraction(0), 1 - taken)
        changes = [entry[1] / speed for (_, entry), speed in moving]
        if computing is not None and (pace or not computing):
            changes.append(computing / pace if computing else Fraction(0))
        step = min(changes)
        world.now += step
        if blocked is not None:
            world.exposed[blocked] = world.exposed.get(blocked, Fraction(0)) + step
        if computing is not None:
            computing -= step * pace
            if not computing:
                computing = None
                if issued is not None:
                    world.left.setdefault(issued[0], []).append(issued[1])
                    issued = None
        for (lane, entry), speed in moving:
            entry[1] -= step * speed
            if not entry[1]:
                world.done[entry[0]] = None
                world.left[lane].remove(entry)
    return world


def _running(world: World, sharing: Sharing) -> list[tuple[Lane, list[Any]]]:
    """The first of each queue, up to one that waits for what it reads."""
    found: list[tuple[Lane, list[Any]]] = []
    for lane, queue in world.left.items():
        for entry in queue[: sharing.at_once if lane.is_group else 1]:
            if not _may_run(entry[0], world):
                break
            found.append((lane, entry))
    return found


def _blocked(node: fx.Node, cost: NodeCost, world: World) -> fx.Node | None:
    """Whom the program stands still for at this node."""
    if cost.lane not in (None, COMPUTE) or (cost.lane is None and not nodes.is_wait(node)):
        return None
    queued = {entry[0] for queue in world.left.values() for entry in queue}
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop(0)
        if source in queued:
            return source
        if nodes.is_getitem(source):
            pending.extend(source.all_input_nodes)
    return None


def _is_there(node: fx.Node, world: World) -> bool:
    return all(entry[0] is not node for queue in world.left.values() for entry in queue)


def _may_run(node: object, world: World) -> bool:
    assert isinstance(node, fx.Node)
    return all(_is_there(source, world) for source in node.all_input_nodes)


def peak_bytes(order: Sequence[fx.Node], storages: Sequence[Storage]) -> int:
    """The most that is alive while any node runs, by the meaning of each storage."""
    place = {node: number for number, node in enumerate(order)}
    intervals = [
        (
            place[one.first],
            len(order) if one.outlives else max(map(place.__getitem__, (one.first, *one.readers))),
            one.nbytes,
        )
        for one in storages
    ]
    return max(
        (sum(size for begin, end, size in intervals if begin <= now <= end) for now in range(len(order))), default=0
    )
