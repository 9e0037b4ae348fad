"""Lanes: resources of a rank (compute, links) that run concurrently; each runs its own operations in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane. `str(lane)` is its name in dumps and reports, such as "compute", "group:0" or "host_to_device".

    Attributes:
        kind: "group" for collectives of a process group, else the lane's name.
        group_name: name of the process group if kind is "group", else empty.
    """

    kind: str
    group_name: str = ""

    @classmethod
    def of_group(cls, group_name: str) -> Lane:
        return cls("group", group_name)

    @property
    def is_group(self) -> bool:
        return self.kind == "group"

    def __str__(self) -> str:
        return f"group:{self.group_name}" if self.is_group else self.kind


COMPUTE = Lane("compute")
HOST_TO_DEVICE = Lane("host_to_device")
DEVICE_TO_HOST = Lane("device_to_host")
DISK = Lane("disk")
HOST_UPDATES = Lane("host_updates")  # a host thread that updates offloaded tensors
