"""Errors and factors of low-rank reductions in checkpoints: bitwise on as many ranks, the mean of errors on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.compressing import feedback_of, kept_tensors
from tests.support.judges.low_rank import compile_low_rank
from tests.support.ranks import Ranks, fresh_ranks
from zgraph.compression.low_rank import LowRank

METHOD = LowRank(rank=2, least_saving=1.0)


def make(seed: int, zero_stage: int, method: LowRank = METHOD) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 20))
    model = zgraph.shard(plain, zero_stage=zero_stage)
    return compile_low_rank(model, method), torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    losses: list[str] = []
    for step in steps:
        inputs = torch.randn(7, 16, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def resume(folder: str, zero_stage: int) -> bool:
    """A model that has never run takes over after two steps; whether all that follows is the same, bit for bit."""
    model, optimizer = make(0, zero_stage)
    train(model, optimizer, range(2))
    path = zgraph.save_checkpoint(folder, model, optimizer, step=2)
    losses, expected = train(model, optimizer, range(2, 4)), kept_tensors(model)
    other, optimizer = make(7, zero_stage)
    zgraph.load_checkpoint(path, other, optimizer)
    again, found = train(other, optimizer, range(2, 4)), kept_tensors(other)
    counts = {(kept["first_hop"].reductions, kept["first_hop"].steps) for kept in feedback_of(other).values()}
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return again == losses and len(found) == 4 and same and counts == {(4, 4)}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_as_many_ranks_continue_bitwise(ranks: Ranks, tmp_path: Path, zero_stage: int) -> None:
    assert ranks.run(resume, str(tmp_path), zero_stage) == [True, True]


def save(folder: str, zero_stage: int) -> dict[str, Tensor]:
    model, optimizer = make(0, zero_stage)
    train(model, optimizer, range(2))
    zgraph.save_checkpoint(folder, model, optimizer, step=2)
    return kept_tensors(model)


def load(folder: str, zero_stage: int) -> dict[str, Tensor]:
    model, optimizer = make(7, zero_stage)
    zgraph.load_checkpoint(f"{folder}/step_00000002", model, optimizer)
    loaded = kept_tensors(model)
    train(model, optimizer, range(2, 3))  # refused, were it of another shape than the model's
    return loaded


def test_other_world_size_loads_mean_of_errors_and_factor(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(save, str(tmp_path), 3)
    with fresh_ranks(3) as three:
        for loaded in three.run(load, str(tmp_path), 0):
            assert loaded.keys() == saved[0].keys() and len(loaded) == 4
            for name, found in loaded.items():
                torch.testing.assert_close(found, (saved[0][name] + saved[1][name]) / 2, rtol=1e-6, atol=1e-9)
                assert torch.equal(saved[0][name], saved[1][name]) == name.endswith("right")


def test_another_stage_keeps_each_ranks_own(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.run(save, str(tmp_path), 3)
    for own, loaded in zip(saved, ranks.run(load, str(tmp_path), 1), strict=True):
        assert own.keys() == loaded.keys() and all(torch.equal(own[name], loaded[name]) for name in own)


def load_by_another(folder: str) -> str:
    model, optimizer = make(7, 3, LowRank(rank=3, least_saving=1.0))
    train(model, optimizer, range(1))
    with pytest.raises(zgraph.CheckpointError) as caught:
        zgraph.load_checkpoint(f"{folder}/step_00000002", model, optimizer)
    return str(caught.value)


def test_another_rank_of_factors_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, str(tmp_path), 3)
    for text in ranks.run(load_by_another, str(tmp_path)):
        assert '["LowRank", {"rank": 2}]' in text and '["LowRank", {"rank": 3}]' in text
