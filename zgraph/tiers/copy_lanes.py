"""Copy lanes: asynchronous copies of whole tensors between a device's memory and other tiers.

    compute         [mm][mm][mm]......[mm][mm]
    device_to_host   [=== a ===]                      a may be freed on the device once its copy has ended
    host_to_device              [=== a ===]           and is read there once it has come back

On CUDA a lane is a stream, and host memory is pinned. Where the device is a CPU, a lane is a thread, and "host memory"
a separate pool that nothing computes on. These copies are real, so that everything but their speed can be tested
without a GPU.
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

    Copies that read or overwrite device tensors, and updates, start after all compute queued so far.

    Attributes:
        stores: memory of tiers other than the host's.
    """

    stores: Stores

    @property
    def host(self) -> Store:
        """The memory of the host."""
        ...

    def offload(self, tensor: Tensor) -> Copy:
        """Start copying a device tensor to new host memory."""
        ...

    def reload(self, kept: Tensor) -> Copy:
        """Start copying a tensor of another tier to new device memory; earlier copies of it have been waited for."""
        ...

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        """Start copying a device tensor over `kept`, a tensor of another tier."""
        ...

    def spill(self, tensor: Tensor, key: str) -> Copy:
        """Start copying a device tensor to a new tensor of the tier with this `Tier.key`."""
        ...

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        """Start copying a host tensor, `kept`, over a device tensor."""
        ...

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Start an update of host tensors, after all compute queued so far and after earlier updates.

        The caller waits for the returned future on the host. Before the call it must have waited for the copies that
        bring the update's inputs.
        """
        ...

    def drain(self) -> None:
        """Wait on the host for all started copies and updates; then the host may access its tensors.

        Used, for example, after a program has failed while its copies and updates go on.

        Raises:
            DiskError: on a GPU, a write to disk failed that was not waited for.
        """
        ...


@functools.cache
def lanes_of(device: torch.device) -> CopyLanes:
    """The copy lanes of a device, made on first use."""
    return StreamLanes(device, module_of(device)) if is_gpu(device) else ThreadLanes()
