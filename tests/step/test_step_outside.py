"""Tensors from outside that a captured step reads and writes, and parameters that it comes to by other ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, MIXED, under
from tests.support.step_scripts import LR, Script, Setting, compare, first_kinds, kinds


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


class Averaged(Script):
    """A list of averages of the shards, updated in the step."""

    def prepare(self) -> None:
        self.averages = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.decay = torch.tensor(0.9)

    def step(self, x: Tensor) -> Any:
        found = super().step(x)
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
                average.mul_(self.decay).add_(parameter, alpha=0.1)
        return found

    def advance(self, number: int) -> None:
        self.decay.mul_(0.99)
        if number == 3:  # others at the same place
            self.averages = [average.clone() for average in self.averages]

    def left(self) -> dict[str, Any]:
        return super().left() | {f"average {number}": one for number, one in enumerate(self.averages)}


class AveragedAtOnce(Averaged):
    """The same by one call for all."""

    def step(self, x: Tensor) -> Any:
        found = Script.step(self, x)
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, [one.detach() for one in self.model.parameters()], 0.1)
        return found


class ByList(Script):
    """Parameters are clipped and cleared by a list that was made before."""

    def prepare(self) -> None:
        self.parameters = list(self.model.parameters())

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 0.1)
        self.opt.step()
        for parameter in self.parameters:
            parameter.grad = None
        return {"loss": loss.detach(), "norm": norm}


class Taught(Script):
    """Another module teaches; it is replaced from time to time, and counts in a buffer."""

    def prepare(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).requires_grad_(False)

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - self.teacher(x)).square().mean()

    def step(self, x: Tensor) -> Any:
        loss = (self.model(x) - self.teacher(x)).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.detach()}

    def advance(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.add_(0.5)

    def left(self) -> dict[str, Any]:
        return super().left() | self.teacher.state_dict()


class Smoothed(Script):
    """torch's own averages."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    def average(self) -> AveragedModel:
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def prepare(self) -> None:
        self.averaged = self.average()

    def step(self, x: Tensor) -> Any:
        found = super().step(x)
        self.averaged.update_parameters(self.model)
        return found

    def left(self) -> dict[str, Any]:
        assert int(self.averaged.n_averaged) == self.setting.steps
        return super().left() | {f"averaged {name}": one for name, one in self.averaged.state_dict().items()}


class OneByOne(Smoothed):
    """The same by a call for each parameter, and for buffers, which one call may not mix with DTensors."""

    def average(self) -> AveragedModel:
        return AveragedModel(self.model, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)


class Equally(Smoothed):
    """All steps count alike, so the factor changes with each."""

    def average(self) -> AveragedModel:
        return AveragedModel(self.model)


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "stage", "close"),
    [
        (Averaged, adamw_fused, 1, False),
        (Taught, adamw_fused, 3, False),
        (AveragedAtOnce, sgd, 0, False),
        (ByList, sgd, 2, False),
        (Averaged, sgd, 2, True),  # a C++ compiler takes seconds for each kernel
        (OneByOne, sgd, 2, False),
        (Equally, adamw_fused, 1, False),
        # The same lines at other stages; what OneByOne and Equally are made of.
        *long((Averaged, sgd, 3, False), (AveragedAtOnce, adamw_fused, 2, False)),
        *long((Smoothed, adamw_fused, 3, False), (Smoothed, sgd, 0, False)),
    ],
)
def test_tensors_that_the_function_names_are_inputs(
    ranks: Ranks, script: type[Script], make: Any, stage: int, close: bool
) -> None:
    started = script not in (Averaged, Equally)  # whose first average is a copy
    for reasons in ranks.run(compare, Setting(script, make, stage=stage, close=close, started=started)):
        expected = ["", "options"] if (script, make) == (Equally, adamw_fused) else first_kinds(make)
        assert kinds(reasons) == ([""] if started else expected)


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "at_rest", "close"),
    # Averages without an offload are above, and an offload without averages in test_offload_state.py.
    [
        (Averaged, adamw_fused, DISK, False),
        (AveragedAtOnce, sgd, HOST, False),
        (Taught, sgd, MIXED, False),
        # The same lines on another tier.
        *long((Averaged, adamw_fused, HOST, False), (AveragedAtOnce, adamw_fused, DISK, False)),
        *long((Smoothed, adamw_fused, HOST, False), (OneByOne, sgd, DISK, False), (ByList, sgd, DISK, False)),
        (Averaged, sgd, MIXED, True),  # compiles C++
    ],
)
def test_averages_follow_what_rests_elsewhere(
    ranks: Ranks, script: type[Script], make: Any, at_rest: zgraph.Offload, close: bool, tmp_path: Path
) -> None:
    started = script is not Averaged  # whose first average is a copy
    setting = Setting(script, make, at_rest=under(tmp_path, at_rest), close=close, started=started)
    for reasons in ranks.run(compare, setting):
        assert kinds(reasons) == ([""] if started else ["", "state"])


def trains_another() -> str:
    script, head = Script(Setting(Script, sgd)), nn.Linear(3, 3)

    @zgraph.training_step(script.model, script.opt, options={"lowering": "fx"})
    def step(x: Tensor) -> None:
        head(script.model(x)).sum().backward()
        script.opt.step()
        script.opt.zero_grad()

    with pytest.raises(zgraph.ZgraphError) as caught:
        step(torch.ones(2, 5))
    return str(caught.value)


@worlds(2)
def test_gradients_of_another_module_are_refused(ranks: Ranks) -> None:
    for error in ranks.run(trains_another):
        assert "not a parameter of its model" in error


def reads_a_view() -> str:
    script = Script(Setting(Script, sgd))
    weight: Any = script.model.get_parameter("first.weight")
    view = weight.to_local().detach()

    @zgraph.training_step(script.model, script.opt, options={"lowering": "fx"})
    def step(x: Tensor) -> Tensor:
        script.loss(x).backward()
        script.opt.step()
        script.opt.zero_grad()
        return view.sum()

    with pytest.raises(zgraph.ZgraphError) as caught:
        step(torch.ones(2, 5))
    return str(caught.value)


@worlds(2)
def test_view_of_a_parameter_is_refused(ranks: Ranks) -> None:
    for error in ranks.run(reads_a_view):
        assert "in step reads a tensor" in error
        assert "memory" in error
