"""One rank of the shaped-link benchmark: measures the link, then trains every strategy in turn.

Started by shaped_link.py inside a network namespace, once per rank. All strategies live side by side in the same
processes and take turns, a few steps each, so that whatever drifts (clock speed, other load) touches them all alike.
"""

import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

import netns
import torch
import torch.distributed as dist
from builders import Lowering, Setting, Trainer
from heap import Heap, HeapPeak
from strategies import Strategy, strategies
from torch.distributed.device_mesh import init_device_mesh
from workload import ModelConfig, make_batch

# The first step compiles, DDP lays its buckets out anew in the second, and the third is like all that follow.
WARM_UP_STEPS = 3

T = TypeVar("T")

_STORE_PORT = 29500
_GOODPUT_PORT = 29501
# A rank that is this late has hung: compilation of the slowest strategy, by Inductor, takes a part of it.
TIMEOUT = timedelta(minutes=15)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What all ranks of a benchmark do, agreed before any of them starts."""

    addresses: list[str]
    bits_per_second: int | None
    model: ModelConfig
    strategies: list[str]
    steps: int
    repeats: int

    @property
    def steps_in_all(self) -> int:
        return WARM_UP_STEPS + self.steps * self.repeats

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        values["model"] = ModelConfig(**values["model"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Plan(RankPlan):
    """What the ranks of shaped_link.py do."""

    lowering: Lowering = "fx"


@dataclass
class Row:
    """What one strategy did on this rank."""

    strategy: Strategy
    payload_bytes: float = 0.0
    steps_done: int = 0
    loss: float = float("nan")
    backward_s: list[float] = field(default_factory=list[float])
    optimizer_s: list[float] = field(default_factory=list[float])
    sent_bytes: list[int] = field(default_factory=list[int])
    peak_bytes: int = 0
    predictions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def main() -> None:
    rank, plan_path, result_path = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    plan = Plan.from_json(plan_path.read_text())
    end_with_parent()
    heap = Heap()
    cores = sorted(os.sched_getaffinity(0))
    # Before any other thread starts: gloo's own inherit the core, so one rank never computes on two.
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    # One process compiles the same functions for many strategies; falling back to eager would go unnoticed.
    torch.compiler.config.recompile_limit = 64
    torch.compiler.config.fail_on_recompile_limit_hit = True
    # What zgraph warns of here is meant: compute alone runs unsharded on every rank.
    warnings.filterwarnings("ignore", message="zgraph: .* nothing is sharded")

    ranks = len(plan.addresses)
    meeting_point = f"tcp://{plan.addresses[0]}:{_STORE_PORT}"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks, timeout=TIMEOUT)
    link = {
        "goodput_bytes_per_s": measure_goodput(plan.addresses, plan.bits_per_second, rank),
        **measure_all_gather(plan),
    }
    setting = make_setting(plan, rank)
    rows: list[Row] = []
    trainers: list[Trainer] = []
    for name in plan.strategies:
        say(rank, f"building {name}")
        rows.append(Row(strategies()[name]))
        trainers.append(build(rows[-1], setting, rank))
    for repeat in range(plan.repeats):
        say(rank, f"repetition {repeat + 1} of {plan.repeats}")
        for index, row in enumerate(rows):
            run_turn(row, trainers[index], plan, rank)
    for row in rows:
        row.peak_bytes = measure_peak(heap, trainers, make_batch(plan.model, row.steps_done, rank))

    result = {"link": link, "strategies": {row.strategy.name: summarize(row) for row in rows}}
    if rank == 0:
        result_path.write_text(json.dumps(result))
    dist.barrier()
    # Not an ordinary return: gloo's thread may still be freeing the tensor of that barrier, for which it needs the
    # interpreter, and asking an interpreter that is shutting down aborts the process.
    os._exit(0)


def join_hosts(plan: RankPlan, hosts: Sequence[int], rank: int) -> dict[str, float]:
    """Begin a rank that shares the one core of its host with others; returns what the link between hosts gives."""
    end_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    # Before any other thread starts: gloo's own inherit the core.
    os.sched_setaffinity(0, {cores[hosts[rank] % len(cores)]})
    torch.set_num_threads(1)
    torch.compiler.config.recompile_limit = 64
    torch.compiler.config.fail_on_recompile_limit_hit = True
    meeting_point, ranks = f"tcp://{plan.addresses[0]}:{_STORE_PORT}", len(plan.addresses)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=ranks, timeout=TIMEOUT)
    return {"goodput_bytes_per_s": measure_goodput(plan.addresses, plan.bits_per_second, rank)}


def make_setting(plan: Plan, rank: int) -> Setting:
    mesh = init_device_mesh("cpu", (len(plan.addresses),), mesh_dim_names=("dp",))
    nodes = len(set(plan.addresses))
    if not any(strategies()[name].needs == "zgraph" for name in plan.strategies):
        return Setting(plan.model, mesh, nodes, plan.lowering)
    import zgraph

    say(rank, "calibrating")
    with tempfile.TemporaryDirectory() as nothing_kept:
        return Setting(plan.model, mesh, nodes, plan.lowering, zgraph.calibrate(mesh, cache=nothing_kept))


def measure_goodput(addresses: Sequence[str], bits_per_second: int | None, rank: int) -> float:
    """Payload bytes per second over plain TCP, every rank sending to the next and receiving from the one before.

    This is how a ring collective loads the links. Three runs of about a second; the slowest rank counts.
    """
    total_bytes = bits_per_second // 8 if bits_per_second is not None else 1 << 29
    chunk = bytes(1 << 20)
    buffer = bytearray(len(chunk))
    rates: list[float] = []
    with socket.create_server((addresses[rank], _GOODPUT_PORT + rank)) as server:
        dist.barrier()
        following = (rank + 1) % len(addresses)
        target = (addresses[following], _GOODPUT_PORT + following)
        with socket.create_connection(target) as sending, server.accept()[0] as receiving:

            def send() -> None:
                for _ in range(total_bytes // len(chunk)):
                    sending.sendall(chunk)

            for _ in range(3):
                dist.barrier()
                sender = threading.Thread(target=send)
                start = time.perf_counter()
                sender.start()
                received = 0
                while received < total_bytes // len(chunk) * len(chunk):
                    received += receiving.recv_into(buffer)
                rates.append(received / (time.perf_counter() - start))
                sender.join()
    return min(on_all_ranks(statistics.median(rates)))


def measure_all_gather(plan: Plan) -> dict[str, float]:
    """Bytes per second that a rank sends in a plain all_gather, and what the counter saw for each byte sent.

    gloo often stays far below TCP's goodput here and in all_to_all, down to one direction at a time: a rank that starts
    to send before its own receive is announced queues that announcement behind the data. Point-to-point calls that post
    the receive first fill both directions.
    """
    ranks = len(plan.addresses)
    shard = torch.ones(2 << 20)
    gathered = [torch.empty_like(shard) for _ in range(ranks)]
    payload_bytes = shard.nbytes * (ranks - 1)
    rates: list[float] = []
    sent: list[int] = []
    for _ in range(5):
        dist.barrier()
        sent_before = netns.transmitted_bytes()
        start = time.perf_counter()
        dist.all_gather(gathered, shard)
        rates.append(payload_bytes / (time.perf_counter() - start))
        dist.barrier()
        sent.append(netns.transmitted_bytes() - sent_before)
    return {
        "all_gather_bytes_per_s": min(on_all_ranks(statistics.median(rates))),
        "all_gather_counted_per_payload_byte": max(on_all_ranks(statistics.median(sent) / payload_bytes)),
    }


def build(row: Row, setting: Setting, rank: int) -> Trainer:
    """Build the row's strategy and take its warm-up steps."""
    row.payload_bytes = row.strategy.payload_bytes(setting.new_model(), setting.nodes)
    trainer = row.strategy.build(setting)
    for _ in range(WARM_UP_STEPS):
        train_step(trainer, make_batch(setting.config, row.steps_done, rank))
        row.steps_done += 1
    row.predictions = [asdict(one) for one in trainer.predictions]
    return trainer


