"""What a node costs, and on which lane."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node costs.

    Attributes:
        lane: what the node occupies: "compute", "group:<group name>" for a collective, "host_to_device",
            "device_to_host", "disk", or "" for what takes no time, such as views and waits.
        us: how long, in microseconds; of a collective from its start to its result, with the link to itself.
        flops: floating-point operations.
        moved_bytes: memory traffic, or bytes on the wire.
    """

    lane: str
    us: float
    flops: int = 0
    moved_bytes: int = 0
