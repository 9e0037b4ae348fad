"""Options of the optimizer that change from step to step are inputs of a captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, optim

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.step_scripts import LR, Script, Setting, compare, kinds

SGD: dict[str, Any] = {"lr": LR, "momentum": 0.9, "weight_decay": 0.1}
ADAM: dict[str, Any] = {"lr": LR, "weight_decay": 0.1}


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, **SGD, dampening=0.1)


def sgd_foreach(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, **SGD, nesterov=True, foreach=True)


def sgd_fused(groups: Any) -> optim.Optimizer:
    # DTensor has no rule for this kernel.
    return zgraph.step_on_shards(optim.SGD(groups, **SGD, fused=True))


def adamw(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, **ADAM, foreach=False)


def adam_foreach(groups: Any) -> optim.Optimizer:
    return optim.Adam(groups, **ADAM, foreach=True)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, **ADAM, fused=True)


def adamw_smooth(groups: Any) -> optim.Optimizer:
    # Last bits of a gradient near zero do not decide the direction of a step.
    return optim.AdamW(groups, **ADAM, eps=0.1, foreach=False)


def rmsprop(groups: Any) -> optim.Optimizer:
    return optim.RMSprop(groups, **SGD)


class Cycled(Script):
    """Learning rate, momentum and weight decay change with every step."""

    def prepare(self) -> None:
        self.scheduler = optim.lr_scheduler.OneCycleLR(self.opt, max_lr=LR, total_steps=10)

    def step(self, x: Tensor) -> Any:
        return super().step(x) | {"lr": self.opt.param_groups[0]["lr"]}

    def advance(self, number: int) -> None:
        self.scheduler.step()
        for group in self.opt.param_groups:
            group["weight_decay"] *= 0.5


CASES = [
    (sgd, 3, False),
    (adam_foreach, 0, False),
    (sgd_fused, 2, False),
    # The other roads of the same optimizers; adamw_fused with a schedule is in test_training_step.py.
    (adamw, 1, False),
    (sgd_foreach, 2, False),
    (adamw_fused, 3, False),
    (rmsprop, 1, False),
    (sgd, 2, True),
    (adamw_smooth, 3, True),  # a C++ compiler takes seconds for each kernel
]


@worlds(2)
@pytest.mark.parametrize(("make", "stage", "close"), CASES)
def test_momentum_and_weight_decay_may_be_scheduled(ranks: Ranks, make: Any, stage: int, close: bool) -> None:
    for reasons in ranks.run(compare, Setting(Cycled, make, stage=stage, close=close, started=True)):
        assert kinds(reasons) == [""]


class SwitchedOff(Script):
    """Options take values that another branch of the optimizer is for."""

    def advance(self, number: int) -> None:
        if number == 2:
            for group in self.opt.param_groups:
                group["weight_decay"] = 0.0
        if number == 4:
            self.opt.param_groups[1]["nesterov"] = True


@worlds(2)
def test_an_option_that_decides_is_a_guard_and_named(ranks: Ranks) -> None:
    for reasons in ranks.run(compare, Setting(SwitchedOff, sgd_foreach, steps=4)):
        assert kinds(reasons) == ["", "state", "options"]
        assert "weight_decay_0=0.0, before Ne(weight_decay_0, 0" in reasons[2]


def sgd_without_decay(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, weight_decay=0.0, foreach=True)


class SwitchedOn(Script):
    """An option that was zero is so no longer."""

    def advance(self, number: int) -> None:
        if number == 2:
            for group in self.opt.param_groups:
                group["weight_decay"] = 0.1


@worlds(2)
def test_option_found_to_be_zero_is_a_guard(ranks: Ranks) -> None:
    for reasons in ranks.run(compare, Setting(SwitchedOn, sgd_without_decay, steps=5)):
        assert kinds(reasons) == ["", "state", "options"]
        assert "weight_decay_0=0.1" in reasons[2]


class WithTensors(Script):
    """A learning rate that is a tensor, changed in place and replaced."""

    def advance(self, number: int) -> None:
        group = self.opt.param_groups[number % 2]
        if number < 3:
            group["lr"].mul_(0.5)
        else:
            group["lr"] = torch.tensor(LR / number)


def adamw_of_tensors(groups: Any) -> optim.Optimizer:
    for group in groups:
        group["lr"] = torch.tensor(LR)
    return optim.AdamW(groups, fused=True)


@worlds(2)
def test_a_learning_rate_may_be_a_tensor(ranks: Ranks) -> None:
    for reasons in ranks.run(compare, Setting(WithTensors, adamw_of_tensors, started=True)):
        assert kinds(reasons) == [""]
