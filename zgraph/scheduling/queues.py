"""The collectives that a scheduler places: their order on each link, and how much of the link each uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.graph import dataflow, meta, nodes
from zgraph.runtime.chunks import payload_bytes
from zgraph.scheduling.dependencies import Dependencies
from zgraph.scheduling.simulate import Work


@dataclass(frozen=True, kw_only=True)
class Queues:
    """Starts of collectives, by number (see `Work`), in queues.

    Attributes:
        queues: lists of starts that keep their order. All starts of a queue have the same lane, and the same number of
            collectives in the chain before them. Starts that read only graph inputs have queues of their own. Queues of
            parameter gathers come first.
        queue_of: index in `queues` of each start's queue, in program order.
        start_of: start that each wait waits for.
        wait_of: wait of each start, the first one if there are several.
        link_of: link that each start's lane uses; "" if the start takes no time.
        capacity_of: throughput of each start's link, as a multiple of one transfer's speed; 1 if the start takes no
            time.
        limited_bytes: bytes of each start, as `limited_bytes` counts them.
    """

    queues: tuple[tuple[int, ...], ...]
    queue_of: Mapping[int, int]
    start_of: Mapping[int, int]
    wait_of: Mapping[int, int]
    link_of: Mapping[int, str]
    capacity_of: Mapping[int, float]
    limited_bytes: Mapping[int, int]

    @classmethod
    def of(cls, work: Work, dependencies: Dependencies) -> Queues:
        starts = [number for number, is_start in enumerate(dependencies.is_start) if is_start]
        depth = dict[int, int]()  # length of the longest chain of collectives that each node depends on
        queued: dict[tuple[int, bool, int], list[int]] = {}
        for start in starts:
            depth[start] = max((depth.get(before, 0) + 1 for before in dependencies.after[start]), default=0)
            key = (work.lane[start], dependencies.reads_inputs_alone(start), depth[start])
            queued.setdefault(key, []).append(start)
        queues = sorted(map(tuple, queued.values()), key=lambda queue: not dependencies.reads_inputs_alone(queue[0]))
        place_of = {start: place for place, queue in enumerate(queues) for start in queue}
        start_of = {
            number: start
            for number, node in enumerate(work.nodes)
            if nodes.is_wait(node) and dependencies.is_start[start := work.numbers[nodes.start_of(node)]]
        }
        link_of = {start: work.links[work.lane[start]] if work.lane[start] >= 0 else "" for start in starts}
        return cls(
            queues=tuple(queues),
            queue_of={start: place_of[start] for start in starts},
            start_of=start_of,
            wait_of={start: wait for wait, start in reversed(start_of.items())},
            link_of=link_of,
            capacity_of={start: work.capacities.get(link, 1.0) for start, link in link_of.items()},
            limited_bytes={start: limited_bytes(work.nodes[start]) for start in starts},
        )


def limited_bytes(start: fx.Node) -> int:
    """Bytes of a collective that count against `Limits.in_flight_bytes`: in general those of the unsharded tensor.

    A reduction counts 0 if its result is as large as its input, because waiting for it then frees no memory. This holds
    for codes, and for replicated gradients, of which each rank keeps the whole mean. Copies between memory spaces count
    0, because the activation needs the same bytes without a copy.
    """
    if nodes.is_copy_start(start):
        return 0
    carried = nodes.unsharded_bytes(start)
    return 0 if dataflow.copy_in(start) is None and _returned_bytes(start) >= carried else carried


def _returned_bytes(start: fx.Node) -> int:
    """Bytes of the graph outputs that are a collective's result, or that communication nodes alone make from it."""
    pending, seen = [start], {start}
    returned = 0
    while pending:
        node = pending.pop()
        for user in node.users:
            if user.op == "output":
                value = meta.value(node)
                returned += payload_bytes(value.shape, value.dtype) if isinstance(value, torch.Tensor) else 0
            elif nodes.is_communication(user) and user not in seen:
                seen.add(user)
                pending.append(user)
    return returned
