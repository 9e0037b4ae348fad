"""Ways to train that take turns over links of a known rate: what shaped_link.py and tensor_link.py share.

All strategies live side by side in the same processes, one per rank in the network namespace of its host, and take
turns, a few steps each, so that whatever drifts (clock speed, other load) touches them all alike.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import random
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any

import netns
import torch
import torch.distributed as dist
from builders import Build, Setting, Trainer
from heap import Heap, HeapPeak
from netns import NetworkError, ShapedNetwork, parse_rate
from ranks import WARM_UP_STEPS, BenchmarkError, on_all_ranks, run_ranks, say, slowest_ms
from record import about, parser_of, quartiles, save, spread, table
from workload import LanguageModel, ModelConfig, make_batch

_GOODPUT_PORT = 29501
# Of a table's numbers: the head, the key, the format and the unit.
_COLUMNS = (
    ("predicted", "predicted_ms", ".1f", 1),
    ("error", "prediction_error", "+.1%", 1),
    ("sent MB", "sent_bytes", ".2f", 1e6),
    ("peak MiB", "peak_bytes", ".1f", 2**20),
    ("loss", "loss", ".4f", 1),
)


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Attributes:
        name: how the command line and the table call it.
        build: makes a trainer; called once per rank, in the same order on all.
        peers: strategies that send the same for the same, which the step is compared with, turn by turn.
        needs: the package that it is left out without.
        equal_loss: the run fails when this strategy, if it runs as well, has another loss.
        steps: number of timed steps in a turn, for rows whose ranks need not wait for each other: a barrier before the
            turn, and one value per turn, the mean of its steps. None: the number from the command line, with a barrier
            before each step, and one value per step.
    """

    name: str
    build: Build
    peers: tuple[str, ...] = ()
    needs: str = "torch"
    equal_loss: str | None = None
    steps: int | None = None


# --- in the process that starts the ranks -----------------------------------------------------------------------------


def options_of(document: str | None, epilog: str, model: ModelConfig, steps: int) -> argparse.ArgumentParser:
    """The options of all benchmarks of links."""
    parser = parser_of(document, epilog, rate="1gbit", steps=steps, repeats=5, **asdict(model))
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), metavar="A,B,C", help="default: all that are installed"
    )
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given, with the model in `model`; --rate is that of each link and direction, or none: unshaped."""
    arguments = parser.parse_args()
    if arguments.steps * arguments.repeats < 2:
        parser.error("a median and its spread need at least two timed steps")
    try:
        parse_rate(arguments.rate)
        arguments.model = ModelConfig(**{size.name: getattr(arguments, size.name) for size in fields(ModelConfig)})
    except ValueError as error:
        parser.error(str(error))
    return arguments


def choose(
    parser: argparse.ArgumentParser, names: Sequence[str] | None, table: Mapping[str, Strategy]
) -> list[Strategy]:
    """The named strategies, in the table's order; all that are installed when None."""
    missing = {one.needs for one in table.values() if importlib.util.find_spec(one.needs) is None}
    for module in sorted(missing) if names is None else ():
        print(f"{module} is not installed: its strategies are left out", file=sys.stderr)
    chosen = names or [name for name, strategy in table.items() if strategy.needs not in missing]
    for name in chosen:
        if name not in table:
            parser.error(f"strategy {name!r} is unknown; choose from {', '.join(table)}")
        if table[name].needs in missing:
            parser.error(f"strategy {name!r} needs {table[name].needs}, which is not installed")
    return [strategy for name, strategy in table.items() if name in chosen]


