"""Tiers: the kinds of memory in which a model's tensors are stored, each described by a `Tier` object.

The `Tier` object gives graphs, the cost model, ledgers and reports the tier's lanes, costs and name. Users define a
tier as a subclass of `Tier`, and pass an instance to `zgraph.Offload(params=..., optimizer=...)`.
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
        """Wait for the copy and return the new tensor, which compute queued later may use.

        Raises:
            RuntimeError: the copy has failed.
        """
        ...


class Store(Protocol):
    """Memory of a tier on this rank. Copies in one direction end in the order in which they were started."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a CPU tensor is in this memory. Called for every input of every step, so it must be fast.

        A store that looks addresses up must forget a tensor's address when the tensor dies: other memory can get it.
        """
        ...

    def empty(self, like: Tensor, name: str) -> Tensor:
        """Return an uninitialised CPU tensor in this memory, with the shape and dtype of `like`.

        Args:
            like: tensor that gives shape and dtype.
            name: name of the tensor, for error messages.
        """
        ...

    def start_in(self, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start a copy of `kept`, a tensor in this memory, to new memory of the device that has these copy lanes."""
        ...

    def start_out(self, source: Tensor, kept: Tensor, lanes: CopyLanes) -> Copy:
        """Start a copy of a device tensor over `kept`, a tensor in this memory, after all compute queued so far."""
        ...

    def finish(self) -> None:
        """Block until all copies have ended. Also called after a program has failed."""
        ...


class Links(Protocol):
    """Cost model of the links of a rank, implemented by `zgraph.Hardware`."""

    @property
    def host_to_device(self) -> Any: ...

    @property
    def device_to_host(self) -> Any: ...

    def disk_copy_us(self, moved_bytes: float, *, to_device: bool) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A kind of memory in which tensors are stored.

    Attributes:
        name: name in options, dumps and reports.
        to_device, from_device: lanes of copies to the device and from the device; None for the device itself.
        updates: whether tensors of this tier are updated in place, concurrently with compute, if the device is a CPU.
            With a GPU, only tensors on the host are updated in place.
        is_staged: whether copies between this tier and a GPU pass through pinned buffers on the host.
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
        """String by which operators name this tier; unique for each store, see `Stores.by_key`."""
        return self.name

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        """Return the memory of this tier on a rank; `lanes` are the copy lanes of the rank's device."""
        raise NotImplementedError(f"{type(self).__name__}.open: return the store of this rank")

    def copy_us(self, hardware: Links, nbytes: float, *, to_device: bool) -> float:
        """Return the predicted microseconds of a copy that runs alone; by default, of one between host and device."""
        return (hardware.host_to_device if to_device else hardware.device_to_host).us(nbytes)


@dataclass(frozen=True, kw_only=True)
class Host(Tier):
    """Memory of the host: pinned if the device is a GPU, else a separate pool that compute does not use."""

    name: str = "host"
    to_device: Lane | None = HOST_TO_DEVICE
    from_device: Lane | None = DEVICE_TO_HOST
    updates: bool = True

    def open(self, lanes: CopyLanes, rank: int) -> Store:
        return lanes.host


@dataclass(frozen=True, kw_only=True)
class Disk(Tier):
    """Files in a folder: one for each rank, deleted when the rank's process ends.

    Attributes:
        folder: path of the folder. It is created if its parent exists.
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
    """Route of a copy: to the device from `tier`, or from the device to `tier`."""

    tier: Tier
    to_device: bool

    @property
    def lane(self) -> Lane:
        """Lane on which the copy runs.

        Raises:
            ValueError: the tier is the device.
        """
        lane = self.tier.to_device if self.to_device else self.tier.from_device
        if lane is None:
            raise ValueError(f"tier {self.tier} has no lane: nothing is copied between the device and itself")
        return lane


def is_offloaded(tier: Tier | None) -> bool:
    """Return whether `tier` is another tier than the device; False for None, which means that no tier is recorded."""
    return tier is not None and tier != DEVICE


def listed(names: Iterable[str]) -> tuple[str, ...]:
    """Return tier names in the order of reports: device, host and disk, then all other names in `names`."""
    return tuple(dict.fromkeys([DEVICE.name, *NAMES, *names]))
