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

    Updates, and copies that read or overwrite device tensors, start after all compute queued so far.

    Attributes:
        stores: memory of every tier except the host.
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
        """Start copying `kept` from its tier to new device memory. Callers must first wait for its earlier copies."""
        ...

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        """Start copying a device tensor over `kept`, a tensor of another tier."""
        ...

    def spill(self, tensor: Tensor, key: str) -> Copy:
        """Start copying a device tensor to a new tensor of the tier with this `Tier.key`."""
        ...

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        """Start copying `kept`, a host tensor, over `tensor`, a device tensor."""
        ...

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Start an update of host tensors, after all compute queued so far and after earlier updates.

        Before the call, the caller must wait for the copies of the update's inputs. After the call, it must wait on the
        host for the returned future.
        """
        ...

    def drain(self) -> None:
        """Wait on the host for all started copies and updates; then the host may access its tensors.

        Used, for example, after a program has failed while its copies and updates go on.

        Raises:
            DiskError: on a GPU, a write to disk failed before any caller waited for it.
        """
        ...


@functools.cache
def lanes_of(device: torch.device) -> CopyLanes:
    """The copy lanes of a device, made on first use."""
    return StreamLanes(device, module_of(device)) if is_gpu(device) else ThreadLanes()
