"""Part of gpu.py: what the machine can do at most, as plain PyTorch and the kernel of the system reach it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_setting import Row, Setting, attempt, host_mib, launches_ms
from torch import Tensor

MIB = 2**20


def ceilings(setting: Setting) -> Iterator[Row]:
    yield attempt("copy on the device", _copy, setting)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield attempt(f"product of random matrices, {name}", _product, setting, dtype)
    yield attempt("pinned host memory to the device, and back", _host_links, setting)
    yield attempt("what four tensors of 2.25 MiB take, pinned", _pinned_sizes, setting)
    yield attempt("O_DIRECT into pinned memory", _direct_into_pinned, setting)
    yield attempt("disk, through O_DIRECT", _disk, setting)
    yield attempt("calibrate", _calibrated, setting)


def _copy(setting: Setting) -> Row:
    size = MIB if setting.dry else 1024 * MIB
    source = torch.randint(256, (size,), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    spent = launches_ms(setting, lambda: target.copy_(source))
    return {"ms": round(spent, 3), "TB/s read and written": round(2 * size / spent / 1e9, 3)}


def _product(setting: Setting, dtype: torch.dtype) -> Row:
    """Of random numbers: with ones or zeros a GPU draws less power and is faster than in training."""
    size = 64 if setting.dry else 8192
    left, right = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
    spent = launches_ms(setting, lambda: left @ right, launches=20)
    return {"ms": round(spent, 3), "TFLOP/s": round(2 * size**3 / spent / 1e9, 1)}


def _host_links(setting: Setting) -> Row:
    size = MIB if setting.dry else 256 * MIB
    host = torch.empty(size, dtype=torch.uint8, pin_memory=setting.on_cuda)
    device = torch.empty(size, dtype=torch.uint8, device=setting.device)
    there = launches_ms(setting, lambda: device.copy_(host, non_blocking=True), launches=4)
    back = launches_ms(setting, lambda: host.copy_(device, non_blocking=True), launches=4)
    both = launches_ms(setting, lambda: _both_ways(host, device), launches=4)
    rates = {"to device": size / there, "to host": size / back, "each way at once": size / 2 / both}
    return {f"GB/s {name}": round(rate / 1e6, 1) for name, rate in rates.items()}


def _both_ways(host: Tensor, device: Tensor) -> None:
    """Half of the bytes each way, on two streams where there are some."""
    (to_device, from_host), (to_host, from_device) = zip(device.chunk(2), host.chunk(2), strict=True)
    if not device.is_cuda:
        to_device.copy_(from_host)
        from_device.copy_(to_host)
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    to_device.copy_(from_host, non_blocking=True)
    with torch.cuda.stream(side):
        from_device.copy_(to_host, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)


def _pinned_sizes(setting: Setting) -> Row:
    """Whether torch's allocator gives the next power of two, as zgraph counts."""
    if not setting.on_cuda:
        return {"said": "no GPU: nothing is pinned"}
    before = host_mib()
    kept = [torch.empty(768 * 768, pin_memory=True) for _ in range(4)]  # 2.25 MiB each
    after = host_mib()
    asked = sum(one.nbytes for one in kept) / MIB
    return {"asked MiB": asked, **{f"{key} more": round(after[key] - before[key], 1) for key in after}}


def _direct_into_pinned(setting: Setting) -> Row:
    if setting.on_cuda:
        buffer = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    else:  # a page is all that O_DIRECT asks of it
        buffer = torch.frombuffer(mmap.mmap(-1, MIB), dtype=torch.uint8)
    path = setting.scratch / "sevens"
    path.write_bytes(bytes([7]) * MIB)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        memory: Any = buffer.numpy()
        found = os.preadv(descriptor, [memory], 0)
    finally:
        os.close(descriptor)
    return {"bytes": found, "ok": found == MIB and bool((buffer == 7).all())}


def _disk(setting: Setting) -> Row:
    """Writes and reads of 16 MiB, one after the other."""
    size, piece = (2 * MIB, MIB) if setting.dry else (512 * MIB, 16 * MIB)
    path = setting.scratch / "disk"
    room = mmap.mmap(-1, piece)
    rates: dict[str, float] = {}
    for name, flags in (("write", os.O_WRONLY | os.O_CREAT), ("read", os.O_RDONLY)):
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        started = time.perf_counter()
        try:
            for begin in range(0, size, piece):
                os.pwritev(descriptor, [room], begin) if name == "write" else os.preadv(descriptor, [room], begin)
        finally:
            os.close(descriptor)
        rates[f"GB/s {name}"] = round(size / (time.perf_counter() - started) / 1e9, 2)
    path.unlink()
    return rates


def _calibrated(setting: Setting) -> Row:
    """Plans that are made elsewhere use this text: `zgraph.Hardware.from_json`."""
    hardware = setting.calibrated(refresh=True)
    return {
        "memory TB/s": round(hardware.memory_bytes_per_us / 1e6, 3),
        "bf16 TFLOP/s": round(hardware.flops_per_us[torch.bfloat16] / 1e6, 1),
        "launch us": round(hardware.launch_us, 2),
        "json": hardware.to_json(),
    }
