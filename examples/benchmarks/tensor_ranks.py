"""One rank of the tensor-parallel benchmark: trains with every strategy in turn.

Started by tensor_link.py inside a network namespace, once per rank.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import netns
import torch
import torch.distributed as dist
import torch.nn.functional as F
from builders import Optimizer
from rank_process import WARM_UP_STEPS, RankPlan, join_hosts, on_all_ranks, say
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workload import SEED, LanguageModel, ModelConfig, make_batch


@dataclass(frozen=True, kw_only=True)
class TensorPlan(RankPlan):
    """What the ranks of tensor_link.py do, and the host of each."""

    hosts: list[int]


def loco(means_bits: int | None) -> Any:
    """Passes by rules, with gradients as 4-bit codes, and means in bf16 or as codes of `means_bits` bits."""
    from zgraph.passes import CompressGradients, LoCo, presets

    passes = presets.default(compression=LoCo())
    if means_bits is None:
        return passes
    means = CompressGradients(mean_codec=LoCo(bits=means_bits))
    return [means if isinstance(one, CompressGradients) else one for one in passes]


class Block(nn.Module):
    """Causal attention and a feed-forward layer; counts its heads by what it is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.attention_out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, _ = hidden.shape
        normed = self.attention_norm(hidden)
        query, key, value = (
            layer(normed).view(batch, sequence, -1, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))


class SplittableModel(LanguageModel):
    """The usual model with blocks that can be split."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))


COLUMNS, ROWS = ("query", "key", "value", "up"), ("attention_out", "down")


@dataclass(frozen=True)
class Setting:
    """What every strategy is built from: the mesh has the axes dp and tp."""

    plan: TensorPlan
    mesh: DeviceMesh

    def new_model(self) -> SplittableModel:
        """The model with attention and feed-forward layers of its blocks split over tp."""
        torch.manual_seed(SEED)
        model = SplittableModel(self.plan.model)
        ways: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {
            name: RowwiseParallel() for name in ROWS
        }
        for block in model.blocks:
            parallelize_module(block, self.mesh["tp"], ways)
        return model


Built = tuple[Callable[[Tensor], Tensor], nn.Module]  # what computes the loss, and the module with the parameters


def build_fsdp2(setting: Setting, *, reduce_dtype: torch.dtype = torch.float32, gathers_again: bool = True) -> Built:
    """Blocks are compiled one by one, as FSDP2's manual has it; stage 3, or stage 2 where nothing is gathered again."""
    model = setting.new_model()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    options: dict[str, Any] = {"mesh": setting.mesh["dp"], "mp_policy": policy, "reshard_after_forward": gathers_again}
    for block in model.blocks:
        block.compile(fullgraph=True)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, model


def build_zgraph(passes: Callable[[], Any] | None, setting: Setting, **options: Any) -> Built:
    import zgraph

    model = zgraph.shard(setting.new_model(), setting.mesh["dp"], **options)
    more: dict[str, Any] = {} if passes is None else {"options": {"passes": zgraph.PassList(passes())}}
    return cast(Any, torch.compile(model, backend="zgraph", **more)), model


STRATEGIES: dict[str, Callable[[Setting], Built]] = {
    "fsdp2": build_fsdp2,
    "fsdp2-zero2": partial(build_fsdp2, gathers_again=False),
    "fsdp2-zero2-reduce-bf16": partial(build_fsdp2, reduce_dtype=torch.bfloat16, gathers_again=False),
    "zgraph-3": partial(build_zgraph, None, zero_stage=3),
    "zgraph-2": partial(build_zgraph, None, zero_stage=2),
    "zgraph-2-reduce-bf16": partial(build_zgraph, None, zero_stage=2, reduce_dtype=torch.bfloat16),
    "zgraph-0": partial(build_zgraph, None, zero_stage=0),
    "zgraph-0-loco": partial(build_zgraph, partial(loco, None), zero_stage=0),
    "zgraph-0-loco-means4": partial(build_zgraph, partial(loco, 4), zero_stage=0),
}
EQUAL_LOSSES = ("fsdp2", "fsdp2-zero2", "zgraph-3", "zgraph-2", "zgraph-0")


@dataclass
class Trainer:
    """One strategy on this rank, and what was measured of it."""

    loss_of: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    steps_done: int = 0
    loss: float = float("nan")
    step_s: list[float] = field(default_factory=list[float])
    sent_bytes: list[int] = field(default_factory=list[int])


def build(name: str, setting: Setting) -> Trainer:
    """Build a strategy and take its warm-up steps, which compile."""
    loss_of, module = STRATEGIES[name](setting)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    if name.startswith("zgraph"):
        import zgraph

        optimizer = zgraph.step_on_shards(optimizer)
    trainer = Trainer(loss_of, optimizer)
    for _ in range(WARM_UP_STEPS):
        train_step(trainer, setting)
    return trainer


def train_step(trainer: Trainer, setting: Setting) -> float:
    """One step; returns its seconds. The ranks of a host see the same tokens."""
    tokens = make_batch(setting.plan.model, trainer.steps_done, setting.mesh.get_local_rank("dp"))
    trainer.steps_done += 1
    dist.barrier()
    begin = time.perf_counter()
    loss = trainer.loss_of(tokens)
    loss.backward()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.loss = loss.item()
    return time.perf_counter() - begin


def run_turn(trainer: Trainer, setting: Setting) -> None:
    """Train a few timed steps, all ranks entering each one together."""
    dist.barrier()
    sent_before = netns.transmitted_bytes()
    for _ in range(setting.plan.steps):
        trainer.step_s.append(train_step(trainer, setting))
    dist.barrier()
    trainer.sent_bytes.append((netns.transmitted_bytes() - sent_before) // setting.plan.steps)


def summarize(trainer: Trainer) -> dict[str, Any]:
    """Join the ranks: the slowest one's times, the larger of both links' counters, the mean loss."""
    return {
        "step_ms": [1e3 * max(seconds) for seconds in zip(*on_all_ranks(trainer.step_s), strict=True)],
        "sent_bytes": max(on_all_ranks(statistics.median(trainer.sent_bytes))),
        "loss": statistics.fmean(on_all_ranks(trainer.loss)),
    }


def main() -> None:
    rank, plan_path, result_path = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    plan = TensorPlan.from_json(plan_path.read_text())
    link = join_hosts(plan, plan.hosts, rank)
    setting = Setting(plan, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    trainers: dict[str, Trainer] = {}
    for name in plan.strategies:
        say(rank, f"building {name}")
        trainers[name] = build(name, setting)
    for repeat in range(plan.repeats):
        say(rank, f"repetition {repeat + 1} of {plan.repeats}")
        for trainer in trainers.values():
            run_turn(trainer, setting)
    rows = {name: summarize(trainer) for name, trainer in trainers.items()}
    if rank == 0:
        result_path.write_text(json.dumps({"link": link, "strategies": rows}))
    dist.barrier()
    os._exit(0)  # as rank_process.py does


if __name__ == "__main__":
    main()
