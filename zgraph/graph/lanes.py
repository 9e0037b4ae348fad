"""Lanes: resources of a rank that work concurrently, such as compute and links, each processing its own queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Memory spaces: the device that computes, which may be a CPU; the host's memory, if the device is a GPU, or what was
# copied there; a file.
MemorySpace = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane; `str` is its name in dumps and reports, such as "compute", "group:0" or "host_to_device".

    Attributes:
        kind: "group" where collectives of a process group run, and
        group_name: its name.
    """

    kind: Literal["compute", "group", "host_to_device", "device_to_host", "disk", "host_updates"]
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
HOST_UPDATES = Lane("host_updates")  # a worker of the host, which updates what rests there
