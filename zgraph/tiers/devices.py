"""Differences between kinds of devices: CPU, CUDA and XPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from zgraph.torch_compat.groups import backend_of


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        type: type of the device, as in `torch.device`.
        backend: default backend of process groups on such devices.
        is_gpu: whether the device has memory of its own. Then host memory is pinned, copies run on streams, and compute
            does not read host tensors.
        groups_launches: whether the backend can run several collectives in one launch, as NCCL's group calls do.
    """

    type: str
    backend: str
    is_gpu: bool = True
    groups_launches: bool = True


CPU = DeviceKind("cpu", "gloo", is_gpu=False, groups_launches=False)
KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {one.type: one for one in (CPU, DeviceKind("cuda", "nccl"), DeviceKind("xpu", "xccl", groups_launches=False))}
)


def is_gpu(device: torch.device | str) -> bool:
    """Return whether a device or device type is a GPU; False for "cpu", "meta" and unknown types."""
    kind = KINDS.get(device if isinstance(device, str) else device.type)
    return kind is not None and kind.is_gpu


def kind_of_backend(backend: str) -> DeviceKind:
    """Return the kind of device whose process groups use a backend; a CPU if no GPU uses it, as for "mpi"."""
    return next((kind for kind in KINDS.values() if kind.backend == backend), CPU)


def module_of(device: torch.device) -> Any:
    """Return the torch module with a GPU's streams and events, such as `torch.cuda` or `torch.xpu`."""
    return torch.get_device_module(device)


def kind_of_group(group: dist.ProcessGroup) -> DeviceKind:
    """Return the kind of device that a process group communicates for; a CPU if no available GPU uses its backend."""
    available = (kind for kind in KINDS.values() if kind.is_gpu and getattr(torch, kind.type).is_available())
    return next((kind for kind in available if backend_of(group, torch.device(kind.type)) == kind.backend), CPU)
