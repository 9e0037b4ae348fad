"""Copy lanes: asynchronous copies of whole tensors between a device's memory and other tiers.

    compute         [mm][mm][mm]......[mm][mm]
    device_to_host   [=== a ===]                      after this copy, a may be freed on the device
    host_to_device              [=== a ===]           after this copy, compute may read a again

On CUDA a lane is a stream, and host memory is pinned. If the device is a CPU, a lane is a thread, and host memory is a
separate pool that compute does not use. These copies are real, so that everything but their speed can be tested without
a GPU.
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
    """The copy lanes of one device. Copies on one lane end in the order in which they were started.

    Updates, and copies that read or overwrite device tensors, start after all compute that was queued earlier.

    Attributes:
        stores: memory of every tier except the host.
    """

    stores: Stores

    @property
    def host(self) -> Store:
        """Memory of the host."""
        ...

    def offload(self, tensor: Tensor) -> Copy:
        """Start a copy of a device tensor to new host memory."""
        ...

    def reload(self, kept: Tensor) -> Copy:
        """Start a copy of `kept` from its tier to new device memory.

        Earlier copies of `kept` must have been waited for.
        """
        ...

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        """Start a copy of the device tensor `source` over `kept`, a tensor of another tier."""
        ...

    def spill(self, tensor: Tensor, key: str) -> Copy:
        """Start a copy of a device tensor to new memory of the tier whose `Tier.key` is `key`."""
        ...

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        """Start a copy of the host tensor `kept` over the device tensor `tensor`."""
        ...

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Start an optimizer update of host tensors, after all compute queued so far and after earlier updates.

        Copies of the update's inputs must have been waited for.

        Returns:
            A future, which the caller must wait for on the host.
        """
        ...

    def drain(self) -> None:
        """Block until all started copies and updates have ended; host tensors can then be read and written.

        Used, for example, after a program has failed while its copies and updates go on.

        Raises:
            DiskError: on a GPU, a write to disk has failed and was not waited for earlier.
        """
        ...


@functools.cache
def lanes_of(device: torch.device) -> CopyLanes:
    """Return the copy lanes of a device, created on first use."""
    return StreamLanes(device, module_of(device)) if is_gpu(device) else ThreadLanes()
