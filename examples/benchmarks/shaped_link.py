"""Train one model in many ways over links of a known rate, and hold each against the floor it cannot go below.

    sudo .venv/bin/python examples/benchmarks/shaped_link.py --ranks 2 --rate 1gbit --json results.json

Every rank, or with --nodes every two of them, runs in a network namespace of its own with one core and one thread a
rank, gloo, and one Ethernet link whose both directions are shaped. The floor of a strategy is the larger of two times:
its arithmetic alone, without a network, and the bytes its formula has it send divided by what plain TCP carries over
the same link. Exits with 1 when a strategy that promises to stay within its formula sent more, or when losses that
should be equal differ.
"""

import argparse
import importlib.util
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from link_benchmark import (
    BenchmarkError,
    add_arguments,
    add_quartiles,
    faster_lines,
    parse,
    run_as_command,
    run_ranks,
    setting_of,
    times_faster,
)
from netns import FRAME_BYTES, TCP_PAYLOAD_BYTES, ShapedNetwork, parse_rate
from provenance import commit
from rank_process import Plan
from strategies import Strategy, strategies
from workload import ModelConfig

# Equal operators in equal order are equal in every bit; Inductor fuses otherwise where collectives lie elsewhere.
LOSS_TOLERANCE = {"fx": 0.0, "inductor": 1e-6}
_EPILOG = f"""\
strategies, in the order in which a repetition runs them:
  compute-*         the arithmetic of a step on every rank at once, nothing sent: eager, with blocks compiled by
                    aot_eager, with everything compiled by zgraph; fp32 unless the name ends in bf16
  ddp               DistributedDataParallel; -fp16, -bf16, -powersgd-1 and -4 with the hook of that name (and rank)
  deepspeed-2, -3   ZeRO stages 2 and 3 (pip install deepspeed; left out where it is not installed)
  fsdp2             fully_shard of each block and of the rest; -bf16 gathers bf16 and reduces fp32; -compiled compiles
                    the blocks with aot_eager; with --lowering inductor fsdp2 compiles them with Inductor
  simplefsdp        SimpleFSDP's graph under the lowering of the zgraph rows: a gather for each parameter, a
                    reduce_scatter for each gradient; -overlap bucketed and scheduled by PyTorch's
                    schedule_overlap_bucketing, which is told what things cost here
  torch-overlap     the same scheduler on zgraph's own collectives, which send half of what gloo's reduce_scatter does
  zgraph-0 ... -3   ZeRO stages 0 to 3, planned for the measured machine and compiled as --lowering says, the
                    optimizer with zgraph.step_on_shards; -bf16 gathers bf16, sends bf16 gradients and sums
                    them in fp32; -reduce-bf16 computes in fp32 and sends gradients and their means in bf16; -rules is
                    scheduled without costs; -step runs forward, backward and optimizer as one graph; -eager is not
                    compiled: the reference, not a way to train; -loco sends gradients as codes of 4 bits, and means of
                    replicated parameters in bf16, or with -means8 and -means4 in 8 and 4 bits; -lowrank1 and -lowrank4
                    send factors of that rank
a strategy brings the compute-* row of its floor along.

columns:
  step ms           median over all timed steps of the slowest rank, and the quartiles around it
  floor ms, x       max(compute alone, formula / goodput), and the step as a multiple of it; where the optimizer is
                    sharded, compute alone counts 1/ranks of the optimizer's time
  exposed ms        what forward and backward take longer than compute alone: measured, and as zgraph predicted when it
                    compiled
  error             of the time that zgraph predicted for forward and backward
  formula MB        payload a rank sends per step when every collective moves a ring's volume, at the dtype on the wire;
                    P bytes of parameters on N ranks: an all_reduce 2P(N-1)/N, stage 3 gathers twice and reduces once,
                    3P(N-1)/N (a little can be saved: backward does not read the embeddings). With --nodes it is what
                    has to leave a node, the same with nodes for ranks
  sent MB, x        the interface's tx_bytes per step, and as a multiple of the formula; whole packets count, with
                    acknowledgements and one Ethernet, IP and TCP header per packet of up to 64 KiB (a wire adds
                    {FRAME_BYTES / TCP_PAYLOAD_BYTES - 1:.1%} of headers; the shaped rate does account for those)
  peak MiB          most bytes held at once in a step that is not timed, with what the strategy keeps between steps:
                    the C heap's own count, which is tensors and communication buffers
  loss              of the last step, mean over the ranks; equal data, seeds and number of steps for all

examples:
  sudo .venv/bin/python examples/benchmarks/shaped_link.py
  sudo .venv/bin/python examples/benchmarks/shaped_link.py --ranks 4 --rate 200mbit --strategies ddp,fsdp2,zgraph-3
"""


