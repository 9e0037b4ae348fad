"""Placement of offloaded tensors without hooks, and the hooks of plain optimizer steps, each by itself."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.offload import Offload
from zgraph.tiers.placement.host_budget import check_host_budget
from zgraph.tiers.placement.resting import Resting
from zgraph.tiers.placement.step_hooks import follow_steps
from zgraph.tiers.tier import DEVICE, HOST, Tier

CPU = torch.device("cpu")


def placed(offload: Offload, model: nn.Module) -> Resting:
    """The memory of a model's offloaded tensors on this process, which no process group needs."""
    resting = Resting(offload, {HOST: lanes_of(CPU).host})
    resting.roots.add(model)
    return resting


def stepped(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def tiers_of(resting: Resting, optimizer: torch.optim.Optimizer) -> dict[str, set[Tier]]:
    found: dict[str, set[Tier]] = {}
    for entries in optimizer.state.values():
        for key, value in entries.items():
            found.setdefault(key, set()).add(resting.space_of(value))
    return found


def test_parameters_and_state_are_moved_without_hooks() -> None:
    model = nn.Linear(4, 3)
    resting = placed(Offload(params="host", optimizer="host"), model)
    shard = torch.arange(6.0)
    moved = resting.place_shard(shard, "weight")
    assert moved.equal(shard) and moved is not shard
    assert (resting.space_of(shard), resting.space_of(moved)) == (DEVICE, HOST)
    assert resting.place_shard(moved, "weight") is moved

    optimizer = stepped(model)
    assert set.union(*tiers_of(resting, optimizer).values()) == {DEVICE}
    before = [entries["exp_avg"].clone() for entries in optimizer.state.values()]
    resting.settle(optimizer, resting.names())
    assert tiers_of(resting, optimizer) == {"step": {DEVICE}, "exp_avg": {HOST}, "exp_avg_sq": {HOST}}
    for entries, expected in zip(optimizer.state.values(), before, strict=True):
        assert entries["exp_avg"].equal(expected)


def test_hooks_move_state_of_their_model_only() -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    resting = placed(Offload(optimizer="host"), model)
    follow_steps(resting)
    assert tiers_of(resting, stepped(model)) == {"step": {DEVICE}, "exp_avg": {HOST}, "exp_avg_sq": {HOST}}
    assert set.union(*tiers_of(resting, stepped(other)).values()) == {DEVICE}


def test_hooks_end_with_the_memory_that_they_fill() -> None:
    model = nn.Linear(4, 3)
    resting = placed(Offload(optimizer="host"), model)
    follow_steps(resting)
    kept = lanes_of(CPU).host
    del resting
    gc.collect()
    optimizer = stepped(model)
    assert not any(kept.holds(value) for entries in optimizer.state.values() for value in entries.values())


def test_hooks_are_left_out_where_no_step_makes_offloaded_state() -> None:
    model = nn.Linear(4, 3)
    resting = placed(Offload(params="host"), model)
    follow_steps(resting)
    assert set.union(*tiers_of(resting, stepped(model)).values()) == {DEVICE}


def test_a_step_beyond_the_host_budget_is_refused() -> None:
    offload = Offload(optimizer="host", host_budget_bytes=100)
    check_host_budget(offload, 0, 60, 40, 0, on_gpu=False)
    with pytest.raises(ValueError, match=r"keeps 101 bytes on the host .* 60 of the optimizer's state and 41 of acti"):
        check_host_budget(offload, 0, 60, 41, 0, on_gpu=False)
