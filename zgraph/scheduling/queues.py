"""Queues of the collectives that a scheduler places, and the capacity of their links."""

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
    """Queues of collectives, each given by the number of its start (see `Work`).

    Attributes:
        queues: starts of each queue, which keep their order. Starts of a queue have the same lane, and depend on
            equally long chains of collectives. Starts that read only graph inputs have queues of their own, which come
            first.
        queue_of: index in `queues` of each start's queue.
        start_of: for each wait, the start of its collective.
        wait_of: for each start, its wait; the first one if there are several.
        link_of: link that each start uses; "" if the start takes no time.
        capacity_of: throughput of each start's link, as a multiple of the speed of one transfer; 1 if the start takes
            no time.
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
    """Return the bytes of a collective that count against `Limits.in_flight_bytes`: those of its unsharded tensor.

    A reduction counts 0 if its result is at least as large as its input (codes of compressed gradients, replicated
    gradients), because waiting for it then frees no memory. Copies between memory spaces count 0, because the copied
    tensor needs the same bytes without a copy.
    """
    if nodes.is_copy_start(start):
        return 0
    carried = nodes.unsharded_bytes(start)
    return 0 if dataflow.copy_in(start) is None and _returned_bytes(start) >= carried else carried


def _returned_bytes(start: fx.Node) -> int:
    """Return the bytes of the graph outputs that are made from a collective's result without compute."""
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
