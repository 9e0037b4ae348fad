"""Train a model whose layers are split inside of each of two hosts, over a link of a known rate.

    sudo .venv/bin/python examples/benchmarks/tensor_link.py --rate 1gbit --json results.json

Four ranks on two hosts: torch's tensor parallelism between the two ranks of a host, which one core computes, and data
parallelism across the link, by FSDP2 or by zgraph. All strategies live in the same processes and take turns. Exits with
1 when losses that should be equal differ.
"""

import argparse
import sys
from typing import Any

from link_benchmark import (
    add_arguments,
    compare_rows,
    faster_lines,
    find_unequal_losses,
    parse,
    run_as_command,
    run_ranks,
    setting_of,
)
from netns import ShapedNetwork, parse_rate
from provenance import commit
from tensor_ranks import EQUAL_LOSSES, STRATEGIES, TensorPlan
from workload import ModelConfig

HOST_OF = (0, 0, 1, 1)  # of each rank
HOSTS = 2
REPLICATED = ("fsdp2-zero2", "fsdp2-zero2-reduce-bf16")
PEERS = {
    "zgraph-3": ("fsdp2",),
    "zgraph-2": ("fsdp2-zero2",),
    "zgraph-2-reduce-bf16": REPLICATED,
    "zgraph-0": ("fsdp2-zero2",),
    "zgraph-0-loco": REPLICATED,
    "zgraph-0-loco-means4": REPLICATED,
}


def main() -> int:
    return run_as_command("tensor_link", parse_arguments(), run, render)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the network, run the ranks in it, and add medians and ratios to what they measured."""
    measured_commit = commit()  # before the run: it takes minutes, in which a checkout may go on
    with ShapedNetwork(HOSTS, arguments.rate) as network:
        plan = TensorPlan(
            addresses=[network.address(host) for host in HOST_OF],
            hosts=[*HOST_OF],
            bits_per_second=parse_rate(arguments.rate),
            model=arguments.model,
            strategies=arguments.strategies,
            steps=arguments.steps,
            repeats=arguments.repeats,
        )
        measured = run_ranks(network, "tensor_ranks.py", plan, HOST_OF)
    rows: dict[str, Any] = {name: measured["strategies"][name] for name in arguments.strategies}
    compare_rows(rows, PEERS, arguments.steps)
    return {
        "rate": arguments.rate,
        "ranks": len(HOST_OF),
        "nodes": HOSTS,
        **setting_of(arguments, measured_commit),
        "link": measured["link"],
        "rows": rows,
        "failures": find_unequal_losses(rows, EQUAL_LOSSES),
    }


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"tp 2 inside of each of 2 hosts, dp 2 across them at {report['rate']}, {report['cores']} cores, "
        f"{report['parameters'] / 1e6:.1f} M parameters, torch {report['versions']['torch']}",
        f"TCP goodput {report['link']['goodput_bytes_per_s'] / 1e6:.1f} MB/s",
        "",
        f"{'strategy':<24} {'step ms':>8} {'quartiles':>15} {'sent MB':>8} {'loss':>8}",
    ]
    for name, row in report["rows"].items():
        quartiles = f"{row['step_ms_low']:.0f}-{row['step_ms_high']:.0f}"
        lines.append(
            f"{name:<24} {row['step_ms_median']:>8.0f} {quartiles:>15} {row['sent_bytes'] / 1e6:>8.2f} "
            f"{row['loss']:>8.4f}"
        )
    lines += [
        "",
        *faster_lines(report["rows"]),
        "",
        "Sent is what a host's link sends in a step.",
        f"{len(HOST_OF)} ranks share {report['cores']} cores: compute and communication compete for them.",
    ]
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=f"strategies: {', '.join(STRATEGIES)}",
    )
    add_arguments(parser, steps=2, strategies="all", usual=ModelConfig(width=512, layers=10))
    arguments = parse(parser)
    arguments.strategies = arguments.strategies or list(STRATEGIES)
    for name in arguments.strategies:
        if name not in STRATEGIES:
            parser.error(f"strategy {name!r} is unknown; choose from {', '.join(STRATEGIES)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
