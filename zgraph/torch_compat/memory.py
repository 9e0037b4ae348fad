"""Storages and allocations as the allocator and the profiler see them, and a way to keep a GPU busy."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Base class of modes that see every operator called in a `with` block (`TorchDispatchMode`, 2.11 - 2.15)."""


def storage_key(tensor: Tensor) -> int | None:
    """A key shared by all views of a plain tensor, even after its storage is resized (`_cdata`, 2.11 - 2.15).

    None for tensors that have no storage: sparse tensors, and subclasses that wrap other tensors.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """Number of writes to a tensor or its views so far (`_version`, 2.11 - 2.13); 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def holders(storage: torch.UntypedStorage) -> int:
    """Number of Python and C++ references to a storage, the argument's included (`_storage_Use_Count`, 2.11 - 2.15)."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_profiling() -> bool:
    """Whether a profile is already being taken; profiles do not nest (`_profiler_enabled`, 2.11 - 2.15)."""
    return torch.autograd._profiler_enabled()


def allocation_events(
    taken: torch.profiler.profile, prefix: str
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Return the labels and the CPU allocations of a profile that recorded memory (`kineto_results`, 2.11 - 2.15).

    Returns:
        (begin, end) of each label that starts with the prefix; and (time, bytes) of each allocation and release, by
        time; a release has negative bytes. Times are in nanoseconds.
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
    """Keep the current stream of the current GPU busy for `cycles` cycles (`torch.cuda._sleep`, 2.11 - 2.13)."""
    torch.cuda._sleep(cycles)
