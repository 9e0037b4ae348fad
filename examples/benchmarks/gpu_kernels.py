"""Parts of gpu.py: kernels of compression, sums and updates, against the CPU reference and against a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_setting import Row, Setting, attempt, host_us, launches_ms, same_bits
from kernels import Bucket, Implementation, call_of, copy_of, differences, implementations
from torch import Tensor

from zgraph.codegen import adam_kernels
from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton import dequantize_blocks
from zgraph.compression.methods import BlockMethod, LoCo, RngKey
from zgraph.compression.packed_state import has_codes, packed_shape
from zgraph.compression.payload import BucketLayout
from zgraph.dialect.sum_ranks import sum_pieces

HERE = Path(__file__).resolve().parent
DTYPES = (torch.float32, torch.bfloat16)
ADAM: dict[str, Any] = {
    **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8},
    **{"maximize": False},
}


def bits(setting: Setting) -> Iterator[Row]:
    """Every kernel, of 1, 3 and 8 ranks, on addresses that are aligned and that are not."""
    for name, implementation in implementations(setting.device).items():
        if setting.dry and name == "reference":
            continue
        for exponent, world in ((12, 1), (12, 3)) if setting.dry else ((12, 1), (16, 3), (20, 8)):
            numel = 2**exponent // world * world
            what = f"{name}: quantize and dequantize, {numel} elements, {world} ranks"
            yield attempt(what, _differ, setting, implementation, numel, world)
    for world in (1, 3, 8):
        for numel in (63, 1000, 4096):
            yield attempt(f"dequantize each, {world} x {numel}", _each, setting, world, numel)
            for dtype in DTYPES:
                what = f"sum_pieces, {world} x {numel}, {str(dtype).removeprefix('torch.')}"
                yield attempt(what, _sums, setting, world, numel, dtype)
    for offset in (0, 1):
        yield attempt(f"adam of bf16 moments, {'not ' if offset else ''}aligned", _adam, setting, offset)


def _differ(setting: Setting, implementation: Implementation, numel: int, world: int) -> Row:
    wrong = differences(implementation, numel, world, setting.device)
    return {"said": f"differs in {', '.join(wrong)}" if wrong else None, "ok": not wrong}


def _each(setting: Setting, world: int, numel: int) -> Row:
    """What ranks have sent, decoded rank after rank."""
    method = LoCo()
    assert isinstance(method, BlockMethod)
    layout = BucketLayout(method, (numel,), 1)
    kept = method.state(numel, 1)
    torch.manual_seed(numel)
    payload = torch.zeros(world, layout.payload_bytes, dtype=torch.uint8)
    for rank in range(world):
        state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in kept.items()}
        reference.quantize_bucket([torch.randn(numel)], [state], layout, RngKey(0), rank, payload[rank : rank + 1])
    expected = torch.empty(world, numel)
    reference.dequantize_each_bucket(payload, layout, RngKey(0), [expected])
    found = torch.empty(world, numel, device=setting.device)
    by = dequantize_blocks if setting.on_cuda else reference
    by.dequantize_each_bucket(payload.to(setting.device), layout, RngKey(0), [found])
    return same_bits("", [found], [expected])


def _sums(setting: Setting, world: int, numel: int, dtype: torch.dtype) -> Row:
    torch.manual_seed(numel)
    received = torch.randn(world * numel).to(dtype)
    expected = sum_pieces(received, world, world, torch.float32)
    operator = torch.ops.zgraph.sum_ranks
    return same_bits("", [operator(received.to(setting.device), world, world, torch.float32)], [expected])


def _adam(setting: Setting, offset: int) -> Row:
    """Three updates, of tensors that begin so many elements behind an aligned address."""
    torch.manual_seed(0)
    shapes = ((1000,), (63, 64), (4, 1024))
    dtypes = (torch.float32, torch.bfloat16)
    values = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for shape in shapes for dtype in dtypes]
    sides: list[list[Tensor]] = []
    for device in (torch.device("cpu"), setting.device):
        weights, grads = ([_behind(offset, pair[place], device) for pair in values] for place in (0, 1))
        sizes = [packed_shape(one.shape, one.dtype, codes=has_codes(one.shape)) for one in weights]
        states = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        for number in range(3):
            steps = [torch.tensor(1.0 + number, device=device) for _ in weights]
            on_gpu = device.type == "cuda"
            run: Any = adam_kernels.packed_adamw_on_cuda if on_gpu else adam_kernels.packed_adamw_
            run(weights, grads, states, steps, **ADAM)
        sides.append([*weights, *grads, *states])
    return same_bits("", sides[1], sides[0])


def _behind(offset: int, value: Tensor, device: torch.device) -> Tensor:
    room = torch.empty(value.numel() + offset, dtype=value.dtype, device=device)
    return room[offset:].view(value.shape).copy_(value)


def times(setting: Setting) -> Iterator[Row]:
    """Milliseconds while the host is ahead, of four buckets in turn, beside a copy of as many bytes."""
    world = 8
    for exponent in (12,) if setting.dry else (20, 24, 28):
        for name, implementation in implementations(setting.device).items():
            buckets = [Bucket.draw(2**exponent, world, setting.device) for _ in range(4 if exponent < 28 else 1)]
            for kind in ("quantize", "dequantize"):
                calls = [call_of(bucket, kind, implementation) for bucket in buckets]
                what = f"{kind} of 2^{exponent} by {name}"
                yield {"what": what, **_timed(setting, calls, buckets[0].moved_bytes(kind))}
            del buckets
    yield from _peer(setting, world)


def _timed(setting: Setting, calls: Sequence[Callable[[], object]], moved: int) -> Row:
    for call in calls:
        call()
    copies = [copy_of(moved, setting.device) for _ in calls]
    spent, copied = launches_ms(setting, *calls), launches_ms(setting, *copies)
    return {
        "ms": round(spent, 4),
        "GB/s": round(moved / spent / 1e6, 1),
        "copy ms": round(copied, 4),
        "share of a copy": round(copied / spent, 3),
        "host us a call": round(host_us(setting, calls[0]), 1),
    }


def _peer(setting: Setting, world: int) -> Iterator[Row]:
    """The same arithmetic in plain PyTorch under torch.compile, which is what one would write without a kernel."""
    compiled: Implementation = (
        torch.compile(reference.quantize_bucket, backend=setting.compiler),
        torch.compile(reference.dequantize_sum_bucket, backend=setting.compiler),
    )
    exponent = 12 if setting.dry else 24
    for kind in ("quantize", "dequantize"):
        what = f"{kind} of 2^{exponent} by torch.compile of the reference"
        bucket = Bucket.draw(2**exponent, world, setting.device)
        calls = [call_of(bucket, kind, compiled)]
        yield attempt(what, _timed, setting, calls, bucket.moved_bytes(kind)) | {"ok": None}  # a peer's


def large_bucket(setting: Setting) -> Iterator[Row]:
    """What lies behind element 2^31 comes back as well as what lies at the beginning."""
    world, part = 8, 2**14
    numel = 2**17 if setting.dry else 2**31 + 2**20
    found = {name: each for name, each in implementations(setting.device).items() if name != "reference"}
    for name, implementation in found.items():
        bucket = Bucket.draw(numel, world, setting.device)
        bucket.quantize(implementation)
        chunk = numel // world
        errors: list[float] = []
        for place in (0, world - 1):  # each rank's row stands for a whole sum of equal terms
            bucket.received.copy_(bucket.payload[place].expand_as(bucket.received))
            alone = bucket.received[:1]
            implementation[1](alone, replace(bucket.layout, world=1), RngKey(0), 1, 1, [bucket.output])
            sent = bucket.grad[place * chunk : (place + 1) * chunk].float()
            for piece in (slice(0, part), slice(chunk - part, chunk)):
                lost = (bucket.output[piece] - sent[piece]).norm() / sent[piece].norm()
                errors.append(lost.item())
        even = max(errors) < 0.3 and max(errors) < 1.2 * min(errors)
        yield {"what": f"{name}, {numel} elements", "relative error": [round(error, 4) for error in errors], "ok": even}


def sanitizer(setting: Setting) -> Iterator[Row]:
    tool = shutil.which("compute-sanitizer")
    if tool is None or not setting.on_cuda:
        yield {"what": "compute-sanitizer", "said": "not there, or no GPU: left out"}
        return
    code = (
        "import torch; from kernels import differences, implementations; d = torch.device('cuda'); "
        "assert not [w for each in implementations(d).values() for w in differences(each, 3 * 2**10, 3, d)]"
    )
    command = [tool, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    yield {"what": "compute-sanitizer memcheck", "ok": done.returncode == 0, "said": done.stdout[-500:]}
