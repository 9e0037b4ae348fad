"""Values of Python that a captured step reads: each call computes with those that there are."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.step_loops import Loop, verdicts

SETTINGS = {"scale": 1.0}
FACTOR = 1.0


def by_a_global() -> float:
    return FACTOR * SETTINGS["scale"]


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    kind: Kind = Kind.PLAIN
    inner: Any = None


class Net(nn.Module):
    """A model whose forward reads a factor."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.weights, self.table, self.pair = [1.0, 1.0], {"a": [1.0]}, (1.0, 2.0)
        self.config = Config(inner=SimpleNamespace(gain=1.0))
        self.names: set[str] = set()
        self.queue = collections.deque([1.0], maxlen=3)
        self.number: Any = np.float32(1.0)
        self.calls = 0
        self.last: Any = None
        self.history: list[Any] = []
        self.what = ""

    def factor(self) -> Any:
        return {
            "list": lambda: self.weights[1],
            "dict": lambda: sum(self.table["a"]),
            "tuple": lambda: self.pair[1],
            "config": lambda: self.config.scale,
            "enum": lambda: self.config.kind.value,
            "nested": lambda: self.config.inner.gain,
            "set": lambda: 2.0 if "double" in self.names else 1.0,
            "deque": lambda: sum(self.queue),
            "numpy": lambda: float(self.number),
            "class": lambda: self.shared,
            "global": by_a_global,
            "environ": lambda: float(os.environ.get("ZGRAPH_TEST_FACTOR", "1")),
            "getattr": lambda: getattr(self, "calls") + 1,  # noqa: B009
        }.get(self.what, lambda: 1.0)()

    def plain(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * self.factor()


class PlainNet(Net):
    """Whose forward reads none of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)


class Reads(Loop):
    """The model's forward reads what changes after the second step."""

    what = ""

    def build(self) -> nn.Module:
        net = Net()
        net.what = self.what
        return net

    def advance(self, number: int) -> None:
        if number == 1:
            self.change(self.model)

    def change(self, net: Any) -> None:
        """Change it."""


class OfAList(Reads):
    what = "list"

    def change(self, net: Any) -> None:
        net.weights[1] = 0.5


class OfADict(Reads):
    what = "dict"

    def change(self, net: Any) -> None:
        net.table["a"].append(2.0)


class OfATuple(Reads):
    what = "tuple"

    def change(self, net: Any) -> None:
        net.pair = (1.0, 0.5)


class OfAConfig(Reads):
    what = "config"

    def change(self, net: Any) -> None:
        net.config.scale = 0.5


class OfAnEnum(Reads):
    what = "enum"

    def change(self, net: Any) -> None:
        net.config.kind = Kind.DOUBLE


class OfANestedObject(Reads):
    what = "nested"

    def change(self, net: Any) -> None:
        net.config.inner.gain = 0.5


class OfASet(Reads):
    what = "set"

    def change(self, net: Any) -> None:
        net.names.add("double")


class OfADeque(Reads):
    what = "deque"

    def change(self, net: Any) -> None:
        net.queue.append(2.0)


class OfNumpy(Reads):
    what = "numpy"

    def change(self, net: Any) -> None:
        net.number = np.float32(0.5)


class ByGetattr(Reads):
    what = "getattr"

    def change(self, net: Any) -> None:
        net.calls = 3


class OfAHook(Reads):
    """A forward hook that is registered between steps."""

    def change(self, net: Any) -> None:
        net.second.register_forward_hook(lambda module, args, output: output * 0.5)


class OfAClosure(Loop):
    """A loss made by another function, whose variable is bound anew."""

    def prepare(self) -> None:
        factor = 1.0

        def criterion(output: Tensor) -> Tensor:
            return output.square().mean() * factor

        def change() -> None:
            nonlocal factor
            factor = 0.5

        self.criterion, self.change = criterion, change

    def loss(self, x: Tensor) -> Tensor:
        return self.criterion(self.model(x))

    def advance(self, number: int) -> None:
        if number == 1:
            self.change()


class Scaled:
    """A loss with a number, called as an object."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, output: Tensor) -> Tensor:
        return output.square().mean() * self.scale


class ByAComputedName(Loop):
    """Weights of losses, attributes with numbers."""

    def prepare(self) -> None:
        self.weights = SimpleNamespace(of_0=1.0, of_1=1.0)

    def loss(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return sum(getattr(self.weights, f"of_{number}") * output.square().mean() for number in range(2))  # pyright: ignore

    def advance(self, number: int) -> None:
        if number == 1:
            self.weights.of_1 = 0.5


class OfACallable(Loop):
    def prepare(self) -> None:
        self.criterion = Scaled()

    def loss(self, x: Tensor) -> Tensor:
        return self.criterion(self.model(x))

    def advance(self, number: int) -> None:
        if number == 1:
            self.criterion.scale = 0.5


class OfAPartial(Loop):
    """A loss whose keywords are changed where they are bound."""

    def prepare(self) -> None:
        self.criterion = functools.partial(torch.celu, alpha=1.0)

    def loss(self, x: Tensor) -> Tensor:
        return self.criterion(self.model(x)).mean()

    def advance(self, number: int) -> None:
        if number == 1:
            self.criterion.keywords["alpha"] = 0.5


class OfAGenerator(Loop):
    """Weights of losses, summed in an expression with its own scope."""

    def prepare(self) -> None:
        self.weights = {"a": 1.0, "b": 1.0}

    def loss(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return sum(weight * output.square().mean() for weight in self.weights.values())  # pyright: ignore

    def advance(self, number: int) -> None:
        if number == 1:
            self.weights["b"] = 0.5


class Unread(Reads):
    """What nobody reads may change as it likes; equal values are no change."""

    steps = 6

    def prepare(self) -> None:
        self.counter = SimpleNamespace(steps=0)

    def advance(self, number: int) -> None:
        self.counter.steps += 1
        self.model.weights = list(self.model.weights)
        self.model.config = Config(inner=SimpleNamespace(gain=1.0))


class AddsAnAttribute(Loop):
    """What a loss asks for, and is not there until later: of the loop, and of the model over its class."""

    def build(self) -> nn.Module:
        net = Net()
        net.what = "class"
        return net

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * (self.gain if hasattr(self, "gain") else 1.0)

    def advance(self, number: int) -> None:
        if number == 1:
            self.model.shared = 0.5
        if number == 2:
            self.gain = 0.25


class ReadsItsHistory(Loop):
    """A weight that falls with the number of losses in a list to which the loop appends."""

    def prepare(self) -> None:
        self.losses: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) / (1 + len(self.losses))

    def advance(self, number: int) -> None:
        self.losses.append(float(number))


class KeepsAHistory(Reads):
    """Lists to which the loop appends, and attributes that it adds, which the step does not read."""

    def build(self) -> nn.Module:
        return PlainNet()

    def prepare(self) -> None:
        self.losses: list[float] = []

    def advance(self, number: int) -> None:
        self.losses.append(self.losses[-1] / 2 if self.losses else 1.0)
        self.model.history.append(number)
        self.best = self.model.best = number
        setattr(self, f"after_{number}", number)


class KeepsALoss(Reads):
    """An auxiliary loss that a forward leaves on its module, as mixtures of experts do."""

    def loss(self, x: Tensor) -> Tensor:
        output = self.model(x)
        self.model.last = output.abs().mean()
        return output.square().mean() + self.model.last

    def left(self) -> dict[str, Any]:
        return {"last": self.model.last}


class ClearsAList(Reads):
    """Losses collected in a list, which is empty between steps."""

    def loss(self, x: Tensor) -> Tensor:
        output = self.model(x)
        self.model.history.append(output.abs().mean())
        loss = output.square().mean() + sum(self.model.history)
        self.model.history.clear()
        return loss


class Global(Reads):
    what = "global"

    def prepare(self) -> None:
        SETTINGS["scale"] = 1.0


class Environ(Reads):
    what = "environ"

    def prepare(self) -> None:
        os.environ.pop("ZGRAPH_TEST_FACTOR", None)


SOME: list[type[Loop]] = [OfAConfig, KeepsALoss, Unread]
OTHERS: list[type[Loop]] = [OfAList, OfADict, OfATuple, OfAnEnum, OfANestedObject, OfASet, OfADeque, OfNumpy, ByGetattr]
OTHERS += [
    OfAHook,
    OfAClosure,
    AddsAnAttribute,
    ReadsItsHistory,
    OfACallable,
    OfAPartial,
    ByAComputedName,
    OfAGenerator,
    ClearsAList,
]


@worlds(2)
@pytest.mark.parametrize(("kinds", "stage"), [(SOME, 3), (OTHERS, 2)])
def test_values_that_change_between_steps_are_no_constants(ranks: Ranks, kinds: list[type[Loop]], stage: int) -> None:
    for found in ranks.run(verdicts, kinds, [stage]):
        assert {name: text for name, text in found.items() if text != "right"} == {}


def reasons_of_a_history() -> list[str]:
    loop, report = KeepsAHistory(3), zgraph.Report()
    step = zgraph.training_step(loop.model, loop.opt, options={"lowering": "fx", "report": report})(loop.step)
    for number in range(4):
        step(torch.ones(3, 4))
        loop.advance(number)
    return [graph.reason for graph in report.graphs]


@worlds(2)
def test_unread_values_cause_no_new_graph(ranks: Ranks) -> None:
    for reasons in ranks.run(reasons_of_a_history):
        assert reasons == [""]


def of_the_process() -> list[str]:
    """What both models read: changed at once for the captured and for the plain one."""
    texts: list[str] = []
    for kind in (Global, Environ):
        captured, report = kind(3), zgraph.Report()
        options = {"lowering": "fx", "report": report}
        step = zgraph.training_step(captured.model, captured.opt, options=options)(captured.step)
        x = torch.ones(3, 4)
        step(x), step(x)
        for value in (2.0, 0.0):
            if kind is Global:
                SETTINGS["scale"] = value
            else:
                os.environ["ZGRAPH_TEST_FACTOR"] = str(value)
            expected = captured.loss(x).detach()
            texts.append(f"{torch.equal(step(x), expected)}")
        os.environ.pop("ZGRAPH_TEST_FACTOR", None)
        SETTINGS["scale"] = 1.0
        texts.append(report.graphs[-1].reason)
    return texts


@worlds(2)
def test_globals_and_the_environment_are_no_constants(ranks: Ranks) -> None:
    for texts in ranks.run(of_the_process):
        assert texts[:2] == texts[3:5] == ["True", "True"]
        assert "SETTINGS['scale']=0.0" in texts[2]
        assert "os.environ['ZGRAPH_TEST_FACTOR']='0.0'" in texts[5]
