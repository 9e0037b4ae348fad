"""State made before the first step: one graph for all steps, and the plain loop's numbers in each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zgraph
from tests.support.ranks import Ranks
from zgraph.step.capture.capture import capture
from zgraph.step.capture.first_state import SAME_FIRST_STEP, first_state, put_first_state, runs_alike, with_state
from zgraph.step.capture.lifted import Lifted


class Averaging(optim.Optimizer):
    """Moves by an average of the gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, self.state[parameter])

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state["mean"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(0.1 * state["mean"])


class OnlyMakesState(Averaging):
    """Its first step moves nothing: it makes zeros, which later steps average into."""

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if state:
            super().update(parameter, state)
        else:
            state["mean"] = torch.zeros_like(parameter)


class BeginsTwice(Averaging):
    """Its first step averages like the others, and moves twice."""

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(parameter)
            parameter.sub_(0.1 * parameter.grad)
        super().update(parameter, state)


class Counts(Averaging):
    """Its second step adds a number to its state, and later ones move half as far."""

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        rate = 0.05 if "half" in state else 0.1
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        elif "half" not in state:
            state["half"] = 1
        state["mean"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(rate * state["mean"])


class AddsLater(Averaging):
    """Adds an entry to its state after two steps, and then moves twice."""

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        if self.param_groups[0]["lr"] < 0.1 and "late" not in state:
            state["late"] = torch.zeros_like(parameter)
            parameter.sub_(0.1 * parameter.grad)
        super().update(parameter, state)


class FailsLater(OnlyMakesState):
    """No step can be captured on its state."""

    def update(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if state:
            raise ValueError("there is state")
        super().update(parameter, state)


MAKERS: dict[str, tuple[Callable[[Any], optim.Optimizer], int]] = {  # and how many graphs two steps need
    "adamw": (partial(optim.AdamW, lr=0.1, amsgrad=True), 1),
    "fused": (partial(optim.AdamW, lr=0.1, fused=True), 1),
    "foreach": (partial(optim.Adam, lr=0.1, foreach=True), 1),
    "nadam": (partial(optim.NAdam, lr=0.1), 1),
    "rmsprop": (partial(optim.RMSprop, lr=0.1, momentum=0.9, centered=True), 1),
    "adamw 8 bits": (partial(zgraph.AdamW8bit, lr=0.1), 1),
    "muon": (partial(optim.Muon, lr=0.1), 1),
    "momentum of SGD": (partial(optim.SGD, lr=0.1, momentum=0.9), 2),
    "only makes state": (OnlyMakesState, 2),
    "moves twice": (BeginsTwice, 2),
    "counts": (Counts, 3),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return zgraph.shard(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)))


def lines(model: nn.Module, optimizer: optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compared(name: str) -> int:
    """The graphs of three steps, whose weights and state are those of the plain loop."""
    make = MAKERS[name][0]
    models = [net(), net()]
    ours, theirs = (make(model.parameters()) for model in models)
    step = zgraph.training_step(models[0], ours, options={"lowering": "fx"})(lines(models[0], ours))
    plain = lines(models[1], zgraph.step_on_shards(theirs) if name == "muon" else theirs)  # DTensors round differently
    for number in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        assert torch.equal(step(x), plain(x))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(whole(one), whole(other))
        assert ours.state[one].keys() == theirs.state[other].keys()
        for key, value in theirs.state[other].items():
            assert torch.equal(whole(ours.state[one][key]), whole(value)), key
            assert type(ours.state[one][key]) is type(value)
    return len(step._variants)


def adding() -> None:
    """State that is there stays, while an entry is added to it."""
    models = [net(), net()]
    ours, theirs = (AddsLater(model.parameters()) for model in models)
    step = zgraph.training_step(models[0], ours, options={"lowering": "fx"})(lines(models[0], ours))
    plain = lines(models[1], theirs)
    for number in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        assert torch.equal(step(x), plain(x))
        if number == 1:
            for optimizer in (ours, theirs):
                optimizer.param_groups[0]["lr"] = 0.05
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(whole(one), whole(other))
        assert ours.state[one].keys() == {"mean", "late"}


def test_state_that_is_there_stays(ranks: Ranks) -> None:
    ranks.run(adding)


def rewound() -> None:
    """The optimizer goes back to before its first step, whose graph there is; then an argument changes."""
    models = [net(), net()]
    ours, theirs = (optim.Adam(model.parameters(), lr=0.1) for model in models)

    def scaled(model: nn.Module, optimizer: optim.Optimizer) -> Callable[[Tensor, float], Tensor]:
        def step(x: Tensor, scale: float) -> Tensor:
            loss = model(x).square().mean() * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    before = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs)]
    step = zgraph.training_step(models[0], ours, options={"lowering": "fx"})(scaled(models[0], ours))
    plain = scaled(models[1], theirs)
    for number, scale in enumerate((1.0, 1.0, 1000.0, 1000.0)):
        if number == 1:
            for optimizer, state in zip((ours, theirs), before, strict=True):
                optimizer.load_state_dict(state)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        assert torch.equal(step(x, scale), plain(x, scale))


def test_a_capture_serves_only_its_own_call(ranks: Ranks) -> None:
    ranks.run(rewound)


def all_compared() -> dict[str, int]:
    return {name: compared(name) for name in MAKERS}


def test_steps_are_those_of_the_plain_loop(ranks: Ranks) -> None:
    for found in ranks.run(all_compared):
        assert found == {name: graphs for name, (_, graphs) in MAKERS.items()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)


def failing() -> None:
    model = net()
    optimizer = FailsLater(model.parameters())
    step = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(lines(model, optimizer))
    step(torch.ones(2, 4))
    assert len(optimizer.state) == 2
    with pytest.raises(ValueError, match="there is state"):
        step(torch.ones(2, 4))


def test_a_later_step_that_fails_does_not_fail_the_first(ranks: Ranks) -> None:
    ranks.run(failing)


OF_TORCH = SAME_FIRST_STEP - {zgraph.AdamW8bit}
# Each kernel of each optimizer that is taken to run the same operators in its first step as in later ones.
KNOWN: dict[str, Callable[[Any], optim.Optimizer]] = {
    f"{kind.__name__}, {kernel}, {options}": partial(kind, lr=0.1, **{kernel: True}, **options)
    for kind in sorted(OF_TORCH, key=lambda kind: kind.__name__)
    for kernel in ("foreach", "fused")
    if kernel != "fused" or kind in (optim.Adam, optim.AdamW)
    for options in (
        {},
        {"weight_decay": 0.1, "maximize": True},
        *([{"amsgrad": True}] if kind in (optim.Adam, optim.AdamW) else []),
        *([{"momentum": 0.9, "centered": True}] if kind is optim.RMSprop else []),
    )
} | {f"{kind.__name__}, one by one": partial(kind, lr=0.1, foreach=False) for kind in OF_TORCH}
KNOWN |= {"AdamW8bit": partial(zgraph.AdamW8bit, lr=0.1), "AdamW8bit, up": partial(zgraph.AdamW8bit, maximize=True)}


def is_as_captured(make: Callable[[Any], optim.Optimizer]) -> bool:
    """Whether a first step that is given its state has the graph of the step that is captured on that state."""
    model = net()
    optimizer = make(model.parameters())
    lifted = Lifted.of(model, [optimizer])
    step, batch = lines(model, optimizer), torch.ones(2, 4)
    first = capture(step, lifted, [batch], {})
    made = first_state(first, lifted)
    assert made, "the first step makes state from constants"
    put_first_state(made, lifted)
    later = capture(step, lifted, [batch], {})
    is_alike = runs_alike(first, made, later, lifted)
    given = with_state(first, made, lifted)
    return is_alike and given is not None and runs_alike(given, [], later, lifted)


def all_given() -> list[str]:
    return [name for name, make in KNOWN.items() if not is_as_captured(make)]


def test_a_given_state_has_the_graph_that_its_capture_has(ranks: Ranks) -> None:
    for differ in ranks.run(all_given):
        assert differ == []
