"""State of an optimizer of the plain model, loaded into one of the sharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def continued(name: str, stage: int, captured: bool) -> float:
    """The largest difference from the plain model, both of which go on from the state of the plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    opt = OPTIMIZERS[name](plain.parameters())

    def train(number: int) -> None:
        plain(torch.cat([batch(number, rank) for rank in range(dist.get_world_size())])).square().mean().backward()
        opt.step()
        opt.zero_grad()

    train(0), train(1)
    model: Any = zgraph.shard(copy.deepcopy(plain), zero_stage=stage)
    ours = OPTIMIZERS[name](model.parameters())
    ours.load_state_dict(copy.deepcopy(opt.state_dict()))

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        ours.step()
        ours.zero_grad()

    run = zgraph.training_step(model, ours, options={"lowering": "fx"})(step) if captured else step
    for number in (2, 3, 4):
        train(number)
        run(batch(number, dist.get_rank()))
    state = [value for entries in ours.state.values() for value in entries.values() if value.ndim]
    assert state and all(isinstance(value, DTensor) for value in state)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(one.detach()) - other).abs().max()) for one, other in pairs)


@worlds(2)
@pytest.mark.parametrize(
    ("name", "stage", "captured"), [("AdamW", 3, False), ("fused", 1, True), ("momentum", 0, True)]
)
def test_state_of_the_plain_model_is_sharded(ranks: Ranks, name: str, stage: int, captured: bool) -> None:
    assert max(ranks.run(continued, name, stage, captured)) < 1e-5


def of_its_own() -> str:
    """Each rank loads another state."""
    model: Any = zgraph.shard(nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = opt.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.full((4, 4), float(dist.get_rank()))}}
    opt.load_state_dict(state)
    model(torch.ones(2, 4)).sum().backward()
    try:
        opt.step()
    except zgraph.AgreementError as error:
        return str(error)
    return "not refused"


@worlds(2)
def test_ranks_that_load_different_state_are_refused(ranks: Ranks) -> None:
    for text in ranks.run(of_its_own):
        assert "optimizer.step()" in text
