"""Hooks on parameters, and writes to parameters, in a captured step: done as the lines do them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.step_loops import Loop, batch, verdict, verdicts

ROWS = 3  # of a weight that are not to learn


def mask_like(weight: Tensor) -> Tensor:
    """0.0 for the rows that stay as they are."""
    mask = (torch.arange(weight.shape[0]) >= ROWS).to(weight.dtype).unsqueeze(1)
    if isinstance(weight, DTensor):
        return distribute_tensor(mask, weight.device_mesh, weight.placements, src_data_rank=None)
    return mask


class Masked(Loop):
    """A hook computes its mask itself."""

    def prepare(self) -> None:
        self.model[0].weight.register_hook(lambda grad: grad * mask_like(grad))


class MaskedFromOutside(Loop):
    """A hook has its mask in a variable, and multiplies by a number that changes."""

    def prepare(self) -> None:
        mask = mask_like(self.model[0].weight.detach())
        self.factor = 1.0
        self.model[0].weight.register_hook(lambda grad: grad * mask * self.factor)

    def advance(self, number: int) -> None:
        self.factor = 0.5


class MaskedByAnObject(Loop):
    """The same as an object and a partial."""

    class Mask:
        def __init__(self, mask: Tensor) -> None:
            self.mask = mask

        def __call__(self, grad: Tensor) -> Tensor:
            return grad * self.mask

    def prepare(self) -> None:
        self.model[0].weight.register_hook(self.Mask(mask_like(self.model[0].weight.detach())))
        self.model[2].weight.register_hook(partial(torch.mul, torch.tensor(0.5)))


class HooksComeAndGo(Loop):
    def prepare(self) -> None:
        self.handle: Any = None

    def advance(self, number: int) -> None:
        if number == 1:
            self.handle = self.model[0].weight.register_hook(lambda grad: grad * 0.5)
        if number == 2:
            self.handle.remove()


class HookForOneBackward(Loop):
    """Registered and removed by the step itself."""

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        handle = self.model[0].weight.register_hook(lambda grad: grad * 0.5)
        loss.backward()
        handle.remove()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()


class StepsInBackward(Loop):
    """One optimizer for each parameter, which steps as soon as there is a gradient."""

    def prepare(self) -> None:
        self.of = {p: torch.optim.AdamW([p], lr=0.05, eps=1e-3, fused=True) for p in self.model.parameters()}
        for parameter in self.of:
            parameter.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: Tensor) -> None:
        self.of[parameter].step()
        self.of[parameter].zero_grad()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return list(self.of.values())

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        return loss.detach()


class ClipsInBackward(Loop):
    """Gradients are clipped, each by itself, once they are there."""

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.clip)

    def clip(self, parameter: Any) -> None:
        parameter.grad.clamp_(-0.01, 0.01)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        self.teacher.requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.mul_(0.5).add_(theirs, alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


class FollowsInPlace(Loop):
    def build(self) -> nn.Module:
        return Teacher()

    def step(self, x: Tensor) -> Any:
        found = super().step(x)
        self.model.follow()
        return found


RIGHT = [Masked, MaskedFromOutside, StepsInBackward]
OTHERS = [MaskedByAnObject, HooksComeAndGo, HookForOneBackward, ClipsInBackward, FollowsInPlace]


def right(kinds: list[type[Loop]], stages: list[int]) -> dict[str, str]:
    return {name: text for name, text in verdicts(kinds, stages).items() if text != "right"}


@worlds(2)
@pytest.mark.parametrize(("kinds", "stages"), [(RIGHT, [2]), (OTHERS, [3]), (RIGHT, [0, 1, 3]), (OTHERS, [0])])
def test_hooks_on_parameters_run_in_a_captured_step(ranks: Ranks, kinds: list[type[Loop]], stages: list[int]) -> None:
    for wrong in ranks.run(right, kinds, stages):
        assert wrong == {}


def precise() -> dict[str, str]:
    """In bf16, under autocast, and compiled by Inductor."""

    class UnderAutocast(Masked):
        def loss(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().loss(x)

    found = {kind.__name__: verdict(kind, 3, param_dtype=torch.bfloat16) for kind in RIGHT}
    return found | {"autocast": verdict(UnderAutocast, 2)}


@worlds(2)
def test_hooks_run_in_every_precision(ranks: Ranks) -> None:
    for found in ranks.run(precise):
        assert set(found.values()) == {"right"}, found


def by_inductor() -> float:
    captured, plain = Masked(2), Masked(2)
    step = zgraph.training_step(captured.model, captured.opt)(captured.step)
    for number in range(3):
        torch.testing.assert_close(step(batch(number)), plain.step(batch(number)))
    first = captured.model[0].weight.full_tensor()[:ROWS]
    return (first - plain.model[0].weight.full_tensor()[:ROWS]).abs().max().item()


@worlds(2)
def test_hooks_run_in_a_step_compiled_by_inductor(ranks: Ranks) -> None:
    for off in ranks.run(by_inductor):
        assert off < 1e-6


def assigned(how: str) -> list[bool]:
    """A moving average by `.data =`, which torch itself loses on a DTensor, equals one in place."""
    models = []
    for assigns in (True, False):
        loop = FollowsInPlace(3)
        model = loop.model

        def follow(model: Any = model) -> None:
            for ours, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                ours.data = ours.data * 0.5 + theirs.data * 0.5

        def step(x: Tensor, loop: Any = loop, assigns: bool = assigns, follow: Callable[[], None] = follow) -> Any:
            found = Loop.step(loop, x)
            follow() if assigns else loop.model.follow()
            return found

        run = zgraph.training_step(model, loop.opt, options={"lowering": "fx"})(step)
        for number in range(3):
            run(batch(number))
        models.append(model)
    ours, theirs = models
    return [
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


@worlds(2)
def test_values_assigned_to_data_are_written(ranks: Ranks) -> None:
    for equal in ranks.run(assigned, ""):
        assert all(equal)


class Renormalized(Loop):
    """`nn.Embedding(max_norm=)`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, max_norm=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.embed(torch.arange(5))

    def build(self) -> nn.Module:
        return self.Net()


