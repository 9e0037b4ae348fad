"""Chunks in a pipeline, planned and on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.memory.allocations import Count, counted, steady_rise
from zgraph.passes import presets
from zgraph.planner.planned_step import Plan
from zgraph.planner.schedules.pipeline_plan import PipelinePlan
from zgraph.torch_compat.groups import stages_hold_messages

WIDTH, ROWS, MICRO_BATCHES = 64, 32, 4  # divides by the ranks, so that no padding is sent

# Budgets of the chunks below that have room for some of their parameters.
KEEPS = {"1F1B": 304_000, "Interleaved1F1B": 520_000, "InterleavedZeroBubble": 540_000, "ZBVZeroBubble": 500_000}


class Chunk(nn.Module):
    """Residual, so that it hands on what it takes."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def chunks_of(count: int) -> list[nn.Module]:
    return [Chunk() for _ in range(count)]


def batch() -> tuple[Tensor]:
    return (torch.zeros(ROWS, WIDTH),)


def planned(world: dict[str, int], count: int = 2, zero_stage: int = 3, **options: Any) -> Plan:
    defaults: dict[str, Any] = {
        "hardware": "cpu",
        "shard_fn": functools.partial(zgraph.shard, zero_stage=zero_stage),
        "batch": batch,
        "micro_batches": MICRO_BATCHES,
    }
    return zgraph.plan_pipeline(lambda: chunks_of(count), world=world, **(defaults | options))


def under(budget_bytes: int | None) -> zgraph.PassList:
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=budget_bytes)
    return zgraph.PassList(presets.default(), target=target)


@functools.cache
def plan_within(budget_bytes: int | None, schedule: str, zero_stage: int = 3, **options: Any) -> Plan:
    """A plan of two ranks, each with its data-parallel twin, under a budget."""
    chunks = 1 if schedule in ("GPipe", "1F1B") else 2
    more = {"schedule": schedule, "passes": under(budget_bytes)} | options
    return planned({"pp": 2, "dp": 2}, 2 * chunks, zero_stage, **more)


def within(budget_bytes: int | None, schedule: str, zero_stage: int = 3, **options: Any) -> PipelinePlan:
    found = plan_within(budget_bytes, schedule, zero_stage, **options).pipeline
    assert found is not None
    return found


def beside_rest(plan: PipelinePlan) -> list[int]:
    """Most that each rank holds beside parameters and the optimizer's state."""
    return [
        peak - sum(stage.cost.resting_bytes for stage in plan.stages_of(rank))
        for rank, peak in enumerate(plan.run.peak_bytes)
    ]


def kept_by(plan: PipelinePlan) -> list[int]:
    """As one hands it to the stages."""
    found = [stage.keep_bytes for stage in plan.stages]
    assert None not in found
    return cast(list[int], found)


def stages_of(schedule: str, rank: int, ranks: int, chunks: int) -> list[int]:
    if schedule == "ZBVZeroBubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(chunks)]


class Pipeline:
    """This rank's part of a pipeline that trains."""

    def __init__(
        self,
        dp: int,
        chunks: int,
        schedule: str,
        zero_stage: int,
        micro_batches: int = MICRO_BATCHES,
        kept: Sequence[int] | None = None,
    ) -> None:
        ranks = dist.get_world_size() // dp
        self.mesh = init_device_mesh("cpu", (ranks, dp), mesh_dim_names=("pp", "dp"))
        rank = self.mesh.get_local_rank("pp")
        self.numbers = stages_of(schedule, rank, ranks, chunks)
        self.last = ranks * chunks - 1
        self.modules = [zgraph.shard(Chunk(), self.mesh["dp"], zero_stage=zero_stage) for _ in self.numbers]
        options: Any = {"lowering": "fx"} | ({} if kept is None else {"passes": under(KEEPS[schedule])})
        self.stages = stages = [
            zgraph.PipelineStage(
                cast(Any, torch.compile(module, backend="zgraph", options=options)),
                number,
                self.last + 1,
                torch.device("cpu"),
                keep_bytes=0 if kept is None else kept[number],
                group=self.mesh.get_group("pp"),
            )
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        make: Any = pipelining.schedules.get_schedule_class(schedule)
        given: Any = stages if issubclass(make, pipelining.schedules.PipelineScheduleMulti) else stages[0]
        self.schedule = make(given, micro_batches, loss_fn=lambda output, y: output.sum())
        self.x, self.y = torch.randn(micro_batches * ROWS, WIDTH), torch.zeros(micro_batches)

    def step(self) -> None:
        for module in self.modules:
            module.zero_grad()
        more: dict[str, Any] = {"target": self.y} if self.last in self.numbers else {}
        self.schedule.step(*((self.x,) if 0 in self.numbers else ()), **more)


def peak_for_real(
    zero_stage: int, chunks: int, schedule: str, dp: int, micro_batches: int, kept: Sequence[int] | None = None
) -> int:
    """How far a step rises above what is there between steps, gradients cleared."""
    pipeline = Pipeline(dp, chunks, schedule, zero_stage, micro_batches, kept)
    counts: list[Count] = []
    pipeline.step()
    for _ in range(4):
        for module, stage in zip(pipeline.modules, pipeline.stages, strict=True):
            module.zero_grad()
            stage.clear_runtime_states()  # what torch's stage keeps of the step before until the next one begins
        with counted() as count:
            pipeline.step()
        counts.append(count)
    # The first one replaces what was made before anybody counted: what stages of one rank have handed each other.
    return steady_rise(counts[1:])


def buffers_of(schedule: str, rank: int, chunks: int, micro_batches: int = MICRO_BATCHES) -> int:
    """Bytes between steps in which a rank's stages receive activations and gradients; newer torch makes them later."""
    if not stages_hold_messages():
        return 0
    numbers = stages_of(schedule, rank, 2, chunks)
    return micro_batches * ROWS * WIDTH * 4 * sum((number > 0) + (number < 2 * chunks - 1) for number in numbers)
