"""What benchmarks of links share: they start ranks in network namespaces, wait for them, and compare their times."""

import argparse
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from netns import INTERFACE, NetworkError, ShapedNetwork, parse_rate
from provenance import processor
from rank_process import RankPlan
from workload import LanguageModel, ModelConfig

# Inductor orders sums otherwise where collectives are part of a graph.
LOSS_TOLERANCE = 1e-5


class BenchmarkError(RuntimeError):
    """The benchmark cannot run, or a rank ended early; the message says why."""


def run_as_command(
    name: str,
    arguments: argparse.Namespace,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> int:
    """Run a benchmark, print its report, and write it where `--json` says; the exit status."""
    # A plain kill cleans up as Ctrl-C does, and Ctrl-C also where a shell had a background job ignore it.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        report = run(arguments)
    except (NetworkError, BenchmarkError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted; namespaces and ranks are gone", file=sys.stderr)
        return 130
    print(render(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["failures"] else 0


def run_ranks(
    network: ShapedNetwork,
    script: str,
    plan: RankPlan,
    hosts: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a script of this folder on each rank, and return what rank 0 has measured.

    Args:
        network: has the hosts.
        script: is given the rank, and the paths of the plan and of the result.
        plan: for all ranks.
        hosts: of each rank.
        environment: more variables for the ranks.

    Raises:
        BenchmarkError: a rank failed.
    """
    # The log level silences the store's complaint that a namespace has no names for its addresses.
    variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables |= environment or {}
    with tempfile.TemporaryDirectory() as directory:
        plan_path, result_path = Path(directory) / "plan.json", Path(directory) / "result.json"
        plan_path.write_text(plan.to_json())
        path = str(Path(__file__).with_name(script))
        _wait_for_all(
            [
                network.popen(host, [sys.executable, path, str(rank), str(plan_path), str(result_path)], variables)
                for rank, host in enumerate(hosts)
            ]
        )
        return json.loads(result_path.read_text())


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until every rank has ended well; the first that does not ends the wait, for its peers would hang."""
    running = True
    while running:
        time.sleep(0.1)
        states = [process.poll() for process in processes]
        for rank, state in enumerate(states):
            if state == -signal.SIGKILL:
                raise BenchmarkError(f"rank {rank} was killed, probably for memory; choose fewer strategies or layers")
            if state not in (None, 0):
                raise BenchmarkError(f"rank {rank} ended with status {state}; its error stands above")
        running = None in states


def setting_of(arguments: argparse.Namespace, commit: str | None) -> dict[str, Any]:
    """What a report says of the machine and of what ran on it."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit,
        "model": asdict(arguments.model),
        "parameters": _count_parameters(arguments.model),
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()},
    }


def add_quartiles(row: dict[str, Any]) -> None:
    """Add the median of a row's step times, and the quartiles around it."""
    row["step_ms_low"], row["step_ms_median"], row["step_ms_high"] = statistics.quantiles(
        row["step_ms"], n=4, method="inclusive"
    )


def times_faster(step_ms: Sequence[float], peer_ms: Sequence[float], steps: int) -> tuple[float, float, float]:
    """How many times a peer's step takes, with a 95 % interval of the median: a bootstrap over turns, in pairs."""
    ratios = [
        statistics.median(peer_ms[first : first + steps]) / statistics.median(step_ms[first : first + steps])
        for first in range(0, len(step_ms), steps)
    ]
    chance = random.Random(0)
    drawn = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), drawn[50], drawn[-51]


def compare_rows(rows: Mapping[str, dict[str, Any]], peers: Mapping[str, Sequence[str]], steps: int) -> None:
    """Add medians to all rows, and how many times as fast as its peers each one is."""
    for name, row in rows.items():
        add_quartiles(row)
        row["times_faster"] = {
            peer: times_faster(row["step_ms"], rows[peer]["step_ms"], steps)
            for peer in peers.get(name, ())
            if peer in rows
        }


def faster_lines(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for each peer of each row."""
    return [
        f"{name} is {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast as {peer}"
        for name, row in rows.items()
        for peer, (ratio, low, high) in row["times_faster"].items()
    ]


def find_unequal_losses(rows: Mapping[str, dict[str, Any]], equal: Iterable[str]) -> list[str]:
    """A line for each of the strategies that are not lossy whose loss is not that of the first."""
    found = {name: rows[name]["loss"] for name in equal if name in rows}
    first = next(iter(found), None)
    return [
        f"{name} ends with the loss {loss!r}, {first} with {found[first]!r}; they are equal within {LOSS_TOLERANCE}"
        for name, loss in found.items()
        if first is not None and not math.isclose(loss, found[first], rel_tol=LOSS_TOLERANCE)
    ]


def add_arguments(parser: argparse.ArgumentParser, *, steps: int, strategies: str, usual: ModelConfig) -> None:
    """Add what all of them take.

    Args:
        parser: of a benchmark.
        steps: usual number of timed steps in a turn.
        strategies: what is taken where none are named, in words.
        usual: the usual model.
    """
    parser.add_argument(
        "--rate",
        type=_rate,
        default="1gbit",
        help="of each link and direction: 200mbit, 1gbit, ...; none: unshaped (default: %(default)s)",
    )
    parser.add_argument("--steps", type=positive, default=steps, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of each strategy (default: %(default)s)")
    parser.add_argument(
        "--strategies", type=lambda text: text.split(","), metavar="A,B,C", help=f"default: {strategies}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured, each sample, here")
    sizes = parser.add_argument_group("model, and one batch of a rank")
    for size in fields(ModelConfig):
        sizes.add_argument(
            f"--{size.name}", type=positive, default=getattr(usual, size.name), help="default: %(default)s"
        )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse what `add_arguments` has added, with the model in `model`."""
    arguments = parser.parse_args()
    if arguments.steps * arguments.repeats < 2:
        parser.error("a median and its spread need at least two timed steps")
    try:
        arguments.model = ModelConfig(**{size.name: getattr(arguments, size.name) for size in fields(ModelConfig)})
    except ValueError as error:
        parser.error(str(error))
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _rate(text: str) -> str:
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())
