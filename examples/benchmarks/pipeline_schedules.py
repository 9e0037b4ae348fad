"""Pipeline schedules on two ranks: the step of each, measured and predicted, over stages of zgraph's and of torch's.

    python examples/benchmarks/pipeline_schedules.py --json FILE        # a quarter of an hour

Each rank has a core, and half of the blocks of a transformer: in one chunk, or in two. zgraph's stages are compiled
whole, and `zgraph.PipelineStage` splits their backwards where a schedule wants the gradients of inputs first. torch's
stages are compiled too, but for the schedules without bubble, which refuse compiled modules. There is no data
parallelism: what differs is the bubble. All ways live in the same processes and take turns; each step ends with its
backwards, and gradients are compared.
"""

import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from ranks import WARM_UP_STEPS, as_rank, on_all_ranks, run_ranks, say, slowest_ms
from record import about, parser_of, quartiles, save, spread, table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from workload import SEED, Block, ModelConfig

import zgraph

RANKS = 2
NOT_COMPILED = "torch, not compiled"
# Of each way: whose stages, and torch's name of the schedule.
WAYS = (
    ("torch", "1F1B"),
    ("zgraph", "1F1B"),
    ("torch", "Interleaved1F1B"),
    ("zgraph", "Interleaved1F1B"),
    (NOT_COMPILED, "Interleaved1F1B"),
    (NOT_COMPILED, "InterleavedZeroBubble"),
    (NOT_COMPILED, "ZBVZeroBubble"),
    ("zgraph", "InterleavedZeroBubble"),
    ("zgraph", "ZBVZeroBubble"),
)
GRADIENT_TOLERANCE = 1e-4  # of sums in another order
USUAL = ModelConfig(width=512, layers=8, heads=8, sequence=128, batch=2)


@dataclass
class Way:
    """One schedule over the stages of one library, on this rank."""

    runner: Any
    chunks: dict[int, nn.Module]  # by number
    has_last: bool
    s: list[float] = field(default_factory=list[float])

    def gradients(self) -> dict[str, float]:
        """Norm of each gradient, by the number of the block and the name of the parameter."""
        return {
            f"{place}.{name}": parameter.grad.norm().item()
            for number, module in self.chunks.items()
            for place, block in enumerate(module.children(), number * len(list(module.children())))
            for name, parameter in block.named_parameters()
            if parameter.grad is not None
        }


def chunks_of(config: ModelConfig, schedule: str) -> list[nn.Module]:
    """The model in as many chunks as the schedule has stages."""
    torch.manual_seed(SEED)
    blocks = [Block(config) for _ in range(config.layers)]
    count = RANKS if schedule == "1F1B" else 2 * RANKS
    size = config.layers // count
    return [nn.Sequential(*blocks[size * number : size * (number + 1)]) for number in range(count)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def build(stages: str, schedule: str, config: ModelConfig, micro_batches: int) -> Way:
    """Build a way and take its warm-up steps, which compile."""
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("pp", "dp"))
    rank, chunks = mesh.get_local_rank("pp"), chunks_of(config, schedule)
    last = len(chunks) - 1
    numbers = [rank, last - rank] if schedule == "ZBVZeroBubble" else [*range(rank, last + 1, RANKS)]
    made: list[Any] = []
    for number in numbers:
        called, kind = chunks[number], pipelining.PipelineStage
        if stages == "zgraph":
            called = torch.compile(zgraph.shard(called, mesh["dp"], zero_stage=0), backend="zgraph")
            kind: Any = zgraph.PipelineStage
        elif stages != NOT_COMPILED:
            called: Any = torch.compile(called)
        made.append(kind(called, number, last + 1, torch.device("cpu"), group=mesh.get_group("pp")))
    make: Any = get_schedule_class(schedule)
    runner = make(made if issubclass(make, PipelineScheduleMulti) else made[0], micro_batches, loss_fn=loss_of)
    way = Way(runner, {number: chunks[number] for number in numbers}, has_last=last in numbers)
    for step in range(WARM_UP_STEPS):
        run_step(way, config, micro_batches, step)
    return way


