"""Tiers: the places of memory in which tensors of a model are kept, one row each.

Graphs, the cost model, ledgers and reports ask the row of a place for its lanes, costs and name. A place of your own is
a subclass of `Tier`, given to `zgraph.Offload(params=..., optimizer=...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from zgraph.tiers.lanes import DEVICE_TO_HOST, DISK, HOST_TO_DEVICE, Lane

if TYPE_CHECKING:
    from zgraph.tiers.copy_lanes import CopyLanes


class Copy(Protocol):
    """A copy that has been started."""

    def wait(self) -> Tensor:
        """The copied tensor, usable by all later compute of the caller.

        Raises:
            RuntimeError: the copy has failed.
        """
        ...


class Store(Protocol):
    """The memory of a tier on this rank. Copies of one direction end in the order in which they were started."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in this memory; asked for every input of every step."""
        ...

    def empty(self, like: Tensor, name: str) -> Tensor:
        """An uninitialised CPU tensor in this memory, of the shape and dtype of another; the name is for errors."""
        ...

    def start_in(self, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start copying a tensor of this memory into new memory of the device that has these lanes."""
        ...

    def start_out(self, source: Tensor, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start copying a tensor of the device, after everything computed so far, over one of this memory."""
        ...

    def finish(self) -> None:
        """Wait for all copies, also after a program that failed."""
        ...


class Links(Protocol):
    """The measured or specified links of a rank, see `zgraph.Hardware`."""

    @property
    def host_to_device(self) -> Any: ...

    @property
    def device_to_host(self) -> Any: ...

    def disk_copy_us(self, moved_bytes: float, *, to_device: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place of memory.

    Attributes:
        name: as options, dumps and reports write it.
        to_device, from_device: lanes of copies to the device and from it; None: the device itself.
        updates: whether a CPU updates tensors in place here while it computes; from a GPU only the host does.
        is_staged: between it and a GPU, copies pass through pinned buffers of the host.
    """

    name: str
    to_device: Lane | None = None
    from_device: Lane | None = None
    updates: bool = False
    is_staged: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """Name of this rank's memory in operators, which finds its store again."""
        return self.name

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        """The memory of this tier on a rank, whose device has these lanes."""
        raise NotImplementedError(f"{type(self).__name__}.open: return the store of this rank")

    def copy_us(self, hardware: Links, nbytes: float, *, to_device: bool) -> float:
        """Predicted microseconds of a copy, alone; by default at the rate of the host's memory."""
        return (hardware.host_to_device if to_device else hardware.device_to_host).us(nbytes)


@dataclass(frozen=True, kw_only=True)
class Host(Tier):
    """Memory of the host: pinned where the device is a GPU, else a pool that nothing computes in."""

    name: str = "host"
    to_device: Lane | None = HOST_TO_DEVICE
    from_device: Lane | None = DEVICE_TO_HOST
    updates: bool = True

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        return lanes.host


@dataclass(frozen=True, kw_only=True)
class Disk(Tier):
    """Files in a folder; each rank has one of its own, which is gone when the process is.

    Attributes:
        folder: made if only the last part of the path is missing.
    """

    folder: str = ""
    name: str = "disk"
    to_device: Lane | None = DISK
    from_device: Lane | None = DISK
    is_staged: bool = True

    @property
    def key(self) -> str:
        return self.folder

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        return lanes.stores.folder(self.folder, rank)

    def copy_us(self, hardware: Links, nbytes: float, *, to_device: bool) -> float:
        return hardware.disk_copy_us(nbytes, to_device=to_device)


DEVICE = Tier(name="device")
HOST = Host()
# Names that options accept, in the order in which reports list them.
NAMES: Mapping[str, type[Tier]] = MappingProxyType(
    {"host": Host, "disk": Disk}
)  # in the order in which reports list them


class Transit(NamedTuple):
    """The way of a copy between a tier and the device."""

    tier: Tier
    to_device: bool

    @property
    def lane(self) -> Lane:
        """The lane that carries it.

        Raises:
            ValueError: the tier is the device.
        """
        lane = self.tier.to_device if self.to_device else self.tier.from_device
        if lane is None:
            raise ValueError(f"tier {self.tier} has no lane: nothing is copied between the device and itself")
        return lane


def is_offloaded(tier: Tier | None) -> bool:
    """Whether a place is another one than the device; None: not recorded, as for most nodes of a graph."""
    return tier is not None and tier != DEVICE


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """Names of tiers as reports list them: the device, the host and disks, whether used or not, then others in use."""
    return tuple(dict.fromkeys([DEVICE.name, *NAMES, *names]))
