"""Checkpoints that torch.distributed.checkpoint writes go from FSDP2 to zgraph and back, with optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, fresh_ranks
from tests.support.whole_tensors import whole

STEPS_BEFORE, STEPS_AFTER = 2, 2
Trained = tuple[list[float], dict[str, Tensor]]
Sharding = Literal["fsdp2", 0, 3]  # a number: zgraph's ZeRO stage


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # 9 rows do not divide evenly, on two ranks or on four.
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.LayerNorm(5))


def train(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, begin: int, steps: int) -> list[float]:
    losses: list[float] = []
    for step in range(begin, begin + steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value.detach()) for name, value in model.named_parameters()}


def sharded(by: Sharding, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(seed)
    if by == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    else:
        zgraph.shard(model, zero_stage=by)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def callable_of(model: nn.Module, by: Sharding) -> Callable[[Tensor], Tensor]:
    return model if by == "fsdp2" else with_fx(model)


def save(directory: str, by: Sharding) -> Trained:
    """Train, save, and go on: losses and parameters of the steps after saving."""
    model, optimizer = sharded(by, 0)
    call = callable_of(model, by)
    train(call, optimizer, 0, STEPS_BEFORE)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=directory)
    return train(call, optimizer, STEPS_BEFORE, STEPS_AFTER), parameters_of(model)


def load(directory: str, by: Sharding) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Load into a model that begins with other values."""
    model, optimizer = sharded(by, 1)
    state, optimizer_state = get_state_dict(model, optimizer)
    reader, planner = zgraph.SafeReader(directory), zgraph.SafePlanner()
    dcp.load({"model": state, "optimizer": optimizer_state}, storage_reader=reader, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    return model, optimizer


def load_and_train(directory: str, by: Sharding) -> Trained:
    model, optimizer = load(directory, by)
    return train(callable_of(model, by), optimizer, STEPS_BEFORE, STEPS_AFTER), parameters_of(model)


def loaded_values(directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and first moments as loaded."""
    model, optimizer = load(directory, 3)
    moments = {name: whole(optimizer.state[value]["exp_avg"]) for name, value in model.named_parameters()}
    return parameters_of(model), moments


@pytest.mark.parametrize(("saved", "loaded"), [("fsdp2", 0), (3, "fsdp2"), ("fsdp2", 3), (0, "fsdp2")])
def test_training_goes_on_bitwise(ranks: Ranks, tmp_path: Path, saved: Sharding, loaded: Sharding) -> None:
    expected = ranks.run(save, str(tmp_path), saved)
    for (losses, parameters), (wanted_losses, wanted) in zip(
        ranks.run(load_and_train, str(tmp_path), loaded), expected, strict=True
    ):
        assert losses == wanted_losses
        assert parameters.keys() == wanted.keys()
        assert [name for name, value in wanted.items() if not torch.equal(value, parameters[name])] == []


def test_another_number_of_ranks_loads_the_same_values(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path), "fsdp2")
    wanted, wanted_moments = ranks.run(loaded_values, str(tmp_path))[0]
    with fresh_ranks(3) as others:
        for found, moments in others.run(loaded_values, str(tmp_path)):
            assert found.keys() == wanted.keys() == moments.keys()
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())
            assert all(torch.equal(value, wanted_moments[name]) for name, value in moments.items())
    assert any(value.any() for value in wanted_moments.values())