class NormalizedRows(Loop):
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
            return super().forward(x)

    def build(self) -> nn.Module:
        return self.Net(4, 3)


class ClampedScalar(Loop):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(5.0))

        def forward(self, x: Tensor) -> Tensor:
            self.gain.data.clamp_(max=2.0)
            return x * self.gain

    def build(self) -> nn.Module:
        return self.Net()


class SharesMemory(FollowsInPlace):
    def step(self, x: Tensor) -> Any:
        self.model.teacher.weight.data = self.model.student.weight.data
        return super().step(x)


class AssignsAnotherKind(FollowsInPlace):
    def step(self, x: Tensor) -> Any:
        self.model.teacher.weight.data = self.model.student.bias.data
        return super().step(x)


class LeavesAHook(Loop):
    def step(self, x: Tensor) -> Any:
        self.model[0].weight.register_hook(lambda grad: grad * 0.5)
        return super().step(x)


class RemovesAHook(Loop):
    def prepare(self) -> None:
        self.handles = [self.model[0].weight.register_hook(lambda grad: grad * 0.5)]

    def step(self, x: Tensor) -> Any:
        found = super().step(x)
        self.handles[0].remove()
        return found


REFUSED = {
    Renormalized: "writes to the parameter embed.weight inside a forward",
    NormalizedRows: "writes to the parameter weight inside a forward",
    ClampedScalar: "writes to the parameter gain inside a forward",
    SharesMemory: "assigns .data that another tensor has",
    AssignsAnotherKind: "assigns .data of another kind",
    LeavesAHook: "registers or removes a hook on 0.weight",
    RemovesAHook: "registers or removes a hook on 0.weight",
}


@worlds(2)
def test_lost_or_one_time_effects_are_refused(ranks: Ranks) -> None:
    for found in ranks.run(verdicts, list(REFUSED), [0, 3]):
        for name, message in found.items():
            kind = next(kind for kind in REFUSED if kind.__name__ == name.partition(",")[0])
            assert message.startswith("zgraph.training_step") and REFUSED[kind] in message, (name, message)
