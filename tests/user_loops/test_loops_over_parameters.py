"""Loops over `parameters()` inside forward: they read what attributes read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks
from tests.support.user_loops import Run, check_right


class Net(nn.Module):
    """With a container, a part that nothing calls, a tied weight, a frozen part and a scalar."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.head, self.unused, self.frozen = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(2, 2).requires_grad_(False)
        self.layers[2].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.what = what

    def penalty(self) -> Any:
        if self.what == "zero times all":
            return 0.0 * sum(p.sum() for p in self.parameters())
        if self.what == "squares":
            return 0.01 * sum(p.square().sum() for p in self.parameters())
        if self.what == "by name":
            return 0.01 * sum(p.abs().sum() for name, p in self.named_parameters() if name.endswith("weight"))
        if self.what == "of a container":
            return 0.01 * sum(p.square().sum() for p in self.layers.parameters())
        if self.what == "as a vector":
            return 0.01 * nn.utils.parameters_to_vector(self.parameters()).norm()
        return 0.0 * next(self.parameters()).new_ones(()).to(next(self.parameters()).dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(x)) * self.scale, y) + self.penalty()


WHAT = ("zero times all", "squares", "by name", "of a container", "as a vector", "dtype")


def train(run: Run) -> None:
    opt = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for _, x, y in run.batches(2):
        opt.zero_grad()
        run.call(x, y).backward()
        run.log_grads()
        opt.step()
    if run.model.what == "as a vector":  # of sharded parameters torch makes none, and says so
        return
    with torch.no_grad():
        value = run.call(*run.batch(7))
    assert not isinstance(value, DTensor) or value.to_local().isfinite()


def penalty_in_forward(what: str, mode: str, stage: int) -> None:
    check_right(lambda: Net(what), train, mode, stage)


# A graph takes seconds: compiled, each way of reading runs at one stage, and the others are long.
COMPILED_AT = {"zero times all": 2, "by name": 1, "as a vector": 3, "squares": 0, "of a container": 3, "dtype": 2}


def compiled_rows() -> list[Any]:
    rows = [(what, stage, "fx") for what in WHAT for stage in range(4)]
    others = [row for row in rows if COMPILED_AT.get(row[0]) != row[1]]
    return [*(row for row in rows if row not in others), *long(*others)]


@pytest.mark.parametrize(
    ("what", "stage", "mode"),
    [*((what, stage, "eager") for what in WHAT for stage in range(4)), *compiled_rows()],
)
def test_a_penalty_of_all_parameters_is_right(ranks: Ranks, what: str, stage: int, mode: str) -> None:
    ranks.run(penalty_in_forward, what, mode, stage)


def outside() -> set[bool]:
    model = zgraph.shard(Net("squares"))
    model(torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)).backward()
    return {isinstance(parameter, DTensor) for parameter in (*model.parameters(), *model.layers.parameters("x"))}


def test_outside_of_forward_they_are_sharded(ranks: Ranks) -> None:
    assert ranks.run(outside) == [{True}] * 2