def run_as_command(
    script: str,
    arguments: argparse.Namespace,
    chosen: Sequence[Strategy],
    hosts: Sequence[int],
    *,
    tolerance: float,
    cores: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run a benchmark, print its report, and write it where `--json` says; the exit status.

    Args:
        script: path of the benchmark.
        arguments: as `parsed` has them, with `lowering`.
        chosen: the strategies.
        hosts: of each rank.
        cores: of each rank; one after the other where None.
        tolerance: within which losses that should be equal are, relative.
        environment: of the ranks.
    """
    # A plain kill cleans up as Ctrl-C does, and Ctrl-C also where a shell had a background job ignore it.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    name, where = Path(script).stem, about()
    agreed = {"lowering": arguments.lowering, "steps": arguments.steps, "repeats": arguments.repeats}
    agreed["model"] = asdict(arguments.model)
    plan = {**agreed, "bits_per_second": parse_rate(arguments.rate), "strategies": [one.name for one in chosen]}
    try:
        with ShapedNetwork(len(set(hosts)), arguments.rate) as network:
            measured = run_ranks(script, plan, cores or range(len(hosts)), network, hosts, environment)
    except (NetworkError, BenchmarkError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; namespaces and ranks are gone", file=sys.stderr)
        return 130
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in LanguageModel(arguments.model).parameters())
    rows = _compared(chosen, measured["strategies"], arguments.repeats)
    report = {
        "rate": arguments.rate,
        "ranks": len(hosts),
        "nodes": len(set(hosts)),
        **agreed,
        **where,
        "steps_in_all": WARM_UP_STEPS + arguments.steps * arguments.repeats,
        "parameters": numel,
        "link": measured["link"],
        "rows": rows,
        "failures": _find_failures(chosen, rows, tolerance),
    }
    print(render(report))
    save(arguments.json, report)
    return 1 if report["failures"] else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _compared(chosen: Sequence[Strategy], rows: dict[str, dict[str, Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """The measured rows with medians, quartiles, and how many times as fast as its peers each one is."""
    for strategy in chosen:
        row = rows[strategy.name]
        row["step_ms_low"], row["step_ms_median"], row["step_ms_high"] = quartiles(row["step_ms"])
        if "predicted_ms" in row:
            row["prediction_error"] = row["predicted_ms"] / statistics.median(row["backward_ms"]) - 1
        peers = {peer: rows[peer]["step_ms"] for peer in strategy.peers if peer in rows}
        row["times_faster"] = {peer: times_faster(row["step_ms"], theirs, repeats) for peer, theirs in peers.items()}
    return rows


def times_faster(step_ms: Sequence[float], peer_ms: Sequence[float], repeats: int) -> tuple[float, float, float]:
    """How many times a peer's step takes, with a 95 % interval of the median: a bootstrap over turns, in pairs."""

    def turns(every_ms: Sequence[float]) -> list[float]:
        steps = len(every_ms) // repeats
        return [statistics.median(every_ms[first : first + steps]) for first in range(0, len(every_ms), steps)]

    ratios = [theirs / ours for theirs, ours in zip(turns(peer_ms), turns(step_ms), strict=True)]
    chance = random.Random(0)
    drawn = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), drawn[50], drawn[-51]


def _find_failures(chosen: Sequence[Strategy], rows: dict[str, dict[str, Any]], tolerance: float) -> list[str]:
    """One line for each pair of losses that should be equal and are not."""
    pairs = [(one.name, one.equal_loss) for one in chosen if one.equal_loss in rows]
    return [
        f"{name} ends with the loss {rows[name]['loss']!r}, {other} with {rows[other]['loss']!r}"
        for name, other in pairs
        if not math.isclose(rows[name]["loss"], rows[other]["loss"], rel_tol=tolerance)
    ]


def render(report: dict[str, Any]) -> str:
    """The report as text: the link, the table, what to know when reading it."""
    link, rows = report["link"], report["rows"]

    def cells(name: str, row: dict[str, Any]) -> list[str]:
        numbers = [(row.get(key), form, unit) for _, key, form, unit in _COLUMNS]
        shown = ("-" if value is None else f"{value / unit:{form}}" for value, form, unit in numbers)
        return [name, spread(row["step_ms"], 1), *shown]

    heads = ["strategy", "step ms (quartiles)", *(head for head, *_ in _COLUMNS)]
    lines = [
        f"{report['ranks']} ranks on {report['nodes']} nodes and {report['cores']} cores, links at {report['rate']}, "
        f"{report['parameters'] / 1e6:.1f} M parameters, torch {report['versions']['torch']}, {report['lowering']}",
        f"TCP goodput {link['goodput_bytes_per_s'] / 1e6:.1f} MB/s; plain all_gather sends "
        f"{link['all_gather_bytes_per_s'] / 1e6:.1f} MB/s, counted {link['all_gather_counted_per_payload_byte']:.3f} "
        "bytes per payload byte",
        *("", table(heads, [cells(name, row) for name, row in rows.items()]), ""),
        *(
            f"{name} is {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast as {peer}"
            for name, row in rows.items()
            for peer, (ratio, low, high) in row["times_faster"].items()
        ),
        "",
        f"{report['repeats']} repetitions of {report['steps']} steps each, strategies in turn; loss after "
        f"{report['steps_in_all']} steps.",
        "Sent is the interface's tx_bytes: payload, acknowledgements, one set of headers per packet of up to 64 KiB.",
    ]
    if report["ranks"] > report["cores"]:
        lines.append(f"{report['ranks']} ranks share {report['cores']} cores: compute and communication compete.")
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