def run_turn(row: Row, trainer: Trainer, plan: Plan, rank: int) -> None:
    """Train a few timed steps, all ranks entering each one together."""
    schedule_gloo(row.strategy)
    dist.barrier()
    sent_before = netns.transmitted_bytes()
    for _ in range(plan.steps):
        batch = make_batch(plan.model, row.steps_done, rank)
        dist.barrier()
        row.loss, backward_s, optimizer_s = train_step(trainer, batch)
        row.backward_s.append(backward_s)
        row.optimizer_s.append(optimizer_s)
        row.steps_done += 1
    # What this rank sent has left when every peer has what it waited for; the barriers' own bytes are some hundreds.
    dist.barrier()
    row.sent_bytes.append((netns.transmitted_bytes() - sent_before) // plan.steps)


def schedule_gloo(strategy: Strategy) -> None:
    """Restore the default scheduling policy of gloo's threads for peers: only `zgraph.shard` changes it."""
    policy = os.SCHED_BATCH if strategy.needs == "zgraph" else os.SCHED_OTHER
    for task in Path("/proc/self/task").glob("*"):
        if (task / "comm").read_text().startswith("gloo"):
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))


def train_step(trainer: Trainer, batch: torch.Tensor) -> tuple[float, float, float]:
    """One step; returns the loss, and the seconds until the gradients were there and for the rest."""
    start = time.perf_counter()
    loss = trainer.loss(batch)
    trainer.backward(loss)
    backward_done = time.perf_counter()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return loss.item(), backward_done - start, time.perf_counter() - backward_done


