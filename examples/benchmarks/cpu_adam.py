"""How close AdamW on the processor comes to the bandwidth of its memory: torch's own ways, and DeepSpeed's.

    python examples/benchmarks/cpu_adam.py                                 # two minutes, 8 GB of memory
    python examples/benchmarks/cpu_adam.py --million 50 --turns 9 --json results.json

The update of a fp32 parameter reads weight, gradient and two moments and writes all but the gradient: 28 bytes. Its
arithmetic hides behind that, so that the triad of STREAM (McCalpin 1995), a = b + s * c with 12 bytes, is the speed
limit: counted the same way, without the lines that a store fetches first. With moments of 8 bits it is 16.25 bytes,
and 12.25 if weights and gradients are bf16.

fused             torch.optim.AdamW(fused=True), all parameters in one call
fused, buckets    the same, an optimizer and a call for each bucket
zgraph            the update of a compiled step: torch's kernel of the above, without torch.optim, in one call
zgraph, buckets   the same, one call for each bucket, as gradients arrive
8 bits            zgraph.AdamW8bit, on fp32 weights
8 bits, bf16      the same on bf16 weights, with 8 further bits of each in the state
torchao           torchao.optim.AdamW8bit, which Inductor compiles, on fp32 weights (pip install torchao)
foreach           torch.optim.AdamW(foreach=True)
for loop          torch.optim.AdamW(foreach=False)
DeepSpeed         deepspeed.ops.adam.DeepSpeedCPUAdam, which a C++ compiler builds here; left out, with the reason,
                  where it cannot be had: pip install --no-deps deepspeed hjson ninja py-cpuinfo msgpack einops

All of them take turns, so that what else the machine does meets them alike. Printed are medians with quartiles over the
turns, and medians of the ratios to the triad of the same turn. Threads that meet wait for whichever the system has put
aside: where other processes run, put `sudo chrt --fifo 10` in front, so that none is.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from record import about, parser_of, quartiles, save, spread, table
from torch import Tensor, optim

import zgraph
from zgraph.torch_compat.bindings import FUNCTIONS

ADAM_BYTES, TRIAD_BYTES = 28, 12  # per element
PARAMETER = 1 << 20  # elements: a weight of 1024 x 1024
BUCKET = 2 << 20  # bytes of gradients, the default of zgraph's buckets
TRIAD, FLOATS, HALVES = "triad", "8 bits", "8 bits, bf16"
BYTES = {TRIAD: TRIAD_BYTES, FLOATS: 16.25, HALVES: 12.25, "torchao": 16.03}
OPTIONS: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
Step = Callable[[], object]


def triad(elements: int) -> Step:
    b, c, a = torch.randn(elements), torch.randn(elements), torch.zeros(elements)
    return lambda: torch.add(b, c, alpha=0.5, out=a)


def by_torch(weights: Sequence[Tensor], **options: Any) -> Step:
    return optim.AdamW(weights, lr=1e-4, **options).step


def torchao(weights: Sequence[Tensor]) -> Step:
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    return AdamW8bit(weights, lr=1e-4).step


def deepspeed(weights: Sequence[Tensor]) -> Step:
    """One step of DeepSpeed's; raises whatever keeps it from being built."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    return DeepSpeedCPUAdam(weights, lr=1e-4).step


def bucketed(weights: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    count = max(1, BUCKET // (4 * PARAMETER))
    return [weights[first : first + count] for first in range(0, len(weights), count)]


def in_buckets(build: Callable[[Sequence[Tensor]], Step], weights: Sequence[Tensor]) -> Step:
    steps = [build(bucket) for bucket in bucketed(weights)]
    return lambda: [step() for step in steps]


def lists_of(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], ...]:
    """Return the arguments of one update of all weights: weights, gradients, moments of that dtype, and steps."""
    grads = [one.grad for one in weights if one.grad is not None]
    moments = ([torch.zeros_like(one, dtype=dtype) for one in weights] for _ in range(2))
    return (list(weights), grads, *moments, [torch.zeros(()) for _ in weights])


def compiled(weights: Sequence[Tensor]) -> Step:
    """One step by calls of torch's kernel, as a compiled step makes them."""
    *lists, steps = lists_of(weights, torch.float32)
    count = FUNCTIONS[torch.ops.aten._foreach_add_.Scalar]
    update = FUNCTIONS[torch.ops.aten._fused_adamw_.tensor_lr]

    def step() -> None:
        count(steps, 1)
        update(*lists, [], steps, **OPTIONS, amsgrad=False, maximize=False)

    return step


def eight_bit(weights: Sequence[Tensor], dtype: torch.dtype) -> Step:
    own = [one.detach().view(-1, 1024).to(dtype, copy=True) for one in weights]
    for one in own:
        one.grad = torch.randn_like(one)
    return zgraph.AdamW8bit(own, lr=1e-4).step


WAYS: dict[str, Callable[[Sequence[Tensor]], Step]] = {
    "fused": lambda weights: by_torch(weights, fused=True),
    "fused, buckets": lambda weights: in_buckets(lambda bucket: by_torch(bucket, fused=True), weights),
    "zgraph": compiled,
    "zgraph, buckets": lambda weights: in_buckets(compiled, weights),
    FLOATS: lambda weights: eight_bit(weights, torch.float32),
    HALVES: lambda weights: eight_bit(weights, torch.bfloat16),
    "torchao": torchao,
    "foreach": lambda weights: by_torch(weights, foreach=True),
    "for loop": lambda weights: by_torch(weights, foreach=False),
    "DeepSpeed": deepspeed,
}


def measure(elements: int, turns: int, ways: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each turn, by way; weights and gradients are shared, moments are not."""
    weights = [torch.randn(PARAMETER) for _ in range(-(-elements // PARAMETER))]
    for one in weights:
        one.grad = torch.randn(PARAMETER)
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


def rows(million: int, taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Time each way at one size, in units of 2^20 parameters; return medians over the turns."""
    elements, found = million * PARAMETER, list[dict[str, Any]]()
    for name, seconds in taken.items():
        moved = elements * BYTES.get(name, ADAM_BYTES)
        pairs = zip(seconds, taken[TRIAD], strict=True)
        shares = [(moved / one) / (elements * TRIAD_BYTES / other) for one, other in pairs]
        ms = [1e3 * one for one in seconds]
        low, middle, high = quartiles(ms)
        speeds = {"gb_per_s": moved / middle / 1e6, "share_of_triad": statistics.median(shares), "shares": shares}
        found.append(
            {"way": name, "million": million, "ms": middle, "quartiles_ms": (low, high), "all_ms": ms, **speeds}
        )
    return found


def main() -> None:
    parser = parser_of(__doc__, turns=9, threads=torch.get_num_threads())
    parser.add_argument("--million", type=int, nargs="+", default=[50, 200], help="parameters, in millions of 2^20")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = about()
    found: list[dict[str, Any]] = []
    for million in options.million:
        found += rows(million, measure(million * PARAMETER, options.turns, options.ways))
    print(f"{options.threads} threads, {where['processor']}, torch {torch.__version__}")
    cells = [
        (row["way"], row["million"], spread(row["all_ms"], 1), f"{row['gb_per_s']:.1f}", f"{row['share_of_triad']:.2f}")
        for row in found
    ]
    print(table(("way", "million", "ms (quartiles)", "GB/s", "of the triad"), cells))
    save(options.json, {**where, "threads": options.threads, "torch": torch.__version__, "rows": found})


if __name__ == "__main__":
    main()
