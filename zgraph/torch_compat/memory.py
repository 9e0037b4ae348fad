"""Storages and allocations, as the allocator and the profiler see them; and a GPU that is kept busy."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Sees every operator that runs while it is entered (torch.utils._python_dispatch, 2.11 - 2.15)."""


def storage_key(tensor: Tensor) -> int | None:
    """One number for all views of a plain tensor, also while its storage is resized (`_cdata`, 2.11 - 2.15).

    None for tensors without a storage of their own: sparse ones, and subclasses that wrap others.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def version_of(tensor: Tensor) -> int:
    """How often a tensor or a view of it was written to (`_version`, 2.11 - 2.13); 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def traced_storage_key(tensor: Tensor) -> int:
    """`storage_key` of what is traced, which is fake (`_cdata`, 2.11 - 2.13); of a sparse one its own id."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages share it in Python and C++, itself too (`_storage_Use_Count`, 2.11 - 2.15)."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_profiling() -> bool:
    """Whether a profile is being taken already: they do not nest (`_profiler_enabled`, 2.11 - 2.15)."""
    return torch.autograd._profiler_enabled()


def allocation_events(
    taken: torch.profiler.profile, prefix: str
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """What a profile with memory has seen on the CPU, in nanoseconds (`kineto_results`, 2.11 - 2.15).

    Returns:
        Begin and end of each label that starts with the prefix; and for each allocation or release when it was and its
        bytes, in order.
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
    """Let the current stream of the current GPU do nothing for so many cycles (`torch.cuda._sleep`, 2.11 - 2.13)."""
    torch.cuda._sleep(cycles)
