"""Values of Python that a captured step changes: tensors are left as its lines leave them, all else is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.ranks import Ranks, worlds
from tests.support.step_loops import Loop, verdicts


class Counting(nn.Sequential):
    """Whose forward counts its calls."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input) * (0.5 if self.calls > 2 else 1.0)


class CountsInForward(Loop):
    def build(self) -> nn.Module:
        return Counting(*cast(nn.Sequential, super().build()))


class CountsInTheStep(Loop):
    def prepare(self) -> None:
        self.number = 0

    def loss(self, x: Tensor) -> Tensor:
        self.number += 1
        return super().loss(x)


class AppendsLosses(Loop):
    def prepare(self) -> None:
        self.losses: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        loss = super().loss(x)
        self.losses.append(loss.detach())
        return loss


class CachesATensor(Loop):
    def prepare(self) -> None:
        self.cache: dict[str, Tensor] = {}

    def loss(self, x: Tensor) -> Tensor:
        self.cache["loss"] = super().loss(x)
        return self.cache["loss"]

    def left(self) -> dict[str, Any]:
        return {name: value.detach() for name, value in self.cache.items()}


class KeepsANorm(Loop):
    """Sharded tensors in an attribute, and in one that has been a number."""

    def prepare(self) -> None:
        self.norm: Any = None
        self.total: Any = 0.0

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        self.norm = self.model[0].weight.grad.norm()
        self.total = self.total + self.norm
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def left(self) -> dict[str, Any]:
        return {"norm": self.norm, "total": self.total}


class KeepsALossByNonlocal(Loop):
    def prepare(self) -> None:
        last: Any = None

        def keep(loss: Tensor) -> Tensor:
            nonlocal last
            last = loss.detach()
            return loss

        self.keep, self.last = keep, lambda: last

    def loss(self, x: Tensor) -> Tensor:
        return self.keep(super().loss(x))

    def left(self) -> dict[str, Any]:
        return {"last": self.last()}


class KeepsInTheState(Loop):
    """Weights that the lines keep in the optimizer's state, as sharpness-aware minimization does."""

    def step(self, x: Tensor) -> Tensor:
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        for parameter in self.model.parameters():
            self.opt.state[parameter]["kept"] = parameter.detach().clone()
            parameter.grad = None
        return sum(self.opt.state[parameter]["kept"].square().sum() for parameter in self.model.parameters())  # pyright: ignore

    def left(self) -> dict[str, Any]:
        return {name: self.opt.state[one]["kept"] for name, one in self.model.named_parameters()}


class ReturnsAWholeGradient(Loop):
    def step(self, x: Tensor) -> Tensor:
        self.loss(x).backward()
        found = self.model[0].weight.grad.full_tensor()
        self.opt.step()
        self.opt.zero_grad()
        return found


class ReturnsItFused(ReturnsAWholeGradient):
    """The update writes to gradients, so the gather is waited for before."""

    def prepare(self) -> None:
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05, fused=True)


class KeepsNormsInAList(Loop):
    def prepare(self) -> None:
        self.norms: list[Any] = [None]

    def loss(self, x: Tensor) -> Tensor:
        loss = super().loss(x)
        self.norms[0] = loss.detach()
        return loss


class CountsByNonlocal(Loop):
    def prepare(self) -> None:
        calls = 0

        def weight() -> float:
            nonlocal calls
            calls += 1
            return 1.0 / calls

        self.weight = weight

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * self.weight()


class GoesOnWithAnIterator(Loop):
    def prepare(self) -> None:
        self.numbers = itertools.count(1)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) / next(self.numbers)


class GoesOnWithAGenerator(Loop):
    def prepare(self) -> None:
        self.numbers = (1.0 / number for number in range(1, 100))

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * next(self.numbers)


class DrawsANumber(Loop):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * (0.5 if random.random() < 0.5 else 1.0)


class DrawsByNumpy(Loop):
    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * float(np.random.rand())


class SetsTheSeed(Loop):
    def loss(self, x: Tensor) -> Tensor:
        torch.manual_seed(1234)
        return super().loss(x)


class BindsAParameter(Loop):
    def loss(self, x: Tensor) -> Tensor:
        self.model[2].weight = nn.Parameter(self.model[2].weight.detach() * 0.5)
        return super().loss(x)


class Freezes(Loop):
    def loss(self, x: Tensor) -> Tensor:
        self.model[0].requires_grad_(False)
        return super().loss(x)


class RegistersAHook(Loop):
    def loss(self, x: Tensor) -> Tensor:
        self.model[0].register_forward_hook(lambda module, args, output: output * 0.5)
        return super().loss(x)


REFUSED = {
    CountsInForward: "Counting.calls=1, before 0",
    CountsInTheStep: "self.number=1, before 0",
    AppendsLosses: "self.losses has 1 entries, before 0",
    KeepsNormsInAList: "self.norms[0]=a tensor of shape [], before None, where a graph cannot put its tensors; return",
    CountsByNonlocal: "calls=1, before 0",
    GoesOnWithAnIterator: "self.numbers",
    GoesOnWithAGenerator: "self.numbers",
    DrawsANumber: "draws from random",
    DrawsByNumpy: "draws from numpy.random",
    SetsTheSeed: "sets torch's seed (1234)",
    BindsAParameter: "binds another tensor to the parameter 2.weight",
    Freezes: "sets requires_grad of the parameter 0.weight",
    RegistersAHook: "_forward_hooks",
}


@worlds(2)
def test_changes_to_python_values_are_refused(ranks: Ranks) -> None:
    for found in ranks.run(verdicts, list(REFUSED), [3]):
        for kind, text in REFUSED.items():
            message = found[f"{kind.__name__}, stage 3"]
            assert message.startswith("zgraph.training_step") and text in message, (kind.__name__, message)


KEPT: list[type[Loop]] = [KeepsANorm, KeepsALossByNonlocal, KeepsInTheState, ReturnsAWholeGradient, ReturnsItFused]


@worlds(2)
def test_tensors_that_a_step_keeps_or_returns_are_those_of_each_call(ranks: Ranks) -> None:
    for found in ranks.run(verdicts, KEPT, [3]):
        assert found == {f"{kind.__name__}, stage 3": "right" for kind in KEPT}


@worlds(2)
def test_tensors_put_into_dicts_are_updated_by_each_call(ranks: Ranks) -> None:
    for found in ranks.run(verdicts, [CachesATensor], [3]):
        assert found == {"CachesATensor, stage 3": "right"}
