"""Detect the hardware preset that fits the GPUs of all ranks."""

from __future__ import annotations

import platform
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zgraph.analysis.hardware import Hardware
from zgraph.torch_compat.collectives import all_gather
from zgraph.torch_compat.groups import backend_of

# Patterns for torch.cuda.get_device_name: SXM modules, whose NVLink has the presets' rates. "GH200" must not match.
_NAMES = MappingProxyType({"a100": r"\bA100-SXM\d*-80GB\b", "h100": r"\bH100 80GB HBM3\b", "h200": r"\bH200\b(?! NVL)"})


def preset_of(device_name: str) -> str | None:
    """Return the hardware preset for a GPU's name; None if the name does not determine how GPUs are linked."""
    return next((preset for preset, pattern in _NAMES.items() if re.search(pattern, device_name)), None)


def agreed_machine(mesh: DeviceMesh) -> Hardware | None:
    """Return the hardware of all ranks of a mesh, from their GPU names; None if no preset fits all.

    Collective on NCCL: all ranks must call it. Without GPUs and NCCL, it returns None and sends nothing.
    """
    device = torch.device(mesh.device_type)
    groups = mesh.get_all_groups()
    if device.type != "cuda" or any(backend_of(group, device) != "nccl" for group in groups):
        return None
    preset = preset_of(torch.cuda.get_device_name())
    known = -1 if preset is None else list(_NAMES).index(preset)
    host = zlib.crc32(platform.node().encode())
    return machine_of(gathered(torch.tensor([known, host], device=device), groups).tolist())


def gathered(own: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Gather the row `own` of every rank, in the mesh's order.

    Args:
        own: [columns], this rank's row.
        groups: process group of each mesh axis.

    Returns:
        [ranks, columns].
    """
    found = own.unsqueeze(0)
    for group in reversed(groups):
        every = found.new_empty((dist.get_world_size(group) * found.shape[0], found.shape[1]))
        all_gather(every, found, group)
        found = every
    return found


def machine_of(ranks: Sequence[Sequence[int]]) -> Hardware | None:
    """Return the hardware described by each rank's (preset index, host); None if presets or ranks per host differ."""
    presets = {preset for preset, _ in ranks}
    if len(presets) > 1 or -1 in presets:
        return None
    hosts = [host for _, host in ranks]
    local = hosts.count(hosts[0])
    parts = [hosts[first : first + local] for first in range(0, len(hosts), local)]
    if any(len(set(part)) > 1 or len(part) < local for part in parts) or len(set(hosts)) < len(parts):
        return None
    return replace(Hardware.preset(list(_NAMES)[presets.pop()]), ranks_per_host=local)