def run_step(way: Way, config: ModelConfig, micro_batches: int, step: int) -> float:
    """One step without an update; returns its seconds."""
    generator = torch.Generator().manual_seed(SEED + step)
    shape = (2, micro_batches * config.batch, config.sequence, config.width)
    x, target = torch.randn(shape, generator=generator)
    for module in way.chunks.values():
        module.zero_grad()
    dist.barrier()
    begin = time.perf_counter()
    way.runner.step(*((x,) if 0 in way.chunks else ()), **({"target": target} if way.has_last else {}))
    return time.perf_counter() - begin


def predicted_ms(config: ModelConfig, schedule: str, micro_batches: int, hardware: zgraph.Hardware) -> float:
    """What zgraph expects of a schedule's step, from the costs of its compiled stages on this machine."""
    target = zgraph.Target(hardware=hardware, time_kernels=True)
    plan = zgraph.plan_pipeline(
        lambda: chunks_of(config, schedule),
        world={"pp": RANKS},
        batch=lambda: (torch.zeros(config.batch, config.sequence, config.width),),
        micro_batches=micro_batches,
        schedule=schedule,
        hardware=hardware,
        passes=zgraph.PassList(zgraph.passes.presets.default(), target=target),
    )
    return 1e-3 * plan.step_us


def run_rank(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    config, micro_batches = ModelConfig(**plan["model"]), plan["micro_batches"]
    with tempfile.TemporaryDirectory() as nothing_kept:
        hardware = zgraph.calibrate(cache=nothing_kept)
    ways: list[Way] = []
    for stages, schedule in WAYS:
        say(rank, f"building {schedule}, {stages}")
        ways.append(build(stages, schedule, config, micro_batches))
    for repeat in range(plan["repeats"]):
        say(rank, f"repetition {repeat + 1} of {plan['repeats']}")
        for way in ways:
            way.s += [run_step(way, config, micro_batches, step) for step in range(plan["steps"])]
    rows: list[dict[str, Any]] = []
    first: dict[str, float] = {}
    for (stages, schedule), way in zip(WAYS, ways, strict=True):
        found = {name: norm for part in on_all_ranks(way.gradients()) for name, norm in part.items()}
        first = first or found
        same_names = found.keys() == first.keys()
        worst = max(abs(found[name] - norm) / norm for name, norm in first.items()) if same_names else float("inf")
        rows.append({"stages": stages, "schedule": schedule, "step_ms": slowest_ms(way.s), "gradients_off": worst})
    dist.destroy_process_group()  # plan_pipeline makes its own
    schedules = dict.fromkeys(schedule for _, schedule in WAYS) if rank == 0 else ()
    predicted = {schedule: predicted_ms(config, schedule, micro_batches, hardware) for schedule in schedules}
    return {"rows": rows, "predicted_ms": predicted}


def main() -> int:
    as_rank(run_rank)
    sizes = {name: getattr(USUAL, name) for name in ("width", "layers", "sequence", "batch")}
    parser = parser_of((__doc__ or "").partition("\n\n")[0], micro_batches=4, steps=2, repeats=7, **sizes)
    arguments = parser.parse_args()
    if arguments.layers % (2 * RANKS):
        parser.error(f"--layers {arguments.layers}: blocks must fill {2 * RANKS} chunks; take a multiple of that")
    config = replace(USUAL, **{name: getattr(arguments, name) for name in sizes})
    plan = {name: getattr(arguments, name) for name in ("micro_batches", "steps", "repeats")}
    report: dict[str, Any] = {**about(), "model": asdict(config), **plan}
    report |= run_ranks(__file__, {**plan, "model": asdict(config)}, cores=range(RANKS))
    for row in report["rows"]:
        row["step_ms_low"], row["step_ms_median"], row["step_ms_high"] = quartiles(row["step_ms"])
    print(
        f"{config.layers} blocks of width {config.width} on {RANKS} ranks, {arguments.micro_batches} micro-batches of "
        f"{config.batch} x {config.sequence}, fp32, torch {torch.__version__}"
    )
    cells = [
        (
            row["schedule"],
            row["stages"],
            spread(row["step_ms"]),
            f"{report['predicted_ms'][row['schedule']]:.0f}" if row["stages"] == "zgraph" else "",
            f"{row['gradients_off']:.0e}" + (" FAILED" if row["gradients_off"] > GRADIENT_TOLERANCE else ""),
        )
        for row in report["rows"]
    ]
    print(table(("schedule", "stages", "step ms (quartiles)", "predicted", "gradients off by"), cells))
    save(arguments.json, report)
    return int(any(row["gradients_off"] > GRADIENT_TOLERANCE for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
