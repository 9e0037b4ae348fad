"""How close AdamW on the processor comes to the bandwidth of its memory: torch's own ways, and DeepSpeed's.

    python examples/benchmarks/cpu_adam.py                                 # two minutes, 8 GB of memory
    python examples/benchmarks/cpu_adam.py --million 50 --turns 9 --json results.json

The update of a fp32 parameter reads weight, gradient and two moments and writes all but the gradient: 28 bytes. Its
arithmetic hides behind that, so that the triad of STREAM (McCalpin 1995), a = b + s * c with 12 bytes, is the speed
limit: counted the same way, without the lines that a store fetches first. With moments of bf16 it is 20 bytes.

fused             torch.optim.AdamW(fused=True), all parameters in one call
fused, buckets    the same, an optimizer and a call for each bucket
zgraph            the update of a compiled step: torch's kernel of the above, without torch.optim, in one call
zgraph, buckets   the same, one call for each bucket, as gradients arrive
bf16 moments      zgraph's, with which zgraph.Offload(moments_dtype=torch.bfloat16) updates; stochastic rounding
foreach           torch.optim.AdamW(foreach=True)
for loop          torch.optim.AdamW(foreach=False)
DeepSpeed         deepspeed.ops.adam.DeepSpeedCPUAdam, which a C++ compiler builds here; left out, with the reason,
                  where it cannot be had: pip install --no-deps deepspeed hjson ninja py-cpuinfo msgpack einops

All of them take turns, so that what else the machine does meets them alike. Printed are medians with quartiles over the
turns, and medians of the ratios to the triad of the same turn. Threads that meet wait for whichever the system has put
aside: where other processes run, put `sudo chrt --fifo 10` in front, so that none is.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import commit, processor
from torch import Tensor, optim

from zgraph.codegen import adam_kernels as adam_kernels
from zgraph.torch_compat.bindings import FUNCTIONS

ADAM_BYTES, ROUNDED_BYTES, TRIAD_BYTES = 28, 20, 12  # per element
PARAMETER = 1 << 20  # elements: a weight of 1024 x 1024
BUCKET = 2 << 20  # bytes of gradients, the default of zgraph's buckets
ADAMW = torch.ops.aten._fused_adamw_.tensor_lr
TRIAD, ROUNDED = "triad", "bf16 moments"
BYTES = {TRIAD: TRIAD_BYTES, ROUNDED: ROUNDED_BYTES}


def parameters(elements: int) -> list[Tensor]:
    """Weights with gradients, of a model of so many parameters."""
    found = [torch.randn(PARAMETER) for _ in range(-(-elements // PARAMETER))]
    for one in found:
        one.grad = torch.randn(PARAMETER)
    return found


def triad(elements: int) -> Callable[[], object]:
    b, c, a = torch.randn(elements), torch.randn(elements), torch.zeros(elements)
    return lambda: torch.add(b, c, alpha=0.5, out=a)


def deepspeed(weights: Sequence[Tensor]) -> Callable[[], object]:
    """One step of DeepSpeed's; raises whatever keeps it from being built."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    return DeepSpeedCPUAdam(weights, lr=1e-4).step


def in_buckets(weights: Sequence[Tensor]) -> Callable[[], object]:
    buckets = [optim.AdamW(bucket, lr=1e-4, fused=True) for bucket in bucketed(weights)]
    return lambda: [bucket.step() for bucket in buckets]


