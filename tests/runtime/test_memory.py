"""What stays in memory: 16 bytes a parameter at stage 0, 16/N at stage 3, and no gathered weight between passes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.memory.gloo_buffers import settled
from tests.support.memory.live_tensors import live_tensors, local, storage_bytes
from tests.support.ranks import Ranks, every_world

ROWS, LAYERS = 48, 4  # 48 rows divide by 1, 2, 3 and 4, so that the formula is exact


def build() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(ROWS, ROWS, bias=False), nn.Tanh()) for _ in range(LAYERS)])


def bytes_before_the_step(zero_stage: int, mode: str) -> dict[str, float]:
    """Bytes per parameter just before opt.step(): at rest (state, gradient), and alive in the whole process."""
    shard_numel = ROWS * ROWS // dist.get_world_size()
    gc.collect()
    gc.freeze()  # what exists now is looked at no more, or each look would go through all that torch has made
    model = zgraph.shard(build(), zero_stage=zero_stage)
    called = with_fx(model) if mode == "fx" else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        called(torch.randn(3, ROWS)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    called(torch.randn(3, ROWS)).square().mean().backward()
    numel = sum(parameter.numel() for parameter in model.parameters())
    rest: list[Tensor] = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        rest += [local(parameter), local(parameter.grad), local(state["exp_avg"]), local(state["exp_avg_sq"])]
    at_rest = storage_bytes(rest)
    alive = settled(lambda: storage_bytes([*live_tensors(shard_numel), *rest]), at_rest)
    gc.unfreeze()
    return {"rest": at_rest / numel, "alive": alive / numel}


@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@every_world
def test_bytes_per_parameter_before_the_optimizer_step(ranks: Ranks, zero_stage: int, mode: str) -> None:
    expected = 16 if zero_stage == 0 else 16 / ranks.world
    for found in ranks.run(bytes_before_the_step, zero_stage, mode):
        assert found["rest"] == expected
        # Nothing else of a shard's size is alive, such as a gathered weight or a forgotten bucket.
        assert found["alive"] == expected


def saved_for_backward(zero_stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    model = zgraph.shard(build(), zero_stage=zero_stage, param_dtype=dtype)
    called = with_fx(model)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        called(torch.randn(3, ROWS)).square().mean()
    shards = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    own = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in shards]
    return {"largest": max(tensor.numel() for tensor in own), "count": len(saved)}


@pytest.mark.parametrize(("zero_stage", "dtype"), [(3, None), (0, torch.bfloat16), (0, None), (3, torch.bfloat16)])
def test_gathered_weights_are_not_saved_for_backward(ranks: Ranks, zero_stage: int, dtype: torch.dtype | None) -> None:
    for found in ranks.run(saved_for_backward, zero_stage, dtype):
        assert found["count"] > 0
        # Activations are 3 x 48; a weight, gathered or cast, would be 48 x 48.
        assert found["largest"] == 3 * ROWS


def outlives() -> list[str]:
    """Parameters of a compiled and trained model that are there when nobody has the model any more."""
    model = zgraph.shard(build())
    with_fx(model)(torch.randn(3, ROWS)).square().mean().backward()
    left = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    del model
    gc.collect()
    return [name for name, parameter in left.items() if parameter() is not None]


def test_compiled_code_does_not_keep_the_model_alive(ranks: Ranks) -> None:
    """Dynamo keeps graphs as long as the code of a forward."""
    assert not any(ranks.run(outlives))
