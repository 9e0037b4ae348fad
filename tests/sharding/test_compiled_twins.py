"""Models of one class, sharded in different ways and compiled in one process: none uses a graph of another."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks

WAYS = (
    MappingProxyType({}),
    MappingProxyType({"reduction": "sum"}),
    MappingProxyType({"param_dtype": torch.bfloat16}),
    MappingProxyType({"zero_stage": 1, "reduction": 3}),
    MappingProxyType({"reduce_dtype": torch.bfloat16}),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def trained(way: Any, *, compiles: bool) -> tuple[torch.dtype, list[Tensor]]:
    model = zgraph.shard(Net(), **way)
    run: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"}) if compiles else model
    found = run(torch.full((2, 4), 1.0 + dist.get_rank()))
    found.float().square().sum().backward()
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return found.dtype, [gradient.full_tensor() for gradient in gradients]


def compared() -> None:
    for way in WAYS:
        (dtype, gradients), (expected, others) = trained(way, compiles=True), trained(way, compiles=False)
        assert dtype == expected, way
        assert all(map(torch.equal, gradients, others)), way


def test_each_model_trains_by_its_own_options(ranks: Ranks) -> None:
    ranks.run(compared)
