"""`options={"check": True}`: the first calls of a captured step are judged by its plain lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.budget import long
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks, worlds
from tests.support.step_loops import Loop, batch, verdicts
from zgraph.step.capture.lifted import Lifted
from zgraph.step.capture.stand_ins import WINDOW
from zgraph.step.judge import Before
from zgraph.step.outside.variables import Outside

P = zgraph.passes


class WithDropout(Loop):
    """Random numbers, buffers, a scaler and an average: all of them are put back."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        with torch.no_grad():
            for one, parameter in zip(self.average, self.model.parameters(), strict=True):
                one.lerp_(parameter, 0.5)
        self.opt.zero_grad()
        return loss.detach()

    def left(self) -> dict[str, Any]:
        held = {f"average {number}": one for number, one in enumerate(self.average)}
        return held | {"scale": self.scaler.get_scale()} | dict(self.model.named_buffers())


class LeavesGradients(Loop):
    def step(self, x: Tensor) -> Any:
        self.opt.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        return loss.detach()


@worlds(2)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [(WithDropout, 3), (LeavesGradients, 2), (WithDropout, 0), *long((LeavesGradients, 1))],  # the same copies
)
def test_a_checked_step_goes_on_as_if_nobody_had_looked(ranks: Ranks, kind: type[Loop], stage: int) -> None:
    for found in ranks.run(verdicts, [kind], [stage], 2):
        assert set(found.values()) == {"right"}


class Hidden:
    """A value in a list so long that a step compares only its length."""

    def __init__(self) -> None:
        self.held = [1.0] * 1001

    def read(self) -> float:
        return self.held[1000]

    def change(self) -> None:
        self.held[1000] = 0.5


class ReadsAHiddenNumber(Loop):
    """On rank 1 alone, from the third call on."""

    def prepare(self) -> None:
        self.hidden = Hidden()

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * self.hidden.read()

    def advance(self, number: int) -> None:
        if number == 1 and dist.get_rank() == 1:
            self.hidden.change()


def judged(every: int) -> tuple[list[int], str]:
    """Calls that returned, and the error."""
    loop = ReadsAHiddenNumber(3)
    step = zgraph.training_step(loop.model, loop.opt, options={"lowering": "fx", "check": every})(loop.step)
    returned: list[int] = []
    for number in range(6):
        try:
            step(batch(number))
        except zgraph.ZgraphError as error:
            return returned, str(error)
        returned.append(number)
        loop.advance(number)
    return returned, ""


@worlds(2)
def test_difference_on_one_rank_is_an_error_on_all(ranks: Ranks) -> None:
    for returned, error in ranks.run(judged, 4):
        assert returned == [0, 1, 2, 3]  # the third and the fourth are not compared
        assert "differs from its plain lines" in error
        assert "on rank 0 parameter 0.weight differs in" in error
        assert "(and on ranks [1])" in error
    for returned, error in ranks.run(judged, True):
        assert returned == [0, 1, 2, 3, 4, 5] and not error


def test_where_a_forward_stands_in_its_window_is_put_back() -> None:
    cpu = torch.device("cpu")
    with fake_world(2):
        loop = Loop(1)
        lifted = Lifted.of(loop.model, [loop.opt])
        (scope,) = lifted.scopes()
        found = {name: getattr(scope, name) for name in WINDOW}
        before = Before(lifted, Outside.of(loop.step, loop.model, frozenset(), cpu), cpu)
        with zgraph.no_sync(loop.model):
            loop.loss(torch.ones(2, 4))
        assert scope.last != found["last"]
        before.restore()
    assert {name: getattr(scope, name) for name in WINDOW} == found


def test_check_is_refused_where_nothing_is_to_be_compared() -> None:
    model = nn.Linear(3, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    lossy = zgraph.PassList(P.presets.default(compression=P.LoCo()))
    with pytest.raises(ValueError, match="compress_gradients, which they do not have; check the step once without"):
        zgraph.training_step(model, opt, options={"check": True, "passes": lossy})
    with pytest.raises(ValueError, match="check=-1 is neither a bool nor a number of calls; write True"):
        zgraph.training_step(model, opt, options={"check": -1})
    with pytest.raises(Exception, match="check requires a whole step"):
        torch.compile(model, backend="zgraph", options={"check": True})(torch.ones(2, 3))


def by_inductor() -> None:
    loop = Loop(2)
    step = zgraph.training_step(loop.model, loop.opt, options={"check": True})(loop.step)
    for number in range(3):
        step(batch(number))


@worlds(2)
def test_a_step_for_inductor_is_checked_operator_by_operator(ranks: Ranks) -> None:
    ranks.run(by_inductor)