def measure_peak(heap: Heap, trainers: list[Trainer], batch: torch.Tensor) -> int:
    """Take the first trainer off the list, train one last step, free it, and return the most bytes it ever held.

    That is what the step needs on top of what was there before it, and what freeing the trainer gives back. So neither
    the other strategies nor what compiling left in the process count.
    """
    trainer = trainers.pop(0)
    gc.collect()
    with HeapPeak(heap) as peak:
        train_step(trainer, batch)
    used_bytes = heap.used_bytes()
    del trainer
    gc.collect()
    return peak.rise_bytes + used_bytes - heap.used_bytes()


def summarize(row: Row) -> Mapping[str, Any]:
    """Join the ranks: the slowest one's times, the largest counters and peaks, the mean loss. Called on every rank."""
    step_s = on_all_ranks([sum(parts) for parts in zip(row.backward_s, row.optimizer_s, strict=True)])
    backward_s, optimizer_s = on_all_ranks(row.backward_s), on_all_ranks(row.optimizer_s)
    # Alone, each rank fits its own data only: that loss is no result.
    loss = statistics.fmean(on_all_ranks(row.loss)) if row.strategy.compute is not None else None
    return {
        "step_ms": [1e3 * max(seconds) for seconds in zip(*step_s, strict=True)],
        "backward_ms": [1e3 * max(seconds) for seconds in zip(*backward_s, strict=True)],
        "optimizer_ms": [1e3 * max(seconds) for seconds in zip(*optimizer_s, strict=True)],
        "payload_bytes": row.payload_bytes,
        "sent_bytes": max(on_all_ranks(statistics.median(row.sent_bytes))),
        "peak_bytes": max(on_all_ranks(row.peak_bytes)),
        "loss": loss,
        "predictions": row.predictions,
    }


def on_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def end_with_parent() -> None:
    """Leave when standard input closes: the parent holds its other end, so it closes however the parent ends."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
