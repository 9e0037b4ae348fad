"""The compression kernels beside a copy of the bytes that they have to move.

    python examples/benchmarks/kernels.py                              # the device at hand, 2^20 to 2^24 elements
    python examples/benchmarks/kernels.py --largest 30                 # on a GPU, up to 2^30

Every implementation meets the reference bit for bit, on the smallest size, before it is timed. The floor of `quantize`
is reading the gradient and the old error, and writing codes, scales and the new error: 4.55 bytes an element for bf16.
That of `dequantize` is reading half a byte from each rank and writing fp32. Shares are those of the rate at which
`copy_` moves as many bytes, of which it reads half and writes half. Repeats of all contenders are interleaved; a figure
is their median, with the range of the middle half behind it.
"""

import argparse
import importlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.compression.methods import LoCo, RngKey
from zgraph.compression.payload import BucketLayout

Implementation = tuple[Callable[..., None], Callable[..., None]]


@dataclass
class Bucket:
    """A bucket of one bf16 gradient among `world` ranks, and what one of them receives."""

    grad: Tensor
    state: dict[str, Tensor]
    layout: BucketLayout
    payload: Tensor
    received: Tensor
    output: Tensor

    @classmethod
    def draw(cls, numel: int, world: int, device: torch.device) -> "Bucket":
        torch.manual_seed(0)
        layout = BucketLayout(LoCo(), (numel // world,), world)
        kept = LoCo().state(numel // world, world)
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in kept.items()}
        payload = torch.zeros(world, layout.payload_bytes, dtype=torch.uint8, device=device)
        grad = torch.randn(numel, dtype=torch.bfloat16, device=device)
        return cls(grad, state, layout, payload, payload.clone(), torch.empty(numel // world, device=device))

    def quantize_bytes(self) -> int:
        kept = sum(tensor.nbytes for tensor in self.state.values())
        return self.grad.nbytes + 2 * kept + self.payload.nbytes

    def dequantize_bytes(self) -> int:
        return self.received.nbytes + self.output.nbytes

    def quantize(self, implementation: Implementation, step: int = 0) -> None:
        implementation[0]([self.grad], [self.state], self.layout, RngKey(step), 1, self.payload)

    def dequantize(self, implementation: Implementation, step: int = 0) -> None:
        world = self.layout.world
        implementation[1](self.received, self.layout, RngKey(step), 0, world, [self.output])

    def on_cpu(self) -> "Bucket":
        state = {name: tensor.cpu() for name, tensor in self.state.items()}
        moved = (tensor.cpu() for tensor in (self.payload, self.received, self.output))
        return Bucket(self.grad.cpu(), state, self.layout, *moved)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """What can run on the device, by name."""
    if device.type == "cuda":
        quantize: Any = importlib.import_module("zgraph.codegen.kernels.triton.quantize_blocks")
        dequantize: Any = importlib.import_module("zgraph.codegen.kernels.triton.dequantize_blocks")
        return {"triton": (quantize.quantize_bucket, dequantize.dequantize_sum_bucket)}
    found: dict[str, Implementation] = {
        "reference": (reference.quantize_bucket, reference.dequantize_sum_bucket),
    }
    try:
        blocks: Any = importlib.import_module("zgraph.codegen.kernels.cpu.blocks")
    except ModuleNotFoundError as error:
        print(f"cpu_blocks is left out: {error}")
    else:
        found["cpu_blocks"] = (blocks.quantize_bucket, blocks.dequantize_sum_bucket)
    return found


def differences(implementation: Implementation, numel: int, world: int, device: torch.device) -> list[str]:
    """What differs from the reference on the CPU, in any bit, after three steps."""
    bucket = Bucket.draw(numel, world, device)
    expected = bucket.on_cpu()
    plain = (reference.quantize_bucket, reference.dequantize_sum_bucket)
    found: list[str] = []
    for step in range(3):
        for each, by in ((bucket, implementation), (expected, plain)):
            each.quantize(by, step)
            each.received.copy_(each.payload)
            each.dequantize(by, step)
        pairs = [("payload", bucket.payload, expected.payload), ("sums", bucket.output, expected.output)]
        pairs += [(name, bucket.state[name], expected.state[name]) for name in expected.state]
        found += [
            f"{name} of step {step}"
            for name, one, other in pairs
            if not torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
        ]
    return found


def timed(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every run, interleaved, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            spent = milliseconds(run, device)
            if repeat:
                found[name].append(spent)
    return found


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def copy_of(moved_bytes: int, device: torch.device) -> Callable[[], object]:
    """Reads half of the bytes and writes the other half."""
    source = torch.zeros(moved_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def rows(numel: int, world: int, repeats: int, device: torch.device, table: dict[str, Implementation]) -> list[str]:
    """Lines of the report for one size."""
    bucket = Bucket.draw(numel, world, device)
    found: list[str] = []
    for kind, moved in (("quantize", bucket.quantize_bytes()), ("dequantize", bucket.dequantize_bytes())):
        runs: dict[str, Callable[[], object]] = {"copy_": copy_of(moved, device)}
        for name, implementation in table.items():
            runs[name] = lambda implementation=implementation, kind=kind: getattr(bucket, kind)(implementation)
        times = timed(runs, repeats, device)
        copy_ms = statistics.median(times["copy_"])
        for name, spent in times.items():
            low, middle, high = statistics.quantiles(spent, n=4)
            found.append(
                f"2^{int(math.log2(numel)):<3} {torch.get_num_threads():>3} {kind:<11} {name:<11} "
                f"{moved / numel if kind == 'quantize' else moved / bucket.output.numel():>7.2f} {middle:>10.3f} "
                f"{low:>9.3f}-{high:<9.3f} {moved / middle / 1e6:>8.2f} {copy_ms / middle:>8.1%}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", type=int, default=20, help="exponent of two of the fewest elements")
    parser.add_argument("--largest", type=int, default=24, help="exponent of two of the most elements")
    parser.add_argument("--world", type=int, default=8, help="ranks that share the gradient")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on the CPU")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = implementations(device)
    for name, implementation in table.items():
        wrong = differences(implementation, 2**given.smallest, given.world, device)
        if wrong:
            raise SystemExit(f"kernels: {name} differs from the reference in {', '.join(wrong)}; it is not timed.")
        print(f"{name} equals the reference bit for bit on 2^{given.smallest} elements, three steps")
    lines: list[str] = []
    for threads in given.threads if device.type == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for exponent in range(given.smallest, given.largest + 1, 2):
            lines += rows(2**exponent, given.world, given.repeats, device, table)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"\n{where}, {given.world} ranks; an element is one of the gradient, or one of the output\n")
    print(
        f"{'size':<5} {'thr':>3} {'kernel':<11} {'by':<11} {'B/elem':>7} {'ms':>10} {'middle half':^19} {'GB/s':>8} "
        f"{'of copy':>8}"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
