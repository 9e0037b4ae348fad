"""A model and its optimizer to be saved and loaded, and whether what came back is what was saved."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)

import zgraph
from tests.support.compiled import with_fx
from tests.support.whole_tensors import whole


class Noisy(nn.Module):
    """Rows that nothing divides, tied weights, dropout, statistics that differ between ranks, and an unread weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 6)
        self.tied = nn.Linear(6, 13, bias=False)
        self.tied.weight = self.up.weight
        self.unread = nn.Linear(3, 1)
        self.shift = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x) + self.tied(x))))) + self.shift


def make(seed: int = 0, *, compiled: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = zgraph.shard(Noisy(), **options)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.01, fused=True)
    return (with_fx(model) if compiled else model), optimizer  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """Steps on random data that come from the rank's own generator; the losses, exactly."""
    losses: list[str] = []
    for _ in range(steps):
        loss = model(torch.randn(7, 6) + random.random()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Every whole parameter, this rank's buffers, and the whole optimizer state, by name."""
    found = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items() if optimizer is not None else ():
        for key, value in entries.items():
            found[f"{names[id(parameter)].removeprefix('_orig_mod.')} {key}"] = whole(value.detach()).clone()
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor], *, buffers: bool = True) -> list[str]:
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in found.items()
        if not torch.equal(value, expected[name]) and (buffers or "running" not in name)
    ]


def seed_ranks() -> None:
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())


def save_both_ways(folder: str) -> None:
    model, optimizer = make()
    seed_ranks()
    train(model, optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "runtime": zgraph.runtime_state(model),
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    zgraph.save_checkpoint(f"{folder}/own", model, optimizer, step=3, extra={"data": 10 + dist.get_rank()})
    expected = snapshot(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")