def main() -> int:
    return run_as_command("shaped_link", _parse_arguments(), run, render)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build the network, run the ranks in it, and join what they measured with the floors."""
    chosen = choose_strategies(arguments.strategies)
    measured_commit = commit()  # before the run: it takes minutes, in which a checkout may go on
    with ShapedNetwork(arguments.nodes, arguments.rate) as network:
        node_of = [rank * arguments.nodes // arguments.ranks for rank in range(arguments.ranks)]
        plan = Plan(
            addresses=[network.address(node) for node in node_of],
            bits_per_second=parse_rate(arguments.rate),
            model=arguments.model,
            strategies=[strategy.name for strategy in chosen],
            steps=arguments.steps,
            repeats=arguments.repeats,
            lowering=arguments.lowering,
        )
        # DeepSpeed is told that each rank is alone on its host, or it would go through shared memory.
        alone = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
        measured = run_ranks(network, "rank_process.py", plan, node_of, alone)
    rows = add_floors(chosen, measured["strategies"], measured["link"]["goodput_bytes_per_s"], arguments.ranks)
    for strategy in chosen:
        turns = {name: rows[name]["step_ms"] for name in strategy.peers if name in rows}
        rows[strategy.name]["times_faster"] = {
            name: times_faster(rows[strategy.name]["step_ms"], peer, arguments.steps) for name, peer in turns.items()
        }
    return {
        "rate": arguments.rate,
        "ranks": arguments.ranks,
        "nodes": arguments.nodes,
        "lowering": arguments.lowering,
        "steps_in_all": plan.steps_in_all,
        **setting_of(arguments, measured_commit),
        "link": measured["link"],
        "rows": rows,
        # Inside a node bytes are free, and a flat collective may send more than the least between nodes.
        "failures": find_failures(
            chosen,
            rows,
            tolerance=LOSS_TOLERANCE[arguments.lowering],
            promised_bytes=arguments.nodes == arguments.ranks,
        ),
    }


def choose_strategies(names: Sequence[str] | None) -> list[Strategy]:
    """The named strategies and the compute-alone rows of their floors, in the table's order; all when None.

    Raises:
        BenchmarkError: a name is unknown, or asks for zgraph where it is not installed.
    """
    table = strategies()
    missing = {module for module in ("zgraph", "deepspeed") if importlib.util.find_spec(module) is None}
    if names is None:
        names = [name for name, strategy in table.items() if strategy.needs not in missing]
        for module in sorted(missing):
            print(f"{module} is not installed: its strategies are left out", file=sys.stderr)
    for name in names:
        if name not in table:
            raise BenchmarkError(f"strategy {name!r} is unknown; choose from {', '.join(table)}")
        if table[name].needs in missing:
            raise BenchmarkError(f"strategy {name!r} needs {table[name].needs}, which is not installed")
    wanted = {*names, *(table[name].compute for name in names)}
    return [strategy for name, strategy in table.items() if name in wanted]


def add_floors(
    chosen: Sequence[Strategy], measured: dict[str, dict[str, Any]], goodput_bytes_per_s: float, ranks: int
) -> dict[str, dict[str, Any]]:
    """The measured rows with their medians, quartiles, floors and ratios."""
    rows: dict[str, dict[str, Any]] = {}
    for strategy in chosen:
        row = measured[strategy.name]
        add_quartiles(row)
        if strategy.compute is not None:
            alone = measured[strategy.compute]
            # What the other ranks update of a sharded model is no part of this rank's arithmetic.
            elsewhere = 1 - 1 / ranks if strategy.shards_optimizer else 0.0
            compute_ms = statistics.median(alone["step_ms"]) - elsewhere * statistics.median(alone["optimizer_ms"])
            send_ms = 1e3 * row["payload_bytes"] / goodput_bytes_per_s
            floor_ms = max(compute_ms, send_ms)
            row |= {
                "compute_ms": compute_ms,
                "send_ms": send_ms,
                "floor_ms": floor_ms,
                "step_over_floor": row["step_ms_median"] / floor_ms,
                "sent_over_payload": row["sent_bytes"] / row["payload_bytes"],
                "exposed_ms": statistics.median(row["backward_ms"]) - statistics.median(alone["backward_ms"]),
            }
        if row["predictions"]:
            predicted_ms = sum(graph["step_ms"] for graph in row["predictions"])
            compute_ms = sum(graph["compute_ms"] for graph in row["predictions"])
            row |= {
                "predicted_ms": predicted_ms,
                "predicted_exposed_ms": predicted_ms - compute_ms,
                "prediction_error": predicted_ms / statistics.median(row["backward_ms"]) - 1,
            }
        rows[strategy.name] = row
    return rows


def find_failures(
    chosen: Sequence[Strategy], rows: dict[str, dict[str, Any]], *, tolerance: float, promised_bytes: bool
) -> list[str]:
    """One line per broken promise about losses, equal within a relative tolerance, and about bytes."""
    unequal = [
        f"{strategy.name} ends with the loss {rows[strategy.name]['loss']!r}, {strategy.equal_loss} with "
        f"{rows[strategy.equal_loss]['loss']!r}; they promise to be equal within {tolerance}"
        for strategy in chosen
        if strategy.equal_loss in rows
        and not math.isclose(rows[strategy.name]["loss"], rows[strategy.equal_loss]["loss"], rel_tol=tolerance)
    ]
    if not promised_bytes:
        return unequal
    return unequal + [
        f"{strategy.name} sent {rows[strategy.name]['sent_over_payload']:.3f} times its formula; "
        f"it promises at most {strategy.payload_limit}"
        for strategy in chosen
        if strategy.payload_limit is not None and rows[strategy.name]["sent_over_payload"] > strategy.payload_limit
    ]


def render(report: dict[str, Any]) -> str:
    """The report as text: the link, the table, what to know when reading it."""
    link, ranks = report["link"], report["ranks"]
    lines = [
        f"{ranks} ranks on {report['nodes']} nodes and {report['cores']} cores, links at {report['rate']}, "
        f"{report['parameters'] / 1e6:.1f} M parameters, torch {report['versions']['torch']}",
        f"TCP goodput {link['goodput_bytes_per_s'] / 1e6:.1f} MB/s; "
        f"plain all_gather sends {link['all_gather_bytes_per_s'] / 1e6:.1f} MB/s, "
        f"counted {link['all_gather_counted_per_payload_byte']:.3f} bytes per payload byte",
        "",
        f"{'strategy':<20} {'step ms':>8} {'quartiles':>15} {'floor ms':>9} {'x':>5} "
        f"{'exposed ms':>10} {'predicted':>9} {'error':>6} "
        f"{'formula MB':>11} {'sent MB':>8} {'x':>6} {'peak MiB':>9} {'loss':>8}",
    ]
    for name, row in report["rows"].items():
        quartiles = f"{row['step_ms_low']:.1f}-{row['step_ms_high']:.1f}"
        floor = ratio = payload = sent_ratio = loss = exposed = predicted = error = "-"
        if row["loss"] is not None:
            floor, ratio = f"{row['floor_ms']:.1f}", f"{row['step_over_floor']:.2f}"
            payload, sent_ratio = f"{row['payload_bytes'] / 1e6:.2f}", f"{row['sent_over_payload']:.3f}"
            loss, exposed = f"{row['loss']:.4f}", f"{row['exposed_ms']:.1f}"
        if "predicted_ms" in row:
            predicted, error = f"{row['predicted_exposed_ms']:.1f}", f"{row['prediction_error']:+.1%}"
        lines.append(
            f"{name:<20} {row['step_ms_median']:>8.1f} {quartiles:>15} {floor:>9} {ratio:>5} "
            f"{exposed:>10} {predicted:>9} {error:>6} "
            f"{payload:>11} {row['sent_bytes'] / 1e6:>8.2f} {sent_ratio:>6} "
            f"{row['peak_bytes'] / 2**20:>9.1f} {loss:>8}"
        )
    lines += [
        "",
        *faster_lines(report["rows"]),
        "",
        f"{report['repeats']} repetitions of {report['steps']} steps each, strategies in turn; loss after "
        f"{report['steps_in_all']} steps. Compute alone runs on all ranks at once.",
        "Sent is the interface's tx_bytes: payload, acknowledgements, one set of headers per packet of up to 64 KiB.",
        "Every row is compiled by Inductor: DDP whole, FSDP2 block by block, zgraph by its default lowering."
        if report["lowering"] == "inductor"
        else "Compiled rows use aot_eager (FSDP2) and the fx lowering (zgraph), not Inductor.",
    ]
    if ranks > report["cores"]:
        lines.append(f"{ranks} ranks share {report['cores']} cores: compute and communication compete for them.")
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="default: %(default)s")
    parser.add_argument(
        "--nodes", type=int, choices=(2, 4), help="hosts with a link of their own; default: one for each rank"
    )
    parser.add_argument(
        "--lowering",
        choices=("fx", "inductor"),
        default="fx",
        help="inductor: every row is compiled by it, minutes each; fx: graphs run node by node (default: %(default)s)",
    )
    add_arguments(parser, steps=4, strategies="all that are installed", usual=ModelConfig())
    arguments = parse(parser)
    arguments.nodes = arguments.nodes or arguments.ranks
    if arguments.nodes > arguments.ranks:
        parser.error(f"{arguments.ranks} ranks cannot be spread over {arguments.nodes} nodes")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
