"""Storages, allocations and profiles, and a way to keep a GPU busy."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Base class of modes that intercept every operator called in a `with` block.

    torch 2.11 - 2.15: `TorchDispatchMode`.
    """


def storage_key(tensor: Tensor) -> int | None:
    """Return an int that is equal for all views of a tensor (torch 2.11 - 2.15: `_cdata`).

    The int stays the same when the storage is resized. None for tensors without storage: sparse tensors, and subclasses
    that wrap other tensors.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to a tensor or its views; 0 for inference tensors (torch 2.11 - 2.13: `_version`)."""
    return 0 if tensor.is_inference() else tensor._version


def holders(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, the argument included (torch 2.11 - 2.15: `_storage_Use_Count`)."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_profiling() -> bool:
    """Return whether a profiler is active; torch allows only one (torch 2.11 - 2.15: `_profiler_enabled`)."""
    return torch.autograd._profiler_enabled()


def allocation_events(
    taken: torch.profiler.profile, prefix: str
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Return a dict of labels and a list of CPU allocations, from a profile that recorded memory.

    torch 2.11 - 2.15: `kineto_results`.

    Returns:
        {label: (begin, end)} for labels that start with `prefix`; and [(time, bytes)] of allocations and releases,
        sorted by time. Bytes of a release are negative. Times are in nanoseconds.
    """
    spans: dict[str, tuple[int, int]] = {}
    events: list[tuple[int, int]] = []
    for event in cast(Any, taken.profiler).kineto_results.events():
        name = event.name()
        if name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            events.append((event.start_ns(), event.nbytes()))
        elif name.startswith(prefix):
            spans[name] = (event.start_ns(), event.start_ns() + event.duration_ns())
    return spans, sorted(events, key=lambda event: event[0])


def keep_busy(cycles: int) -> None:
    """Keep the current GPU's current stream busy for `cycles` clock cycles (torch 2.11 - 2.13: `torch.cuda._sleep`)."""
    torch.cuda._sleep(cycles)
