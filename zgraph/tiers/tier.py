"""Tiers: the kinds of memory in which tensors of a model are kept, each described by one `Tier` object.

Graphs, the cost model, ledgers and reports ask this object for the tier's lanes, costs and name. A tier of your own is
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
        """Wait for the copy and return the new tensor, which all later compute of the caller may use.

        Raises:
            RuntimeError: the copy has failed.
        """
        ...


class Store(Protocol):
    """The memory of a tier on this rank. Copies of one direction end in the order in which they were started."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in this memory. Must be fast: called for every input of every step."""
        ...

    def empty(self, like: Tensor, name: str) -> Tensor:
        """Make an uninitialised CPU tensor in this memory, of the shape and dtype of `like`; `name` is for errors."""
        ...

    def start_in(self, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start copying `kept`, a tensor of this memory, into new memory of the device that has these copy lanes."""
        ...

    def start_out(self, source: Tensor, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start copying a device tensor over `kept`, a tensor of this memory, after all compute queued so far."""
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
    """A kind of memory in which tensors are kept.

    Attributes:
        name: name in options, dumps and reports.
        to_device, from_device: lanes of copies to the device and from the device; None for the device itself.
        updates: whether a CPU device updates tensors of this tier in place during compute. With a GPU device, only
            tensors on the host are updated in place.
        is_staged: whether copies between this tier and a GPU pass through pinned buffers of the host.
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
        """String by which operators name this tier; `Stores.by_key` maps it to this rank's store."""
        return self.name

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        """Open the memory of this tier on a rank whose device has these copy lanes."""
        raise NotImplementedError(f"{type(self).__name__}.open: return the store of this rank")

    def copy_us(self, hardware: Links, nbytes: float, *, to_device: bool) -> float:
        """Predicted microseconds of a copy while no other copy runs; by default like a copy between host and device."""
        return (hardware.host_to_device if to_device else hardware.device_to_host).us(nbytes)


@dataclass(frozen=True, kw_only=True)
class Host(Tier):
    """Memory of the host: pinned if the device is a GPU, else a separate pool that nothing computes in."""

    name: str = "host"
    to_device: Lane | None = HOST_TO_DEVICE
    from_device: Lane | None = DEVICE_TO_HOST
    updates: bool = True

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        return lanes.host


@dataclass(frozen=True, kw_only=True)
class Disk(Tier):
    """Files in a folder: one for each rank, which disappears when the rank's process ends.

    Attributes:
        folder: path of the folder, which is made if only the last part of the path is missing.
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
NAMES: Mapping[str, type[Tier]] = MappingProxyType({"host": Host, "disk": Disk})


class Transit(NamedTuple):
    """Route of a copy: a tier, and whether the copy goes from the tier to the device or back."""

    tier: Tier
    to_device: bool

    @property
    def lane(self) -> Lane:
        """The lane on which the copy runs.

        Raises:
            ValueError: the tier is the device.
        """
        lane = self.tier.to_device if self.to_device else self.tier.from_device
        if lane is None:
            raise ValueError(f"tier {self.tier} has no lane: nothing is copied between the device and itself")
        return lane


def is_offloaded(tier: Tier | None) -> bool:
    """Whether a tier is not the device; False for None, which means that no tier is recorded, as for most nodes."""
    return tier is not None and tier != DEVICE


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """Tier names in the order of reports: always device, host and disk, then all other names in `names`."""
    return tuple(dict.fromkeys([DEVICE.name, *NAMES, *names]))
