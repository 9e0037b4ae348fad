"""Copy lanes: asynchronous copies of whole tensors between a device's memory and other tiers.

    compute         [mm][mm][mm]......[mm][mm]
    device_to_host   [=== a ===]                      a may be freed on the device once its copy has ended
    host_to_device              [=== a ===]           and is read there once it has come back

On CUDA a lane is a stream, and host memory is pinned. Where the device is a CPU, a lane is a thread, and host memory a
pool that nothing computes on: the copies are real, so that everything but their speed can be seen without a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from zgraph.tiers.devices import is_gpu, module_of
from zgraph.tiers.stores import Stores
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.tiers.thread_lanes import ThreadLanes
from zgraph.tiers.tier import Copy, Store


class CopyLanes(Protocol):
    """The lanes of one device. Copies of one lane end in the order in which they were started.

    Attributes:
        stores: memory of tiers other than the host's.
    """

    stores: Stores

    @property
    def host(self) -> Store:
        """The memory of the host."""
        ...

    def offload(self, tensor: Tensor) -> Copy:
        """Start copying a tensor of the device to host memory, after everything computed so far."""
        ...

    def reload(self, kept: Tensor) -> Copy:
        """Start copying a tensor of another tier, whose copy has been waited for, into new device memory."""
        ...

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        """Start copying a tensor of the device, after everything computed so far, over one of another tier."""
        ...

    def spill(self, tensor: Tensor, key: str) -> Copy:
        """Start copying a tensor of the device, after everything computed so far, to new memory of a tier."""
        ...

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        """Start copying a tensor of the host over one of the device, after everything computed so far."""
        ...

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Start an update of tensors of the host, after everything computed so far, and after earlier updates.

        The result is there once it has ended, which the host waits for. Copies that bring what it reads have been
        waited for, as by compute.
        """
        ...

    def drain(self) -> None:
        """Let the host wait for all that has been started: from then on it may read and write what rests there.

        As after a program that failed, whose copies and updates go on.

        Raises:
            DiskError: a write failed that nobody has waited for, on a GPU.
        """
        ...


@functools.cache
def lanes_of(device: torch.device) -> CopyLanes:
    """The copy lanes of a device, made on first use."""
    return StreamLanes(device, module_of(device)) if is_gpu(device) else ThreadLanes()
