"""Copies of error-feedback state between host and device, overlapped with compute.

    load_errors       fetch: pinned memory -> device, on a stream of its own                 [==fetch==]
    quantize_grads    wait, kernels; store: device -> pinned, another stream       compute ..............[quantize]....
                                                                                                                [=store=]

Code that reads a kept tensor on the host first waits for the store to end, see `Feedback.tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zgraph.tiers.devices import is_gpu, module_of


class Arrival(Protocol):
    """The end of a copy, such as a `torch.cuda.Event`."""

    def synchronize(self) -> object:
        """Block the host until the copy has ended."""
        ...


class HostCopies(Protocol):
    """Copies to and from one device. Only `Arrival.synchronize` blocks the host."""

    def kept(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in the host memory that is fastest to copy, pinned on CUDA; unchanged if already there."""
        ...

    def fetch(self, kept: Sequence[Tensor], stored: Arrival | None) -> tuple[list[Tensor], Arrival | None]:
        """Start copying the tensors `kept` to the device, after the store that ends with the event `stored`.

        Returns:
            The new device tensors, and the event at the end of the copies.
        """
        ...

    def wait(self, fetched: Arrival | None) -> None:
        """Make all later compute wait for the fetch that ends with this event."""
        ...

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> Arrival | None:
        """Start copying `computed`, device tensors, into `kept`; return the event at the end of the copies."""
        ...


class OnTheHost:
    """Copies for a device that is a CPU: each copy has ended when the call that starts it returns."""

    def kept(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, kept: Sequence[Tensor], stored: Arrival | None) -> tuple[list[Tensor], None]:
        return [tensor.clone() for tensor in kept], None

    def wait(self, fetched: Arrival | None) -> None: ...

    def store(self, computed: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        for source, target in zip(computed, kept, strict=True):
            target.copy_(source)


class OnStreams:
    """Copies on CUDA: pinned memory, and a stream for each direction."""

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
    """The `HostCopies` of a device, made on first use."""
    return OnStreams(device) if is_gpu(device) else OnTheHost()
