"""Copies of error-feedback state between host and device, overlapped with compute.

A fetch copies from pinned memory to the device, a store copies back; each runs on a CUDA stream of its own.

    operator         copies                                      time ->
    load_errors      starts the fetch                            [==fetch==]
    quantize_grads   waits for it; starts the store afterwards   compute ....[quantize] compute
                                                                                       [==store==]

Code on the host that reads a stored tensor first waits for the store: see `Feedback.tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zgraph.tiers.devices import is_gpu, module_of


class Arrival(Protocol):
    """Event at the end of a copy, such as a `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Block the host until the copy has ended."""
        ...


class HostCopies(Protocol):
    """Copies between the host and one device; only `Arrival.synchronize` blocks the host."""

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a host tensor in the memory that is fastest to copy: pinned if the device is a GPU.

        A tensor that is in such memory already is returned unchanged.
        """
        ...

    def fetch(self, kept: Sequence[Tensor], stored: Arrival | None) -> tuple[list[Tensor], Arrival | None]:
        """Start copying host tensors to the device, after an earlier store has ended.

        Args:
            kept: host tensors.
            stored: event at the end of the store; None: no store is running.

        Returns:
            The new device tensors, and the event at the end of the copies.
        """
        ...

    def wait(self, fetched: Arrival | None) -> None:
        """Make later compute on the device wait for the end of a fetch."""
        ...

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> Arrival | None:
        """Start copying device tensors (`computed`) into host tensors (`kept`).

        Returns:
            The event at the end of the copies.
        """
        ...


class OnTheHost:
    """`HostCopies` for the CPU as device: copies are synchronous."""

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, kept: Sequence[Tensor], stored: Arrival | None) -> tuple[list[Tensor], None]:
        return [tensor.clone() for tensor in kept], None

    def wait(self, fetched: Arrival | None) -> None: ...

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        for source, target in zip(computed, kept, strict=True):
            target.copy_(source)


class OnStreams:
    """`HostCopies` for CUDA: pinned memory, and one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = module_of(device)
        self.to_device, self.to_host = self.gpu.Stream(device), self.gpu.Stream(device)

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def fetch(self, kept: Sequence[Tensor], stored: Any) -> tuple[list[Tensor], Arrival]:
        # Allocated on the compute stream, where readers free them: memory of the copy stream might be reused too early.
        fetched = [torch.empty_like(tensor, device=self.device) for tensor in kept]
        self.to_device.wait_stream(self.gpu.current_stream(self.device))
        if stored is not None:
            self.to_device.wait_event(stored)
        with self.gpu.stream(self.to_device):
            for source, target in zip(kept, fetched, strict=True):
                target.copy_(source, non_blocking=True)
            return fetched, self.to_device.record_event()

    def wait(self, fetched: Any) -> None:
        if fetched is not None:
            self.gpu.current_stream(self.device).wait_event(fetched)

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> Arrival:
        self.to_host.wait_stream(self.gpu.current_stream(self.device))
        with self.gpu.stream(self.to_host):
            for source, target in zip(computed, kept, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self.to_host)  # it may be freed before the copy has read it
            return self.to_host.record_event()


@functools.cache
def copies_of(device: torch.device) -> HostCopies:
    """Return the `HostCopies` for a device, created on first use."""
    return OnStreams(device) if is_gpu(device) else OnTheHost()
