"""Measures this machine as a `Hardware` shared by all ranks, and caches the result on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zgraph.analysis.hardware import Hardware, Link
from zgraph.analysis.measured_links import (
    LARGE_BYTES,
    SMALL_BYTES,
    MeasuringRanks,
    fit_link,
    link_of,
    median_us,
    random_values,
    ranks_on_one_host,
)
from zgraph.runtime.chunks import MIB
from zgraph.torch_compat.groups import backend_of, keep_gloo_from_preempting

_FORMAT = 7  # version of the measurements: files of another version are not read


def calibrate(
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    cache: str | os.PathLike[str] | None = None,
    *,
    refresh: bool = False,
) -> Hardware:
    """Measure this machine: copies, matrix products, kernel launches, collectives of the real groups, the host link.

    Takes a few seconds the first time; later calls read the result from a file. All ranks of the mesh or group must
    call this together, and measure at the same time, as in training. All get the slowest rank's figures, so that they
    make the same plans. The disk is not measured: its figures come from the preset "cpu".

    Args:
        mesh_or_group: process group to measure, or a mesh, whose axes are measured one by one. None: the default group,
            or only this process if torch.distributed is not initialised.
        cache: directory for the result; None: ~/.cache/zgraph. The file is keyed by machine, torch version, groups and
            number of threads. A file that cannot be read is replaced; if it cannot be written, nothing is cached.
        refresh: measure even if there is a cached result.

    Raises:
        ValueError: the argument is neither a mesh nor a group, or its backend is the fake one, which moves nothing.
    """
    ranks = MeasuringRanks.of(mesh_or_group)
    keep_gloo_from_preempting()  # as in training
    path = _cache_path(ranks, Path.home() / ".cache" / "zgraph" if cache is None else Path(cache))
    found = None if refresh else _read(path)
    # Ranks use their cached results only if all have the same.
    digest = 0 if found is None else zlib.crc32(found.to_json().encode())
    largest, negative = ranks.slowest([digest, -digest])
    if found is not None and largest == -negative:
        return found
    hardware = _measure(ranks)
    _write(path, hardware)
    return hardware


def _measure(ranks: MeasuringRanks) -> Hardware:
    dtypes = [torch.float32, torch.bfloat16, *([torch.float16] if ranks.device.type != "cpu" else [])]
    local = _local_ranks(ranks)
    axes = [link_of(ranks, group, local) for group in ranks.groups]
    ranks.slowest([0.0])  # all start together
    # Times (capacity is negated), so that the largest value is the slowest rank's; all ranks go on with equal numbers.
    launch_us, copy_us, host_copy_us, capacity, *product_us = ranks.slowest(
        [
            _launch_us(ranks),
            _copy_us(ranks, ranks.device),
            0.0 if ranks.device.type == "cpu" else _copy_us(ranks, torch.device("cpu")),
            -_capacity_bytes(ranks.device) // (local if ranks.device.type == "cpu" else 1),
            *(_product_us(ranks, dtype) for dtype in dtypes),
        ]
    )
    copy = Link(latency_us=launch_us, bytes_per_us=0.5 / copy_us)
    to_device, to_host, both_ways = (copy, copy, 2.0) if ranks.device.type == "cpu" else _host_links(ranks)
    links: dict[int, Link] = {}
    inside = outside = None
    cpu_us = cpu_us_per_collective = 0.0
    for group, axis in zip(ranks.groups, axes, strict=True):
        members = dist.get_process_group_ranks(group)
        if axis is None:
            continue
        links[abs(members[1] - members[0])] = axis.link
        cpu_us = max(cpu_us, axis.cpu_us_per_byte)
        cpu_us_per_collective = max(cpu_us_per_collective, axis.cpu_us_per_collective)
        if axis.on_one_host:
            inside = axis.link
        else:
            outside = axis.link
    alone = Hardware.preset("cpu")
    world = math.prod(map(dist.get_world_size, ranks.groups))
    return Hardware(
        name=f"calibrated {ranks.device.type}, {world} rank{'s' if world > 1 else ''}",
        flops_per_us={dtype: 1 / us for dtype, us in zip(dtypes, product_us, strict=True)},
        memory_bytes_per_us=1 / copy_us,
        launch_us=launch_us,
        memory_bytes=int(-capacity),
        host_memory_bytes_per_us=1 / host_copy_us if host_copy_us else None,
        intra_host=inside or outside or alone.intra_host,
        inter_host=outside or inside or alone.inter_host,
        ranks_per_host=local,
        host_to_device=to_device,
        device_to_host=to_host,
        host_gain_both_ways=both_ways,
        disk=alone.disk,
        links=links,
        backend=ranks.backend,
        cpu_us_per_collective=cpu_us_per_collective,
        cpu_us_per_wire_byte=cpu_us,
    )


def _launch_us(ranks: MeasuringRanks) -> float:
    x = torch.ones(16, device=ranks.device)
    return median_us(ranks, lambda: torch.add(x, x), calls=100)


def _copy_us(ranks: MeasuringRanks, device: torch.device) -> float:
    """Return the microseconds per byte read or written by a copy that exceeds caches, while all ranks copy."""
    size = 64 * MIB if device.type == "cpu" else 1024 * MIB
    source = random_values(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return median_us(ranks, lambda: target.copy_(source)) / (2 * size)


def _product_us(ranks: MeasuringRanks, dtype: torch.dtype) -> float:
    """Return the microseconds per flop of a large matrix product."""
    size = 768 if ranks.device.type == "cpu" else 8192
    a = random_values(size, size, dtype=dtype, device=ranks.device)
    out = torch.empty_like(a)
    return median_us(ranks, lambda: torch.mm(a, a, out=out), least=3) / (2 * size**3)


def _host_links(ranks: MeasuringRanks) -> tuple[Link, Link, float]:
    """Measure the links from host to device and from device to host, and what is gained by using both at once."""
    sizes = (*SMALL_BYTES, *LARGE_BYTES, 64 * MIB)
    times: list[float] = []
    for size in sizes:
        host = torch.ones(size // 4, pin_memory=True)
        device = torch.ones(size // 4, device=ranks.device)
        times.append(median_us(ranks, lambda to=device, source=host: to.copy_(source, non_blocking=True)))
        times.append(median_us(ranks, lambda to=host, source=device: to.copy_(source, non_blocking=True)))
    slowest = ranks.slowest(times)
    to_device, to_host = (fit_link(list(zip(sizes, slowest[way::2], strict=True)), messages=1) for way in (0, 1))
    (both_us,) = ranks.slowest([_both_ways_us(ranks, sizes[-1])])
    return to_device, to_host, min(2.0, max(1.0, sum(slowest[-2:]) / both_us))


def _both_ways_us(ranks: MeasuringRanks, size: int) -> float:
    """Return the microseconds of a copy to the device and a concurrent one to the host, each of `size` bytes."""
    module: Any = torch.get_device_module(ranks.device)
    side = module.Stream()
    source, target = (torch.ones(size // 4, pin_memory=True) for _ in range(2))
    here, there = (torch.ones(size // 4, device=ranks.device) for _ in range(2))

    def both_ways() -> None:
        side.wait_stream(module.current_stream())
        here.copy_(source, non_blocking=True)
        with module.stream(side):
            target.copy_(there, non_blocking=True)
        module.current_stream().wait_stream(side)

    return median_us(ranks, both_ways)


def _local_ranks(ranks: MeasuringRanks) -> int:
    return math.prod(ranks_on_one_host(ranks, group) for group in ranks.groups)


def _capacity_bytes(device: torch.device) -> int:
    """Return the memory of the device in bytes; for a CPU, of the whole host or container."""
    if device.type != "cpu":
        return torch.get_device_module(device).mem_get_info()[1]
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(Path(name).read_text()))
    return min(limits)


def _cache_path(ranks: MeasuringRanks, directory: Path) -> Path:
    module: Any = torch.get_device_module(ranks.device)
    groups = [
        (backend_of(group, ranks.device), [member - members[0] for member in members])
        for group in ranks.groups
        for members in [dist.get_process_group_ranks(group)]
    ]
    key = [
        _FORMAT,
        platform.node(),
        platform.machine(),
        os.cpu_count(),
        module.get_device_name(ranks.device) if ranks.device.type != "cpu" else "cpu",
        torch.__version__,
        torch.get_num_threads(),
        groups,
    ]
    return directory / f"hardware-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> Hardware | None:
    try:
        return Hardware.from_json(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, hardware: Hardware) -> None:
    """Write the result to a file atomically."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(hardware.to_json())
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
