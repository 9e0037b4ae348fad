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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from link_benchmark import (
    add_arguments,
    compare_rows,
    faster_lines,
    find_unequal_losses,
    parse,
    positive,
    run_as_command,
    run_ranks,
    setting_of,
)
from netns import ShapedNetwork, parse_rate
from pipeline_ranks import EQUAL_LOSSES, STRATEGIES, PipelinePlan
from provenance import commit
from step_timeline import chrome_trace, phases, picture
from workload import ModelConfig

RANKS, HOSTS = 4, 2
LOSSY_PEERS = ("ddp", "ddp-bf16", "ddp-powersgd-4")
PEERS = {
    "zgraph-0": ("ddp", "ddp-blocks"),
    "zgraph-0-reduce-bf16": ("ddp", "ddp-bf16"),
    "zgraph-0-loco": LOSSY_PEERS,
    "zgraph-0-loco-means4": LOSSY_PEERS,
    "zgraph-0-lowrank4": LOSSY_PEERS,
}


def main() -> int:
    return run_as_command("pipeline_link", parse_arguments(), run, render)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the network, run the ranks in it, and add medians and ratios to what they measured."""
    measured_commit = commit()  # before the run: it takes minutes, in which a checkout may go on
    with ShapedNetwork(HOSTS, arguments.rate) as network:
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
            timeline=arguments.timeline is not None,
        )
        measured = run_ranks(network, "pipeline_ranks.py", plan, host_of)
    rows: dict[str, Any] = {name: measured["strategies"][name] for name in arguments.strategies}
    link_bytes_per_s = (parse_rate(arguments.rate) or 8 * measured["link"]["goodput_bytes_per_s"]) / 8
    timelines = add_timelines(rows, host_of, link_bytes_per_s, arguments.timeline) if arguments.timeline else {}
    compare_rows(rows, PEERS, arguments.steps)
    return {
        "rate": arguments.rate,
        "across": arguments.across,
        "ranks": RANKS,
        "nodes": HOSTS,
        "micro_batches": arguments.micro_batches,
        **setting_of(arguments, measured_commit),
        "link": measured["link"],
        "rows": rows,
        "timelines": timelines,
        "failures": find_unequal_losses(rows, EQUAL_LOSSES),
    }


def add_timelines(
    rows: dict[str, Any], host_of: Sequence[int], link_bytes_per_s: float, path: Path
) -> dict[str, list[str]]:
    """Write the recorded steps as a Chrome trace, add their phases to the rows, and draw each step."""
    steps = {name: row.pop("timeline") for name, row in rows.items()}
    titles = [f"stage {rank // 2}, host {host}" for rank, host in enumerate(host_of)]
    path.write_text(json.dumps(chrome_trace(steps, titles)))
    for name, row in rows.items():
        row["phases"] = phases(steps[name])
    return {name: picture(ranks, titles, link_bytes_per_s) for name, ranks in steps.items()}


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
    lines += [
        "",
        *faster_lines(report["rows"]),
        "",
        "Sent is what a host's link sends in a step. Last backward: of the last micro-batch, on the slowest rank,",
        "with the reduction of gradients.",
        f"{RANKS} ranks share {report['cores']} cores: compute and communication compete for them.",
    ]
    for name, drawn in report["timelines"].items():
        lines += ["", f"{name}: {drawn[0]}", *drawn[1:]]
    if report["timelines"]:
        lines += [
            "",
            "Digits are forwards of micro-batches, letters their backwards, U updates. Below them: how much of the",
            "link's rate a rank sends.",
            f"{'':<22} " + " ".join(f"{name[:-3]:>18}" for name in next(iter(report["rows"].values()))["phases"]),
            *(
                f"{name:<22} " + " ".join(f"{value:>18.0f}" for value in row["phases"].values())
                for name, row in report["rows"].items()
            ),
        ]
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=f"strategies: {', '.join(STRATEGIES)}",
    )
    parser.add_argument("--across", choices=("dp", "pp"), default="dp", help="default: %(default)s")
    parser.add_argument("--micro-batches", type=positive, default=4, help="of a step (default: %(default)s)")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="record one step of each strategy as a Chrome trace"
    )
    add_arguments(parser, steps=2, strategies="all", usual=ModelConfig(width=512, layers=10))
    arguments = parse(parser)
    arguments.strategies = arguments.strategies or list(STRATEGIES)
    for name in arguments.strategies:
        if name not in STRATEGIES:
            parser.error(f"strategy {name!r} is unknown; choose from {', '.join(STRATEGIES)}")
    if arguments.micro_batches < 2 or arguments.layers < 2:
        parser.error("a pipeline of two stages needs two layers and two micro-batches")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
