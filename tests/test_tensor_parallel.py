"""Tensor parallelism by torch beside data parallelism by zgraph: models on dp x tp ranks train like the whole model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import zgraph
from tests.support import tensor_parallel as tp
from tests.support.compressing import compressing, feedback_of
from tests.support.ranks import Ranks, worlds

BF16 = 4e-2  # gradients of a bf16 model against those of the same model in fp32, relative to the largest entry
CASES = {
    "mlp": tp.Case(build=tp.Mlp, split=tp.split_mlp, batch=tp.features),
    "mlp_windows": tp.Case(
        build=tp.Mlp, split=tp.split_mlp, batch=tp.features, micro_batches=2, max_norm=0.1, options={"zero_stage": 1}
    ),
    "mlp_torch_clip": tp.Case(
        build=tp.Mlp,
        split=tp.split_mlp,
        batch=tp.features,
        compile="eager",
        micro_batches=2,
        max_norm=0.1,
        clip=torch.nn.utils.clip_grad_norm_,
        options={"zero_stage": 0},
    ),
    "llama": tp.Case(),
    "llama_replicated": tp.Case(options={"zero_stage": 0}),
    "llama_windows": tp.Case(micro_batches=2, max_norm=0.1, options={"zero_stage": 2}),
    "llama_inductor": tp.Case(compile="inductor"),
    "llama_bf16": tp.Case(options={"param_dtype": torch.bfloat16, "zero_stage": 2}, rounding=BF16),
    "llama_autocast": tp.Case(autocast=torch.bfloat16, rounding=BF16),
    "sequence": tp.Case(split=tp.split_sequence, max_norm=0.1),
    "sequence_replicated": tp.Case(split=tp.split_sequence, compile="eager", options={"zero_stage": 0}),
    "tied": tp.Case(build=lambda: tp.Llama(tied=True), split=tp.split_sequence, options={"zero_stage": 1}),
}


def run_case(name: str) -> dict[str, float]:
    return tp.compare(CASES[name])


# One group of tp 2, with nothing to shard over: what DTensor's compute makes of what a unit reads.
@pytest.mark.parametrize("name", ["mlp", "mlp_torch_clip"])
def test_equals_the_whole_model_on_one_tensor_parallel_group(ranks: Ranks, name: str) -> None:
    ranks.run(run_case, name)


@worlds(4)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_model(ranks: Ranks, name: str) -> None:
    ranks.run(run_case, name)
