"""Offload to the host: what a step takes, predicted and measured, with prefetch and without.

    python examples/benchmarks/offload_overlap.py                          # some minutes on one core
    python examples/benchmarks/offload_overlap.py --mb-per-s 500 --layers 12 --json FILE
    python examples/benchmarks/offload_overlap.py --states                 # parameters and optimizer state instead

One process trains a small transformer as whole steps. Its device is the CPU, and the host a pool beside it: copies are
real, made by a thread for each direction that does not exceed a given rate, as a slower link would. Each budget is a
share of what the step holds without any. At each, `ChooseLifetimes` decides what is kept, recomputed or offloaded, and
the schedule places the copies:

planned            as said
without prefetch   the same copies, each waited for where it starts
recompute only     the same budget without offloading

With `--states` it is parameters and the optimizer's state that rest on the host, without a budget. Updates run there,
beside compute, or on copies (streamed). `ScheduleCopies` places copies and waits ("planned"), or the rules of
`StreamStates` do ("by rules").

The ways take turns; printed are medians with quartiles, the simulator's prediction, and counted peaks of the device.
Pin the process to one core (taskset -c 0): the copying threads then need another one.
"""

# HashStore is exported, though not listed.
# pyright: reportPrivateImportUsage=false

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from provenance import commit, processor
from torch import Tensor
from workload import LanguageModel, ModelConfig

import zgraph
from zgraph.analysis.hardware import Link
from zgraph.passes import ScheduleCopies, StreamStates, presets
from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.thread_lanes import ThreadLanes

WARM_UP_STEPS = 4
PLANNED, AT_ONCE, RECOMPUTE, BY_RULES = "planned", "without prefetch", "recompute only", "by rules"
DEVICE = "on the device"
RESTS: dict[str, tuple[zgraph.Offload | None, Literal["at_rest", "streamed"]]] = {
    DEVICE: (None, "at_rest"),
    "state, updated there": (zgraph.Offload(optimizer="host"), "at_rest"),
    "all, updated there": (zgraph.Offload(params="host", optimizer="host"), "at_rest"),
    "state, streamed": (zgraph.Offload(optimizer="host"), "streamed"),
    "all, streamed": (zgraph.Offload(params="host", optimizer="host"), "streamed"),
}


@dataclass
class Row:
    """One way to run the step at one budget, or with parameters and state resting somewhere."""

    way: str
    rests: str
    budget_bytes: int | None
    predicted_ms: float
    predicted_bytes: int
    notes: str
    step: Callable[[Tensor], Any]
    ms: list[float]


def build(
    config: ModelConfig,
    hardware: zgraph.Hardware,
    way: str,
    budget_bytes: int | None,
    rests: str = DEVICE,
) -> Row:
    torch.manual_seed(0)
    at_rest, updates = RESTS[rests]
    model = zgraph.shard(LanguageModel(config), zero_stage=3, offload=at_rest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    report = zgraph.Report()
    passes = presets.planned(offload_activations=way != RECOMPUTE and at_rest is None)
    if at_rest is not None:
        stream = StreamStates(updates=updates)
        kept = [one for one in passes if way != BY_RULES or not isinstance(one, ScheduleCopies)]
        passes = [stream if isinstance(one, StreamStates) else one for one in kept]
    target = zgraph.Target(hardware=hardware, budget_bytes=budget_bytes, time_kernels=True)
    options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList(passes, target=target), "report": report}

    @zgraph.training_step(model, optimizer, options=options)
    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    tokens = torch.randint(0, config.vocabulary, (config.batch, config.sequence + 1))
    for _ in range(WARM_UP_STEPS):
        step(tokens)
    graph = report.graphs[-1]
    assert graph.us is not None and graph.peak is not None
    chosen = [note.rpartition(": ")[0] for note in report.notes if " activations: " in note]
    notes = "; ".join(note.split(": ")[-1] for note in chosen[-2:])
    return Row(way, rests, budget_bytes, graph.us / 1e3, graph.peak.bytes, notes, lambda _: step(tokens), [])


