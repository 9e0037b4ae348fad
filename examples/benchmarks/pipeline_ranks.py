"""One rank of the pipeline benchmark: trains its stage with every strategy in turn.

Started by pipeline_link.py inside a network namespace, once per rank.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import netns
import torch
import torch.distributed as dist
import torch.nn.functional as F
from builders import POWERSGD_BUCKET_MIB, Optimizer, hook_bf16, hook_powersgd
from rank_process import WARM_UP_STEPS, RankPlan, join_hosts, on_all_ranks, say
from step_recorder import Recording
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from workload import SEED, LanguageModel, make_batch


@dataclass(frozen=True, kw_only=True)
class PipelinePlan(RankPlan):
    """What the ranks of pipeline_link.py do; with the host of each, and the micro-batches of a step."""

    hosts: list[int]
    micro_batches: int
    timeline: bool


class Stage(nn.Module):
    """Half of a LanguageModel: embeddings and the first blocks, or the last blocks and the head."""

    def __init__(self, model: LanguageModel, index: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.is_first = index == 0
        self.blocks = model.blocks[:half] if self.is_first else model.blocks[half:]
        if self.is_first:
            self.token, self.position = model.token, model.position
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens [batch, sequence] of the first stage, or hidden states -> hidden states, or logits of the last."""
        if self.is_first:
            hidden = self.token(hidden) + self.position(torch.arange(hidden.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.is_first else self.head(self.norm(hidden))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Setting:
    """What every strategy is built from: the mesh has the axes pp and dp."""

    plan: PipelinePlan
    mesh: DeviceMesh

    @property
    def index(self) -> int:
        return self.mesh.get_local_rank("pp")

    def new_stage(self) -> Stage:
        torch.manual_seed(SEED)
        return Stage(LanguageModel(self.plan.model), self.index)


Built = tuple[Any, nn.Module]  # a stage of a pipeline, and the module that holds its parameters


def build_ddp(
    register_hook: Callable[[DistributedDataParallel], None] | None,
    setting: Setting,
    *,
    by_blocks: bool = False,
    bucket_mib: float | None = None,
) -> Built:
    """DDP around a compiled stage; with `by_blocks`, blocks are compiled one by one and gradients leave in between."""
    stage = setting.new_stage()
    if by_blocks:
        for block in stage.blocks:
            block.compile(fullgraph=True)
    module = DistributedDataParallel(
        stage if by_blocks else cast(nn.Module, torch.compile(stage)),
        process_group=setting.mesh.get_group("dp"),
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_mib,
    )
    if register_hook is not None:
        register_hook(module)
    group = setting.mesh.get_group("pp")
    return PipelineStage(module, setting.index, 2, torch.device("cpu"), group=group), module


def build_zgraph(passes: Callable[[], Any] | None, setting: Setting, **options: Any) -> Built:
    import zgraph

    stage = zgraph.shard(setting.new_stage(), setting.mesh["dp"], zero_stage=0, **options)
    more: dict[str, Any] = {} if passes is None else {"options": {"pipeline": zgraph.Pipeline(passes())}}
    compiled = torch.compile(stage, backend="zgraph", **more)
    group = setting.mesh.get_group("pp")
    return zgraph.PipelineStage(cast(nn.Module, compiled), setting.index, 2, torch.device("cpu"), group=group), stage


def loco(means_bits: int | None) -> Any:
    """Rules, and gradients travel as codes of 4 bits; means in bf16, or as codes of so many bits."""
    from zgraph.passes import CompressGradients, LoCo, presets

    passes = presets.default(compression=LoCo())
    if means_bits is None:
        return passes
    means = CompressGradients(mean_codec=LoCo(bits=means_bits))
    return [means if isinstance(one, CompressGradients) else one for one in passes]


def low_rank(rank: int) -> Any:
    from zgraph.passes import LowRank, presets

    return presets.default(compression=LowRank(rank=rank))


STRATEGIES: dict[str, Callable[[Setting], Built]] = {
    "ddp": partial(build_ddp, None),
    "ddp-blocks": partial(build_ddp, None, by_blocks=True),
    "ddp-bf16": partial(build_ddp, hook_bf16),
    "ddp-powersgd-4": partial(build_ddp, partial(hook_powersgd, 4), bucket_mib=POWERSGD_BUCKET_MIB),
    "zgraph-0": partial(build_zgraph, None),
    "zgraph-0-reduce-bf16": partial(build_zgraph, None, reduce_dtype=torch.bfloat16),
    "zgraph-0-loco": partial(build_zgraph, partial(loco, None)),
    "zgraph-0-loco-means4": partial(build_zgraph, partial(loco, 4)),
    "zgraph-0-lowrank4": partial(build_zgraph, partial(low_rank, 4)),
}
EQUAL_LOSSES = ("ddp", "ddp-blocks", "zgraph-0")


@dataclass
class Trainer:
    """One strategy on this rank, and what was measured of it."""

    stage: Any
    schedule: Any
    optimizer: Optimizer
    steps_done: int = 0
    loss: float = float("nan")
    step_s: list[float] = field(default_factory=list[float])
    last_backward_s: list[float] = field(default_factory=list[float])
    sent_bytes: list[int] = field(default_factory=list[int])
    backward_s: float = 0.0  # of the micro-batch that ran last
    recording: Recording | None = None  # of the step that runs

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.recording is None else self.recording.span(name)


def build(name: str, setting: Setting) -> Trainer:
    """Build a strategy and take its warm-up steps, which compile."""
    stage, module = STRATEGIES[name](setting)
    schedule = Schedule1F1B(stage, setting.plan.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    if name.startswith("zgraph"):
        import zgraph

        optimizer = zgraph.step_on_shards(optimizer)
    trainer = Trainer(stage, schedule, optimizer)
    run_forward, run_backward = stage.forward_one_chunk, stage.backward_one_chunk

    def forward(chunk: int, *arguments: Any, **options: Any) -> Any:
        with trainer.span(f"F{chunk}"):
            return run_forward(chunk, *arguments, **options)

    def backward(chunk: int, *arguments: Any, **options: Any) -> None:
        begin = time.perf_counter()
        with trainer.span(f"B{chunk}"):
            run_backward(chunk, *arguments, **options)
        trainer.backward_s = time.perf_counter() - begin

    stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    for _ in range(WARM_UP_STEPS):
        train_step(trainer, setting)
    return trainer


def train_step(trainer: Trainer, setting: Setting) -> float:
    """One step; returns its seconds."""
    plan, dp_rank = setting.plan, setting.mesh.get_local_rank("dp")
    batches = [
        make_batch(plan.model, plan.micro_batches * trainer.steps_done + one, dp_rank)
        for one in range(plan.micro_batches)
    ]
    tokens = torch.cat(batches)
    trainer.steps_done += 1
    dist.barrier()
    begin = time.perf_counter()
    if setting.index == 0:
        trainer.schedule.step(tokens[:, :-1])
    else:
        losses: list[Tensor] = []
        trainer.schedule.step(target=tokens[:, 1:], losses=losses)
        trainer.loss = statistics.fmean(loss.item() for loss in losses)
    with trainer.span("U"):
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return time.perf_counter() - begin


def run_turn(trainer: Trainer, setting: Setting) -> None:
    """Train a few timed steps, all ranks entering each one together."""
    dist.barrier()
    sent_before = netns.transmitted_bytes()
    for _ in range(setting.plan.steps):
        trainer.step_s.append(train_step(trainer, setting))
        trainer.last_backward_s.append(trainer.backward_s)
    dist.barrier()
    trainer.sent_bytes.append((netns.transmitted_bytes() - sent_before) // setting.plan.steps)


def record_step(trainer: Trainer, setting: Setting, rank: int) -> list[dict[str, Any]]:
    """What each rank does in one more step."""
    recording = trainer.recording = Recording()
    with recording.watching_sockets(setting.plan.addresses[rank]):
        train_step(trainer, setting)
    trainer.recording = None
    return on_all_ranks(recording.as_json())


def summarize(trainer: Trainer, setting: Setting) -> dict[str, Any]:
    """Join the ranks: the slowest one's times, the larger of both links' counters, the mean loss of the last stages."""
    loss = on_all_ranks(trainer.loss if setting.index else None)
    return {
        "step_ms": [1e3 * max(seconds) for seconds in zip(*on_all_ranks(trainer.step_s), strict=True)],
        "last_backward_ms": 1e3 * max(on_all_ranks(statistics.median(trainer.last_backward_s))),
        "sent_bytes": max(on_all_ranks(statistics.median(trainer.sent_bytes))),
        "loss": statistics.fmean(one for one in loss if one is not None),
    }


def main() -> None:
    rank, plan_path, result_path = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    plan = PipelinePlan.from_json(plan_path.read_text())
    link = join_hosts(plan, plan.hosts, rank)
    setting = Setting(plan, init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    trainers: dict[str, Trainer] = {}
    for name in plan.strategies:
        say(rank, f"building {name}")
        trainers[name] = build(name, setting)
    for repeat in range(plan.repeats):
        say(rank, f"repetition {repeat + 1} of {plan.repeats}")
        for trainer in trainers.values():
            run_turn(trainer, setting)
    rows = {name: summarize(trainer, setting) for name, trainer in trainers.items()}
    if plan.timeline:
        for name, trainer in trainers.items():
            rows[name]["timeline"] = record_step(trainer, setting, rank)
    if rank == 0:
        result_path.write_text(json.dumps({"link": link, "strategies": rows}))
    dist.barrier()
    os._exit(0)  # as rank_process.py does


if __name__ == "__main__":
    main()
