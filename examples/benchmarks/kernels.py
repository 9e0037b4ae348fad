"""The compression kernels of the CPU beside a copy of the bytes that they have to move; gpu.py has those of a GPU.

    python examples/benchmarks/kernels.py                              # 2^20 to 2^24 elements

Every implementation meets the reference bit for bit, on the smallest size, before it is timed. The floor of `quantize`
is reading the gradient and the old error, and writing codes, scales and the new error: 4.55 bytes an element for bf16.
That of `dequantize` is reading half a byte from each rank and writing fp32. Shares are those of the rate at which
`copy_` moves as many bytes, of which it reads half and writes half. Repeats of all contenders are interleaved; a figure
is their median, with quartiles.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from record import parser_of, processor, spread, table
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.compression.methods import LoCo, RngKey
from zgraph.compression.payload import BucketLayout

Implementation = tuple[Callable[..., None], Callable[..., None]]
REFERENCE: Implementation = (reference.quantize_bucket, reference.dequantize_sum_bucket)
CPU = torch.device("cpu")


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

    def moved_bytes(self, kind: str) -> int:
        """Of "quantize" or "dequantize", at least."""
        kept = sum(tensor.nbytes for tensor in self.state.values())
        if kind == "dequantize":
            return self.received.nbytes + self.output.nbytes
        return self.grad.nbytes + 2 * kept + self.payload.nbytes

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
    found = {"reference": REFERENCE}
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
    found: list[str] = []
    for step in range(3):
        for each, by in ((bucket, implementation), (expected, REFERENCE)):
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


def copy_of(moved_bytes: int, device: torch.device) -> Callable[[], object]:
    """Reads half of the bytes and writes the other half."""
    source = torch.zeros(moved_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def call_of(bucket: Bucket, kind: str, implementation: Implementation) -> Callable[[], object]:
    return lambda: getattr(bucket, kind)(implementation)


def timed(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run, interleaved, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            found[name].append(1e3 * (time.perf_counter() - started))
    return {name: spent[1:] for name, spent in found.items()}


def rows(exponent: int, world: int, repeats: int, known: Mapping[str, Implementation]) -> list[list[object]]:
    """Lines of the report for one size."""
    bucket = Bucket.draw(2**exponent, world, CPU)
    found: list[list[object]] = []
    for kind, numel in (("quantize", 2**exponent), ("dequantize", bucket.output.numel())):
        moved = bucket.moved_bytes(kind)
        times = timed(
            {"copy_": copy_of(moved, CPU)} | {name: call_of(bucket, kind, each) for name, each in known.items()},
            repeats,
        )
        copy_ms = statistics.median(times["copy_"])
        for name, spent in times.items():
            ms = statistics.median(spent)
            speeds = (f"{moved / numel:.2f}", spread(spent, 3), f"{moved / ms / 1e6:.2f}", f"{copy_ms / ms:.1%}")
            found.append([f"2^{exponent}", torch.get_num_threads(), kind, name, *speeds])
    return found


def main() -> None:
    parser = parser_of(__doc__, smallest=20, largest=24, world=8, repeats=9)  # sizes: exponents of two
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    known = implementations(CPU)
    for name, implementation in known.items():
        wrong = differences(implementation, 2**given.smallest, given.world, CPU)
        if wrong:
            raise SystemExit(f"kernels: {name} differs from the reference in {', '.join(wrong)}; it is not timed.")
        print(f"{name} equals the reference bit for bit on 2^{given.smallest} elements, three steps")
    found: list[list[object]] = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for exponent in range(given.smallest, given.largest + 1, 2):
            found += rows(exponent, given.world, given.repeats, known)
    print(f"\n{processor()}, {given.world} ranks; an element is one of the gradient, or one of the output\n")
    heads = ("size", "threads", "kernel", "by", "B/element", "ms (quartiles)", "GB/s", "of copy")
    print(table(heads, found))


if __name__ == "__main__":
    main()
