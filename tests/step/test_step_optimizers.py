"""Optimizers in a captured step: all of torch.optim's that can be, and users' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.step_scripts import LR, Script, Setting, compare, kinds


def nadam(groups: Any) -> optim.Optimizer:
    return optim.NAdam(groups, lr=LR, weight_decay=0.1, decoupled_weight_decay=True, foreach=False)


def nadam_foreach(groups: Any) -> optim.Optimizer:
    return optim.NAdam(groups, lr=LR, foreach=True)


def rprop(groups: Any) -> optim.Optimizer:
    # DTensor has no rules for some of its operators.
    return zgraph.step_on_shards(optim.Rprop(groups, lr=LR, foreach=False))


def rprop_foreach(groups: Any) -> optim.Optimizer:
    return zgraph.step_on_shards(optim.Rprop(groups, lr=LR, foreach=True))


def radam(groups: Any) -> optim.Optimizer:
    return optim.RAdam(groups, lr=LR, foreach=False)


def radam_foreach(groups: Any) -> optim.Optimizer:
    return optim.RAdam(groups, lr=LR, weight_decay=0.1, foreach=True)


def asgd(groups: Any) -> optim.Optimizer:
    return optim.ASGD(groups, lr=LR, t0=5.0, foreach=False)


def asgd_foreach(groups: Any) -> optim.Optimizer:
    # DTensor has no rule for lists of numbers.
    return zgraph.step_on_shards(optim.ASGD(groups, lr=LR, t0=5.0, weight_decay=0.1, foreach=True))


class Lion(optim.Optimizer):
    """A user's own, element by element."""

    def __init__(self, groups: Any, lr: float = LR, beta: float = 0.9) -> None:
        super().__init__(groups, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = state["mean"].mul(group["beta"]).add(parameter.grad, alpha=1 - group["beta"]).sign()
                parameter.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])


class Lars(Lion):
    """A user's own that looks at whole parameters, and counts in a tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros(())
                state["count"] += 1
                trust = parameter.norm() / (parameter.grad.norm() + 0.1)
                parameter.sub_(trust * parameter.grad * group["lr"])


class Counting(Lion):
    """A user's own that counts in Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / state["count"])


@worlds(2)
@pytest.mark.parametrize(
    ("make", "stage", "close"),
    [
        (nadam, 3, False),
        (Lars, 2, False),
        (rprop_foreach, 0, False),
        (Lion, 3, False),
        # The other road of the same optimizers.
        *long((nadam_foreach, 1, False), (rprop, 2, False), (Lars, 0, False)),
    ],
)
def test_an_optimizer_steps_as_in_the_plain_loop(ranks: Ranks, make: Any, stage: int, close: bool) -> None:
    for reasons in ranks.run(compare, Setting(Script, make, stage=stage, close=close)):
        assert kinds(reasons)[:2] == ["", "state"][: len(reasons)]
        assert len(reasons) <= 2


@worlds(2)
@pytest.mark.parametrize(("make", "stage"), [(radam, 3), (asgd, 2), *long((radam_foreach, 1), (asgd_foreach, 0))])
def test_an_optimizer_that_decides_by_its_step_is_compiled_again(ranks: Ranks, make: Any, stage: int) -> None:
    for reasons in ranks.run(compare, Setting(Script, make, stage=stage, steps=9)):
        assert kinds(reasons)[:3] == ["", "state", "options"]
        assert "value_" in reasons[2]


class Matrices(nn.Module):
    """A tall one and a wide one, whose rows do not divide among the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(5, 9, bias=False)
        self.wide = nn.Linear(9, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(torch.tanh(self.tall(x)))


class OfMatrices(Script):
    def build(self) -> nn.Module:
        return Matrices()


def muon(groups: Any) -> optim.Optimizer:
    matrices = [one for group in groups for one in group["params"]]
    return zgraph.step_on_shards(optim.Muon([{"params": matrices}], lr=LR))


@worlds(2)
@pytest.mark.parametrize("stage", [3, 0])
def test_muon_steps_tall_and_wide_matrices(ranks: Ranks, stage: int) -> None:
    for reasons in ranks.run(compare, Setting(OfMatrices, muon, stage=stage)):
        assert kinds(reasons) == [""]


def counting() -> str:
    script = Script(Setting(Script, Counting))
    step = zgraph.training_step(script.model, script.opt, options={"lowering": "fx"})(script.step)
    step(torch.ones(2, 5))
    with pytest.raises(zgraph.ZgraphError) as caught:
        step(torch.ones(2, 5))
    return str(caught.value)


@worlds(2)
def test_an_optimizer_that_counts_in_python_is_refused(ranks: Ranks) -> None:
    for error in ranks.run(counting):
        assert 'Counting.step changes a number in state["count"]' in error


class SometimesUnused(Script):
    """A branch that gets no gradient in some steps, also not in the first."""

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (*super().arguments(number), number % 3 == 2)

    def step(self, x: torch.Tensor, side: bool) -> Any:
        loss = (self.model(x, side) - x[:, :3]).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.detach(), "norm": norm}


def adamw_foreach(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, foreach=True)


@pytest.mark.parametrize(
    ("ranks", "make", "stage"),
    [
        (2, adamw_foreach, 3),
        # Each compiles five graphs; test_step_gate.py has the long ones, on two ranks and on three.
        (3, Lars, 2),
        *long((2, nadam, 0), (2, rprop, 1), (3, adamw_foreach, 3), (3, rprop, 1)),
    ],
    indirect=["ranks"],
    scope="session",
)
def test_a_parameter_may_get_no_gradient_in_some_steps(ranks: Ranks, make: Any, stage: int) -> None:
    for reasons in ranks.run(compare, Setting(SometimesUnused, make, stage=stage, steps=8)):
        assert "arguments" in kinds(reasons)