# --- in a rank --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One strategy on this rank, and what it did."""

    strategy: Strategy
    trainer: Trainer | None
    steps_done: int = 0
    loss: float = float("nan")
    backward_s: list[float] = field(default_factory=list[float])
    optimizer_s: list[float] = field(default_factory=list[float])
    sent_bytes: list[int] = field(default_factory=list[int])
    peak_bytes: int = 0
    predicted: dict[str, float] = field(default_factory=dict[str, float])


def train_in_turns(
    rank: int, plan: dict[str, Any], known: Mapping[str, Strategy], set_up: Callable[[ModelConfig], Setting]
) -> dict[str, Any]:
    """Measure the link, then train every strategy of the plan in turn."""
    heap, config = Heap(), ModelConfig(**plan["model"])
    link = _goodput(plan, rank) | _all_gather()
    setting = set_up(config)
    rows: list[Row] = []
    for name in plan["strategies"]:
        say(rank, f"building {name}")
        rows.append(_built(known[name], setting))
    for repeat in range(plan["repeats"]):
        say(rank, f"repetition {repeat + 1} of {plan['repeats']}")
        for row in rows:
            _take_turn(row, setting, plan["steps"])
    for row in rows:
        _measure_peak(row, heap, setting)
    return {"link": link, "strategies": {row.strategy.name: _summary(row) for row in rows}}


def _built(strategy: Strategy, setting: Setting) -> Row:
    """Build the strategy and take its warm-up steps, which compile."""
    trainer = strategy.build(setting)
    row = Row(strategy, trainer)
    for _ in range(WARM_UP_STEPS):
        _train_step(row, setting)
    if trainer.predicted is not None:
        import zgraph

        graphs = zgraph.explain(trainer.predicted).graphs
        row.predicted = {
            "predicted_ms": sum(graph.us or 0.0 for graph in graphs) / 1e3,
            "predicted_exposed_ms": sum(graph.exposed_us or 0.0 for graph in graphs) / 1e3,
        }
    return row


def _train_step(row: Row, setting: Setting, *, together: bool = True) -> tuple[float, float]:
    """One step, which all ranks enter together or not; returns the seconds until the gradients, and for the rest."""
    assert row.trainer is not None
    # Ranks that split layers between them see the same tokens.
    batch = make_batch(setting.config, row.steps_done, setting.mesh.get_local_rank())
    row.steps_done += 1
    if together:
        dist.barrier()
    start = time.perf_counter()
    loss = row.trainer.loss(batch)
    row.trainer.backward(loss)
    backward_done = time.perf_counter()
    row.trainer.optimizer.step()
    row.trainer.optimizer.zero_grad()
    row.loss = loss.item()
    return backward_done - start, time.perf_counter() - backward_done


