"""Parts of gpu.py: the compression kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from gpu_setting import HERE, Row, Setting
from kernels import Bucket, differences, implementations, rows

from zgraph.compression.methods import RngKey


def run_kernels(setting: Setting) -> Iterator[Row]:
    table = implementations(setting.device)
    if setting.tiny:
        table = {name: each for name, each in table.items() if name != "reference"}
    for name, implementation in table.items():
        for exponent, world in ((12, 1), (12, 3)) if setting.tiny else ((12, 1), (16, 3), (20, 8)):
            numel = 2**exponent // world * world
            wrong = differences(implementation, numel, world, setting.device)
            said = f"differs in {', '.join(wrong)}" if wrong else None
            yield {
                "what": f"{name} equals the reference, {numel} elements, {world} ranks",
                "ok": not wrong,
                "said": said,
            }
    for exponent in (12,) if setting.tiny else (20, 24, 28):
        for line in rows(2**exponent, 8, 3 if setting.tiny else 9, setting.device, table):
            fields = line.split()
            if fields[3] != "copy_":
                what = f"{fields[2]} of 2^{exponent} elements by {fields[3]}"
                yield {"what": what, "ms": float(fields[5]), "GB/s": float(fields[7]), "of a copy": fields[8]}


def run_large_bucket(setting: Setting) -> Iterator[Row]:
    """What lies behind element 2^31 comes back as well as what lies at the beginning."""
    world, part = 8, 2**14
    numel = 2**17 if setting.tiny else 2**31 + 2**20
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


def run_sanitizer(setting: Setting) -> Iterator[Row]:
    tool = shutil.which("compute-sanitizer")
    if tool is None or not setting.on_cuda:
        yield {"what": "compute-sanitizer", "said": "not there, or no GPU: left out"}
        return
    code = (
        "import torch; from kernels import differences, implementations; d = torch.device('cuda'); "
        "assert not [w for each in implementations(d).values() for w in differences(each, 3 * 2**10, 3, d)]"
    )
    command = [tool, "--error-exitcode", "9", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=420, check=False)
    yield {"what": "compute-sanitizer memcheck", "ok": done.returncode == 0, "said": done.stdout[-500:]}