def bucketed(weights: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    count = max(1, BUCKET // (4 * PARAMETER))
    return [weights[first : first + count] for first in range(0, len(weights), count)]


def compiled(buckets: Sequence[Sequence[Tensor]]) -> Callable[[], object]:
    """One step by calls of torch's kernel, as a compiled step makes them."""
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    lists: list[tuple[list[Tensor], ...]] = []
    for bucket in buckets:
        grads = [one.grad for one in bucket if one.grad is not None]
        moments = ([torch.zeros_like(one) for one in bucket] for _ in range(2))
        lists.append((list(bucket), grads, *moments, [], [torch.zeros(()) for _ in bucket]))
    count, update = FUNCTIONS[torch.ops.aten._foreach_add_.Scalar], FUNCTIONS[ADAMW]

    def step() -> None:
        for given in lists:
            count(given[-1], 1)
            update(*given, **options, amsgrad=False, maximize=False)

    return step


def rounded(weights: Sequence[Tensor]) -> Callable[[], object]:
    """One step with bf16 moments, all parameters in one call."""
    moments = [[torch.zeros_like(one, dtype=torch.bfloat16) for one in weights] for _ in range(2)]
    grads = [one.grad for one in weights if one.grad is not None]
    steps, places = [torch.zeros(()) for _ in weights], [*range(len(weights))]
    options: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def step() -> None:
        torch.ops.aten._foreach_add_.Scalar(steps, 1)
        operator = torch.ops.zgraph.fused_adam_.default
        operator(weights, grads, *moments, steps, places, places, **options, decoupled=True, maximize=False)

    return step


WAYS: dict[str, Callable[[Sequence[Tensor]], Callable[[], object]]] = {
    "fused": lambda weights: optim.AdamW(weights, lr=1e-4, fused=True).step,
    "fused, buckets": in_buckets,
    "zgraph": lambda weights: compiled([weights]),
    "zgraph, buckets": lambda weights: compiled(bucketed(weights)),
    ROUNDED: rounded,
    "foreach": lambda weights: optim.AdamW(weights, lr=1e-4, foreach=True).step,
    "for loop": lambda weights: optim.AdamW(weights, lr=1e-4, foreach=False).step,
    "DeepSpeed": deepspeed,
}


def measure(elements: int, turns: int, ways: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each turn, by way; weights and gradients are shared, moments are not."""
    weights = parameters(elements)
    sides = {TRIAD: triad(elements)}
    for name in ways:
        try:
            sides[name] = WAYS[name](weights)
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    for step in sides.values():
        step()  # makes moments, and touches each page
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in sides if turn % 2 else reversed(sides):
            started = time.perf_counter()
            sides[name]()
            taken[name].append(time.perf_counter() - started)
    return taken


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way at one size: medians over the turns."""

    way: str
    million: int  # parameters, in 2^20
    ms: float
    quartiles_ms: tuple[float, float]
    gb_per_s: float
    share_of_triad: float
    shares: list[float]  # of each turn


def rows(million: int, taken: dict[str, list[float]]) -> list[Row]:
    elements, found = million * PARAMETER, list[Row]()
    for name, seconds in taken.items():
        moved = elements * BYTES.get(name, ADAM_BYTES)
        shares = [
            (moved / one) / (elements * TRIAD_BYTES / other) for one, other in zip(seconds, taken[TRIAD], strict=True)
        ]
        low, middle, high = statistics.quantiles(seconds, n=4)
        found.append(
            Row(
                way=name,
                million=million,
                ms=1e3 * middle,
                quartiles_ms=(1e3 * low, 1e3 * high),
                gb_per_s=moved / middle / 1e9,
                share_of_triad=statistics.median(shares),
                shares=shares,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, nargs="+", default=[50, 200], help="parameters, in millions of 2^20")
    parser.add_argument("--turns", type=int, default=9, help="at least 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path, help="where the figures are written, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table: list[Row] = []
    for million in options.million:
        table += rows(million, measure(million * PARAMETER, options.turns, options.ways))
    print(f"{options.threads} threads, {processor()}, torch {torch.__version__}")
    print(f"{'way':17} {'million':>8} {'ms':>9} {'quartiles':>17} {'GB/s':>7} {'of the triad':>13}")
    for row in table:
        low, high = row.quartiles_ms
        print(
            f"{row.way:17} {row.million:8} {row.ms:9.1f} {low:8.1f}-{high:<8.1f} {row.gb_per_s:7.1f} "
            f"{row.share_of_triad:13.2f}"
        )
    if options.json is not None:
        about = {"commit": commit(), "processor": processor(), "cores": os.cpu_count()}
        found = {**about, "threads": options.threads, "torch": torch.__version__}
        options.json.write_text(json.dumps({**found, "rows": [asdict(row) for row in table]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