def update_bytes_per_us(elements: int = 16 * 2**20, turns: int = 5) -> float:
    """Bytes that AdamW moves in a microsecond on one thread, 28 for each element."""
    parameter = torch.zeros(elements)
    parameter.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    taken: list[float] = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return 28 * elements / statistics.median(taken[1:]) / 1e6


class LimitedThread(ThreadPoolExecutor):
    """A thread whose copies take as long as over a link of a lower rate.

    Attributes:
        waits_at_once: whether each copy is waited for where it starts.
    """

    def __init__(self, bytes_per_us: float) -> None:
        super().__init__(max_workers=1)
        self.bytes_per_us, self.waits_at_once = bytes_per_us, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a copy, whose first argument is the tensor to copy."""

        def limited() -> Any:
            begin = time.perf_counter()
            result = fn(*args, **kwargs)
            nbytes = args[0].nbytes if args else 0
            time.sleep(max(0.0, begin + nbytes / self.bytes_per_us / 1e6 - time.perf_counter()))
            return result

        found = super().submit(limited)
        if self.waits_at_once:
            found.result()
        return found


def take_turns(rows: Sequence[Row], threads: Sequence[LimitedThread], turns: int) -> None:
    for _ in range(turns):
        for row in rows:
            for thread in threads:
                thread.waits_at_once = row.way == AT_ONCE
            began = time.perf_counter()
            row.step(torch.empty(0))
            row.ms.append(1e3 * (time.perf_counter() - began))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--mb-per-s", type=float, default=1000.0, help="rate of copies, each direction")
    parser.add_argument("--budgets", default="0.85,0.7,0.5", help="shares of the peak without a budget")
    parser.add_argument("--states", action="store_true", help="parameters and optimizer state rest on the host")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rate = options.mb_per_s  # bytes per microsecond
    link = Link(latency_us=30.0, bytes_per_us=rate)
    hardware = replace(zgraph.Hardware.preset("cpu"), host_to_device=link, device_to_host=link)
    config = ModelConfig(
        layers=options.layers, width=options.width, batch=options.batch, sequence=options.sequence, vocabulary=1024
    )
    lanes = lanes_of(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
    threads = LimitedThread(rate), LimitedThread(rate)
    lanes.out, lanes.back = threads
    free = build(config, hardware, RECOMPUTE, None)
    rows = [free]
    for rests in [rests for rests in RESTS if rests != DEVICE] if options.states else ():
        ways = (PLANNED, BY_RULES, AT_ONCE) if rests.startswith("all") else (PLANNED,)
        rows += [build(config, hardware, way, None, rests) for way in ways]
    for share in () if options.states else map(float, options.budgets.split(",")):
        budget = int(share * free.predicted_bytes)
        for way in (PLANNED, AT_ONCE, RECOMPUTE):
            try:
                rows.append(build(config, hardware, way, budget))
            except Exception as error:  # too small a budget for recomputation alone
                print(f"{way} at {share:.2f}: {str(error).splitlines()[1][:200]}")
    take_turns(rows, threads, options.turns)
    base = statistics.median(free.ms)
    print(f"{processor()}, {commit()}, copies at {rate:.0f} MB/s; {config}")
    print(
        f"{'way':18} {'rests':22} {'budget MB':>10} {'peak MB':>8} {'ms':>7} {'quartiles':>15} {'predicted':>9} "
        f"{'x free':>6} chosen"
    )
    figures: list[dict[str, Any]] = []
    for row in rows:
        low, middle, high = statistics.quantiles(row.ms, n=4)
        budget = "none" if row.budget_bytes is None else f"{row.budget_bytes / 1e6:.1f}"
        print(
            f"{row.way:18} {row.rests:22} {budget:>10} {row.predicted_bytes / 1e6:8.1f} {middle:7.1f} "
            f"{low:7.1f}-{high:7.1f} {row.predicted_ms:9.1f} {middle / base:6.2f}  {row.notes}"
        )
        figures.append({key: value for key, value in vars(row).items() if key != "step"})
    if options.json is not None:
        about: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "commit": commit()}
        about |= {"mb_per_s": rate, "config": vars(config)}
        options.json.write_text(json.dumps(about | {"rows": figures}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
