"""Pipeline schedules on two ranks: the step of each, measured and predicted, over stages of zgraph's and of torch's.

    python examples/benchmarks/pipeline_schedules.py --json FILE        # a quarter of an hour

Each rank has a core, and half of the blocks of a transformer: in one chunk, or in two. zgraph's stages are compiled
whole, and `zgraph.PipelineStage` splits their backwards where a schedule wants the gradients of inputs first. torch's
stages are compiled too, but for the schedules without bubble, which refuse compiled modules. There is no data
parallelism: what differs is the bubble. All ways live in the same processes and take turns; each step ends with its
backwards, and gradients are compared.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import commit, processor
from rank_process import WARM_UP_STEPS, on_all_ranks, say
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.multiprocessing.spawn import spawn
from workload import SEED, Block, ModelConfig

import zgraph

RANKS = 2
CPU = torch.device("cpu")
# Of each way: whose stages, and torch's name of the schedule.
WAYS = (
    ("torch", "1F1B"),
    ("zgraph", "1F1B"),
    ("torch", "Interleaved1F1B"),
    ("zgraph", "Interleaved1F1B"),
    ("torch, not compiled", "Interleaved1F1B"),
    ("torch, not compiled", "InterleavedZeroBubble"),
    ("torch, not compiled", "ZBVZeroBubble"),
    ("zgraph", "InterleavedZeroBubble"),
    ("zgraph", "ZBVZeroBubble"),
)
GRADIENT_TOLERANCE = 1e-4  # of sums in another order


@dataclass
class Way:
    """One schedule over the stages of one library, on this rank."""

    stages: str
    schedule: str
    runner: Any
    numbers: list[int]
    modules: list[nn.Module]
    has_first: bool
    has_last: bool
    ms: list[float] = field(default_factory=list[float])

    def gradients(self) -> dict[str, float]:
        """Norm of each gradient, by the number of the block and the name of the parameter."""
        norms: dict[str, float] = {}
        for number, module in zip(self.numbers, self.modules, strict=True):
            blocks = list(module.children())
            for place, block in enumerate(blocks, number * len(blocks)):
                for name, parameter in block.named_parameters():
                    assert parameter.grad is not None
                    norms[f"{place}.{name}"] = parameter.grad.norm().item()
        return norms


def blocks_of(config: ModelConfig) -> list[nn.Module]:
    torch.manual_seed(SEED)
    return [Block(config) for _ in range(config.layers)]


def chunks_of(config: ModelConfig, schedule: str) -> list[nn.Module]:
    """The model in as many chunks as the schedule has stages."""
    count = RANKS if schedule == "1F1B" else 2 * RANKS
    blocks, size = blocks_of(config), config.layers // count
    return [nn.Sequential(*blocks[size * number : size * (number + 1)]) for number in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def build(stages: str, schedule: str, config: ModelConfig, micro_batches: int) -> Way:
    """Build a way and take its warm-up steps, which compile."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    rank, chunks = mesh.get_local_rank("pp"), chunks_of(config, schedule)
    last = len(chunks) - 1
    numbers = [rank, last - rank] if schedule == "ZBVZeroBubble" else [*range(rank, last + 1, RANKS)]
    modules = [chunks[number] for number in numbers]
    made: list[Any] = []
    for number, module in zip(numbers, modules, strict=True):
        if stages == "zgraph":
            called = torch.compile(zgraph.shard(module, mesh["dp"], zero_stage=0), backend="zgraph")
            kind: Any = zgraph.PipelineStage
        else:
            called = module if stages == "torch, not compiled" else torch.compile(module)
            kind = pipelining.PipelineStage
        made.append(kind(called, number, last + 1, CPU, group=mesh.get_group("pp")))
    make: Any = get_schedule_class(schedule)
    runner = make(made if issubclass(make, PipelineScheduleMulti) else made[0], micro_batches, loss_fn=loss_of)
    way = Way(stages, schedule, runner, numbers, modules, has_first=0 in numbers, has_last=last in numbers)
    for step in range(WARM_UP_STEPS):
        run_step(way, config, micro_batches, step)
    return way


def run_step(way: Way, config: ModelConfig, micro_batches: int, step: int) -> float:
    """One step without an update; returns its milliseconds."""
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (2, micro_batches * config.batch, config.sequence, config.width)
    x, target = torch.randn(shape, generator=generator)
    for module in way.modules:
        module.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    way.runner.step(*((x,) if way.has_first else ()), **({"target": target} if way.has_last else {}))
    return 1e3 * (time.perf_counter() - begin)


