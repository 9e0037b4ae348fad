"""What `zgraph.Metrics` costs: training steps with and without it, in turns, on two ranks.

    python examples/benchmarks/metrics_overhead.py                    # five minutes on two cores
    python examples/benchmarks/metrics_overhead.py --pairs 20         # a try

The GPT of examples/train_gpt.py at stage 3 with the fx lowering and LoCo takes its steps in pairs, one with and one
without metrics, each time in another order. "With" times waits, calls `metrics.step` with loss and gradient norm, and
writes a line of JSON; "without" runs under `metrics.pause`, where graphs run as if nobody watched. Printed are medians
and quartiles of both, the median of the pairs' differences with its 95 % interval; what the call of `metrics.step`
takes alone; and what one norm of the error-feedback state takes, which `error_norm_every=100` spreads over a hundred.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import commit, processor
from torch import nn

import zgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_gpt import GPT

RANKS = 2
WARM_UP_STEPS = 5
ROWS, SEQUENCE = 8, 128


def train(rank: int, pairs: int, folder: str) -> dict[str, list[float]]:
    """Milliseconds of each step by how it ran, and of each norm of the error-feedback state."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model: nn.Module = zgraph.shard(GPT(layers=4, width=192, heads=6, sequence=SEQUENCE))
    passes = zgraph.passes.presets.default(compression=zgraph.passes.LoCo())
    options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList(passes)}
    compiled = torch.compile(model, backend="zgraph", dynamic=False, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    writers = [zgraph.metrics.JsonLines(f"{folder}/run-{{rank}}.jsonl")]
    metrics = zgraph.Metrics(model, writers=writers, error_norm_every=0)
    norms = zgraph.Metrics(model, error_norm_every=1)
    tokens = torch.randint(256, (ROWS, SEQUENCE + 1))

    taken: dict[str, list[float]] = {name: [] for name in ("with", "without", "call", "norm")}

    def step() -> dict[str, torch.Tensor]:
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = zgraph.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    def with_metrics() -> None:
        found = step()
        started = time.perf_counter()
        metrics.step(tokens=ROWS * SEQUENCE, **found)
        taken["call"].append(1e3 * (time.perf_counter() - started))

    def without_metrics() -> None:
        with metrics.pause():
            step()

    ways = {"with": with_metrics, "without": without_metrics}
    with norms.pause():
        for pair in range(-WARM_UP_STEPS, pairs):
            for name in ways if pair % 2 else reversed(ways):
                dist.barrier()
                started = time.perf_counter()
                ways[name]()
                if pair >= 0:
                    taken[name].append(1e3 * (time.perf_counter() - started))
        for _ in range(20):
            started = time.perf_counter()
            norms.step()
            taken["norm"].append(1e3 * (time.perf_counter() - started))
    assert norms.last is not None and norms.last.error_norm
    metrics.close()
    dist.destroy_process_group()
    return taken


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ms ({low:.2f} to {high:.2f})"


def median_with_interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the ranks between which it lies with 95 % probability, whatever the distribution."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    low, high = (max(0, min(len(ordered) - 1, round(len(ordered) / 2 + side * half))) for side in (-1, 1))
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        rank, pairs, folder = sys.argv[2:]
        print(json.dumps(train(int(rank), int(pairs), folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400, help="steps with and as many without")
    parser.add_argument("--json", metavar="FILE", help="write every sample to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker"]
        workers = [
            subprocess.Popen([*command, str(rank), str(options.pairs), folder], stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        printed = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError("metrics_overhead: a rank failed; what it said is above")
    taken: dict[str, list[float]] = json.loads(printed[0].splitlines()[-1])
    plain_ms = statistics.median(taken["without"])
    differences = [one - other for one, other in zip(taken["with"], taken["without"], strict=True)]
    middle, low, high = (100 * each / plain_ms for each in median_with_interval(differences))
    print(f"{options.pairs} pairs of steps on {processor()}, commit {commit()}")
    print(f"  without {quartiles(taken['without'])}, with {quartiles(taken['with'])}")
    print(f"  difference of a pair: {middle:+.2f} % of a step, 95 % interval {low:+.2f} to {high:+.2f} %")
    call_ms, norm_ms = statistics.median(taken["call"]), statistics.median(taken["norm"])
    print(f"  the call of metrics.step: {quartiles(taken['call'])}, {100 * call_ms / plain_ms:.3f} % of a step")
    print(f"  a norm of the error-feedback state: {norm_ms:.2f} ms, {norm_ms / plain_ms:.3f} % of a hundred steps")
    if options.json:
        Path(options.json).write_text(json.dumps({"processor": processor(), "commit": commit(), **taken}) + "\n")


if __name__ == "__main__":
    main()
