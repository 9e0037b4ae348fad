"""Train a pipeline of two stages, each on two data-parallel ranks, over two hosts with a link of a known rate.

    sudo .venv/bin/python examples/benchmarks/pipeline_link.py --rate 1gbit --json results.json

Four ranks on two hosts. With `--across dp` each host has both stages, and gradients are reduced between hosts; with
`--across pp` each host has one stage, and activations travel between them. Stages are compiled by Inductor, run under
torch's 1F1B schedule, and differ in what reduces their gradients: DistributedDataParallel around a stage, with its
hooks, or zgraph. All strategies live in the same processes and take turns. Exits with 1 when losses that should be
equal differ.
"""

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from netns import INTERFACE, NetworkError, ShapedNetwork, parse_rate
from pipeline_ranks import EQUAL_LOSSES, STRATEGIES, PipelinePlan
from provenance import commit, processor
from shaped_link import (
    BenchmarkError,
    count_parameters,
    interrupt,
    positive,
    rate,
    times_faster,
    wait_for_all,
)
from workload import ModelConfig

RANKS, HOSTS = 4, 2
# Inductor orders the sums of one stage otherwise where reductions are part of its graph.
LOSS_TOLERANCE = 1e-5
LOSSY_PEERS = ("ddp", "ddp-bf16", "ddp-powersgd-4")
PEERS = {
    "zgraph-0": ("ddp", "ddp-blocks"),
    "zgraph-0-reduce-bf16": ("ddp", "ddp-bf16"),
    "zgraph-0-loco": LOSSY_PEERS,
    "zgraph-0-loco-means4": LOSSY_PEERS,
    "zgraph-0-lowrank4": LOSSY_PEERS,
}


def main() -> int:
    arguments = parse_arguments()
    # A plain kill cleans up as Ctrl-C does, and Ctrl-C also where a shell had a background job ignore it.
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        report = run(arguments)
    except (NetworkError, BenchmarkError) as error:
        print(f"pipeline_link: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pipeline_link: interrupted; namespaces and ranks are gone", file=sys.stderr)
        return 130
    print(render(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["failures"] else 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the network, run the ranks in it, and add medians and ratios to what they measured."""
    measured_commit = commit()  # before the run: it takes minutes, in which a checkout may go on
    with tempfile.TemporaryDirectory() as directory, ShapedNetwork(HOSTS, arguments.rate) as network:
        # Rank r has stage r // 2 and the data-parallel rank r % 2.
        host_of = [rank % 2 if arguments.across == "dp" else rank // 2 for rank in range(RANKS)]
        plan = PipelinePlan(
            addresses=[network.address(host) for host in host_of],
            hosts=host_of,
            bits_per_second=parse_rate(arguments.rate),
            model=arguments.model,
            micro_batches=arguments.micro_batches,
            strategies=arguments.strategies,
            steps=arguments.steps,
            repeats=arguments.repeats,
        )
        plan_path, result_path = Path(directory) / "plan.json", Path(directory) / "result.json"
        plan_path.write_text(plan.to_json())
        script = Path(__file__).with_name("pipeline_ranks.py")
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        wait_for_all(
            [
                network.popen(
                    host_of[rank],
                    [sys.executable, str(script), str(rank), str(plan_path), str(result_path)],
                    environment,
                )
                for rank in range(RANKS)
            ]
        )
        measured = json.loads(result_path.read_text())
    rows: dict[str, Any] = {}
    for name in arguments.strategies:
        row = measured["strategies"][name]
        low, middle, high = statistics.quantiles(row["step_ms"], n=4, method="inclusive")
        rows[name] = row | {"step_ms_low": low, "step_ms_median": middle, "step_ms_high": high}
    for name, row in rows.items():
        row["times_faster"] = {
            peer: times_faster(row["step_ms"], rows[peer]["step_ms"], arguments.steps)
            for peer in PEERS.get(name, ())
            if peer in rows
        }
    return {
        "rate": arguments.rate,
        "across": arguments.across,
        "ranks": RANKS,
        "nodes": HOSTS,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": measured_commit,
        "model": asdict(arguments.model),
        "micro_batches": arguments.micro_batches,
        "parameters": count_parameters(arguments.model),
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()},
        "link": measured["link"],
        "rows": rows,
        "failures": find_failures(rows),
    }


def find_failures(rows: dict[str, Any]) -> list[str]:
    """One line for each strategy that is not lossy and whose loss is not that of the others."""
    found = {name: rows[name]["loss"] for name in EQUAL_LOSSES if name in rows}
    first = next(iter(found), None)
    return [
        f"{name} ends with the loss {loss!r}, {first} with {found[first]!r}; they are equal within {LOSS_TOLERANCE}"
        for name, loss in found.items()
        if first is not None and not math.isclose(loss, found[first], rel_tol=LOSS_TOLERANCE)
    ]


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"pp 2 x dp 2 on 2 hosts, {report['across']} across them at {report['rate']}, {report['cores']} cores, "
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['micro_batches']} micro-batches, "
        f"torch {report['versions']['torch']}",
        f"TCP goodput {report['link']['goodput_bytes_per_s'] / 1e6:.1f} MB/s",
        "",
        f"{'strategy':<22} {'step ms':>8} {'quartiles':>15} {'last backward ms':>17} {'sent MB':>8} {'loss':>8}",
    ]
    for name, row in report["rows"].items():
        quartiles = f"{row['step_ms_low']:.0f}-{row['step_ms_high']:.0f}"
        lines.append(
            f"{name:<22} {row['step_ms_median']:>8.0f} {quartiles:>15} {row['last_backward_ms']:>17.0f} "
            f"{row['sent_bytes'] / 1e6:>8.2f} {row['loss']:>8.4f}"
        )
    lines.append("")
    for name, row in report["rows"].items():
        for peer, (ratio, low, high) in row["times_faster"].items():
            lines.append(f"{name} is {ratio:.2f} [{low:.2f}, {high:.2f}] times as fast as {peer}")
    lines += [
        "",
        "Sent is what a host's link sends in a step. Last backward: of the last micro-batch, on the slowest rank,",
        "with the reduction of gradients.",
        f"{RANKS} ranks share {report['cores']} cores: compute and communication compete for them.",
    ]
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=f"strategies: {', '.join(STRATEGIES)}",
    )
    parser.add_argument("--across", choices=("dp", "pp"), default="dp", help="default: %(default)s")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of each link and direction (default: %(default)s)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=2, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of each strategy (default: %(default)s)")
    parser.add_argument("--strategies", type=lambda text: text.split(","), metavar="A,B,C", default=list(STRATEGIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured, each sample, here")
    sizes = parser.add_argument_group("model, and one micro-batch")
    usual = ModelConfig(width=512, layers=10)
    for size in fields(ModelConfig):
        sizes.add_argument(
            f"--{size.name}", type=positive, default=getattr(usual, size.name), help="default: %(default)s"
        )
    arguments = parser.parse_args()
    for name in arguments.strategies:
        if name not in STRATEGIES:
            parser.error(f"strategy {name!r} is unknown; choose from {', '.join(STRATEGIES)}")
    if arguments.steps * arguments.repeats < 2:
        parser.error("a median and its spread need at least two timed steps")
    if arguments.micro_batches < 2 or arguments.layers < 2:
        parser.error("a pipeline of two stages needs two layers and two micro-batches")
    try:
        arguments.model = ModelConfig(**{size.name: getattr(arguments, size.name) for size in fields(ModelConfig)})
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