def predicted_ms(config: ModelConfig, schedule: str, micro_batches: int, hardware: zgraph.Hardware) -> float:
    """What zgraph expects of a schedule's step, from the costs of its compiled stages on this machine."""
    pipeline = zgraph.PassList(
        zgraph.passes.presets.default(), target=zgraph.Target(hardware=hardware, time_kernels=True)
    )
    plan = zgraph.plan_pipeline(
        lambda: chunks_of(config, schedule),
        world={"pp": RANKS},
        batch=lambda: (torch.zeros(config.batch, config.sequence, config.width),),
        micro_batches=micro_batches,
        schedule=schedule,
        hardware=hardware,
        passes=pipeline,
    )
    return 1e-3 * plan.step_us


def run_rank(rank: int, arguments: argparse.Namespace, meeting_point: str, result: Path) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})  # threads that start later inherit it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.compiler.config.recompile_limit = 64
    torch.compiler.config.fail_on_recompile_limit_hit = True
    warnings.filterwarnings("ignore", message="zgraph: .* nothing is sharded")
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=RANKS)
    hardware = zgraph.calibrate(cache=result.parent)
    ways: list[Way] = []
    for stages, schedule in WAYS:
        say(rank, f"building {schedule}, {stages}")
        ways.append(build(stages, schedule, arguments.model, arguments.micro_batches))
    for repeat in range(arguments.repeats):
        say(rank, f"repetition {repeat + 1} of {arguments.repeats}")
        for way in ways:
            for step in range(arguments.steps):
                way.ms.append(run_step(way, arguments.model, arguments.micro_batches, step))
    rows: list[dict[str, Any]] = []
    for way in ways:
        ms = [max(both) for both in zip(*on_all_ranks(way.ms), strict=True)]
        gradients = {name: norm for part in on_all_ranks(way.gradients()) for name, norm in part.items()}
        rows.append({"stages": way.stages, "schedule": way.schedule, "step_ms": ms, "gradients": gradients})
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        predicted = {
            schedule: predicted_ms(arguments.model, schedule, arguments.micro_batches, hardware)
            for schedule in dict.fromkeys(schedule for _, schedule in WAYS)
        }
        result.write_text(json.dumps({"rows": rows, "predicted_ms": predicted}))


def main() -> int:
    arguments = parse_arguments()
    measured_commit = commit()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        spawn(run_rank, (arguments, f"file://{folder}/store", result), nprocs=RANKS, join=True)
        measured = json.loads(result.read_text())
    failures = summarize(measured["rows"])
    report = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": measured_commit,
        "model": asdict(arguments.model),
        "micro_batches": arguments.micro_batches,
        "versions": {"torch": torch.__version__},
        **measured,
        "failures": failures,
    }
    print(render(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failures else 0


def summarize(rows: list[dict[str, Any]]) -> list[str]:
    """Replace samples by medians and quartiles beside them; a line for each way with other gradients than the first."""
    failures: list[str] = []
    first = rows[0]["gradients"]
    for row in rows:
        low, median, high = statistics.quantiles(row["step_ms"], n=4, method="inclusive")
        row |= {"step_ms_low": low, "step_ms_median": median, "step_ms_high": high}
        found = row.pop("gradients")
        worst = max(abs(found[name] - norm) / norm for name, norm in first.items())
        if found.keys() != first.keys() or worst > GRADIENT_TOLERANCE:
            failures.append(f"{row['schedule']}, {row['stages']}: gradients differ by {worst:.1e}")
    return failures


def render(report: dict[str, Any]) -> str:
    config = report["model"]
    lines = [
        f"{config['layers']} blocks of width {config['width']} on {RANKS} ranks, {report['micro_batches']} "
        f"micro-batches of {config['batch']} x {config['sequence']}, fp32, torch {report['versions']['torch']}",
        f"{'schedule':<24} {'stages':<20} {'step ms':>8} {'quartiles':>12} {'predicted':>10}",
    ]
    for row in report["rows"]:
        quartiles = f"{row['step_ms_low']:.0f}-{row['step_ms_high']:.0f}"
        predicted = f"{report['predicted_ms'][row['schedule']]:.0f}" if row["stages"] == "zgraph" else ""
        lines.append(
            f"{row['schedule']:<24} {row['stages']:<20} {row['step_ms_median']:>8.0f} {quartiles:>12} {predicted:>10}"
        )
    return "\n".join([*lines, *(f"FAILED: {failure}" for failure in report["failures"])])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    usual = ModelConfig(width=512, layers=8, heads=8, sequence=128, batch=2)
    for name in ("width", "layers", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name), help="default: %(default)s")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each way (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured here")
    arguments = parser.parse_args()
    if arguments.layers % (2 * RANKS):
        parser.error(f"--layers {arguments.layers}: blocks must fill {2 * RANKS} chunks; take a multiple of that")
    arguments.model = replace(
        usual,
        **{name: getattr(arguments, name) for name in ("width", "layers", "sequence", "batch")},
    )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
