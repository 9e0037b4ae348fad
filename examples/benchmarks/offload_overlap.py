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

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from builders import adamw, whole_step
from ranks import alone
from record import about, parser_of, save, spread, table
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
    ms: list[float] = field(default_factory=list[float])


def build(
    config: ModelConfig, hardware: zgraph.Hardware, way: str, budget_bytes: int | None = None, rests: str = DEVICE
) -> tuple[Row, Callable[[], object]]:
    """A row, and its step."""
    torch.manual_seed(0)
    at_rest, updates = RESTS[rests]
    model = zgraph.shard(LanguageModel(config), zero_stage=3, offload=at_rest)
    report = zgraph.Report()
    passes = presets.planned(offload_activations=way != RECOMPUTE and at_rest is None)
    if at_rest is not None:
        stream = StreamStates(updates=updates)
        kept = [one for one in passes if way != BY_RULES or not isinstance(one, ScheduleCopies)]
        passes = [stream if isinstance(one, StreamStates) else one for one in kept]
    target = zgraph.Target(hardware=hardware, budget_bytes=budget_bytes, time_kernels=True)
    options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList(passes, target=target), "report": report}
    step = whole_step(model, adamw(model, lr=1e-4), options)
    tokens = torch.randint(0, config.vocabulary, (config.batch, config.sequence + 1))
    for _ in range(WARM_UP_STEPS):
        step(tokens)
    graph = report.graphs[-1]
    assert graph.us is not None and graph.peak is not None
    chosen = [note.rpartition(": ")[0] for note in report.notes if " activations: " in note]
    notes = "; ".join(note.split(": ")[-1] for note in chosen[-2:])
    row = Row(way, rests, budget_bytes, graph.us / 1e3, graph.peak.bytes, notes)
    return row, lambda: step(tokens)


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


def take_turns(built: Sequence[tuple[Row, Callable[[], object]]], threads: Sequence[LimitedThread], turns: int) -> None:
    for _ in range(turns):
        for row, step in built:
            for thread in threads:
                thread.waits_at_once = row.way == AT_ONCE
            began = time.perf_counter()
            step()
            row.ms.append(1e3 * (time.perf_counter() - began))


def main() -> None:
    parser = parser_of(
        __doc__, layers=6, width=256, batch=8, sequence=128, mb_per_s=1000.0, budgets="0.85,0.7,0.5", turns=9
    )
    parser.add_argument("--states", action="store_true", help="parameters and optimizer state rest on the host")
    options = parser.parse_args()
    where = about()
    torch.set_num_threads(1)
    rate = options.mb_per_s  # of copies, each direction: bytes per microsecond
    link = Link(latency_us=30.0, bytes_per_us=rate)
    hardware = replace(zgraph.Hardware.preset("cpu"), host_to_device=link, device_to_host=link)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "batch", "sequence")}
    config = ModelConfig(vocabulary=1024, **sizes)
    lanes = lanes_of(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
    threads = LimitedThread(rate), LimitedThread(rate)
    lanes.out, lanes.back = threads
    with alone():
        built = [build(config, hardware, RECOMPUTE)]
        free = built[0][0]
        for rests in [rests for rests in RESTS if rests != DEVICE] if options.states else ():
            ways = (PLANNED, BY_RULES, AT_ONCE) if rests.startswith("all") else (PLANNED,)
            built += [build(config, hardware, way, None, rests) for way in ways]
        for share in () if options.states else map(float, options.budgets.split(",")):
            for way in (PLANNED, AT_ONCE, RECOMPUTE):
                try:
                    built.append(build(config, hardware, way, int(share * free.predicted_bytes)))
                except Exception as error:  # too small a budget for recomputation alone
                    print(f"{way} at {share:.2f}: {' '.join(str(error).split())[:300]}")
        take_turns(built, threads, options.turns)
    rows = [row for row, _ in built]
    base = statistics.median(free.ms)
    print(f"{where['processor']}, {where['commit']}, copies at {rate:.0f} MB/s; {config}")
    cells = [
        (
            *(row.way, row.rests, "none" if row.budget_bytes is None else f"{row.budget_bytes / 1e6:.1f}"),
            *(f"{row.predicted_bytes / 1e6:.1f}", spread(row.ms, 1), f"{row.predicted_ms:.1f}"),
            *(f"{statistics.median(row.ms) / base:.2f}", row.notes),
        )
        for row in rows
    ]
    print(table(("way", "rests", "budget MB", "peak MB", "ms (quartiles)", "predicted", "x free", "chosen"), cells))
    save(options.json, {**where, "mb_per_s": rate, "config": vars(config), "rows": [vars(row) for row in rows]})


if __name__ == "__main__":
    main()