def _take_turn(row: Row, setting: Setting, steps: int) -> None:
    """Train a few timed steps."""
    # Only `zgraph.shard` changes how gloo's threads are scheduled: for peers the system's policy is restored.
    policy = os.SCHED_BATCH if row.strategy.needs == "zgraph" else os.SCHED_OTHER
    for task in Path("/proc/self/task").glob("*"):
        if (task / "comm").read_text().startswith("gloo"):
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
    dist.barrier()
    sent_before = netns.transmitted_bytes()
    own = row.strategy.steps
    for _ in range(own or steps):
        backward_s, optimizer_s = _train_step(row, setting, together=own is None)
        row.backward_s.append(backward_s)
        row.optimizer_s.append(optimizer_s)
    # What this rank sent has left when every peer has what it waited for; the barriers' own bytes are some hundreds.
    dist.barrier()
    row.sent_bytes.append((netns.transmitted_bytes() - sent_before) // (own or steps))


def _measure_peak(row: Row, heap: Heap, setting: Setting) -> None:
    """Train one last step, free the trainer, and note the most bytes it ever held.

    That is what the step needs on top of what was there before it, and what freeing the trainer gives back. So neither
    the other strategies nor what compiling left in the process count.
    """
    last_loss = row.loss
    gc.collect()
    with HeapPeak(heap) as peak:
        _train_step(row, setting)
    used_bytes = heap.used_bytes()
    row.trainer, row.loss = None, last_loss
    gc.collect()
    row.peak_bytes = peak.rise_bytes + used_bytes - heap.used_bytes()


def _summary(row: Row) -> dict[str, Any]:
    """Join the ranks: the slowest one's times, the largest counters and peaks, the mean loss. Called on every rank."""
    step_s = [sum(parts) for parts in zip(row.backward_s, row.optimizer_s, strict=True)]
    own = row.strategy.steps
    if own is not None:
        step_s = [statistics.fmean(step_s[first : first + own]) for first in range(0, len(step_s), own)]
    return {
        "step_ms": slowest_ms(step_s),
        "backward_ms": slowest_ms(row.backward_s),
        "optimizer_ms": slowest_ms(row.optimizer_s),
        "sent_bytes": max(on_all_ranks(statistics.median(row.sent_bytes))),
        "peak_bytes": max(on_all_ranks(row.peak_bytes)),
        "loss": statistics.fmean(on_all_ranks(row.loss)),
        **row.predicted,
    }


def _goodput(plan: dict[str, Any], rank: int) -> dict[str, float]:
    """Payload bytes per second over plain TCP, every rank sending to the next and receiving from the one before.

    This is how a ring collective loads the links. Three runs of about a second; the slowest rank counts.
    """
    addresses, bits_per_second = plan["addresses"], plan["bits_per_second"]
    chunk, buffer = bytes(1 << 20), bytearray(1 << 20)
    chunks = (bits_per_second // 8 if bits_per_second is not None else 1 << 29) // len(chunk)
    following = (rank + 1) % len(addresses)
    rates: list[float] = []
    with socket.create_server((addresses[rank], _GOODPUT_PORT + rank)) as server:
        dist.barrier()
        target = (addresses[following], _GOODPUT_PORT + following)
        with socket.create_connection(target) as sending, server.accept()[0] as receiving:
            for _ in range(3):
                dist.barrier()
                sender = threading.Thread(target=lambda: [sending.sendall(chunk) for _ in range(chunks)])
                start = time.perf_counter()
                sender.start()
                received = 0
                while received < chunks * len(chunk):
                    received += receiving.recv_into(buffer)
                rates.append(received / (time.perf_counter() - start))
                sender.join()
    return {"goodput_bytes_per_s": min(on_all_ranks(statistics.median(rates)))}


def _all_gather() -> dict[str, float]:
    """Bytes per second that a rank sends in a plain all_gather, and what the counter saw for each byte sent.

    gloo often stays far below TCP's goodput here and in all_to_all, down to one direction at a time: a rank that starts
    to send before its own receive is announced queues that announcement behind the data. Point-to-point calls that post
    the receive first fill both directions.
    """
    shard = torch.ones(2 << 20)
    gathered = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    payload_bytes = shard.nbytes * (len(gathered) - 1)
    rates, sent = list[float](), list[int]()
    for _ in range(5):
        dist.barrier()
        sent_before, start = netns.transmitted_bytes(), time.perf_counter()
        dist.all_gather(gathered, shard)
        rates.append(payload_bytes / (time.perf_counter() - start))
        dist.barrier()
        sent.append(netns.transmitted_bytes() - sent_before)
    return {
        "all_gather_bytes_per_s": min(on_all_ranks(statistics.median(rates))),
        "all_gather_counted_per_payload_byte": max(on_all_ranks(statistics.median(sent) / payload_bytes)),
    }
