"""Hooks from before `shard`, on parameters and on modules: they run as on the plain model, or were refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks
from tests.support.user_loops import Run, check_right

STAGES = (3, 2, 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.enter(x))), y)


def masked(grad: Tensor) -> Tensor:
    """The first rows do not learn; the mask is as long as the parameter is."""
    return grad * (torch.arange(7) >= 3).float().unsqueeze(1)


def masking() -> nn.Module:
    model = Net()
    model.enter.weight.register_hook(masked)
    model.enter.weight.register_hook(lambda grad: grad * 2.0)
    return model


def removed() -> nn.Module:
    """The handle from before removes the hook afterwards."""
    model = Net()
    model.handles = [model.enter.weight.register_hook(masked)]
    return model


def counting() -> nn.Module:
    model = Net()
    model.seen = []

    def note(parameter: Tensor) -> None:
        model.seen.append(0 if parameter.grad is None else tuple(parameter.shape))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    return model


BUILDS = (masking, counting, removed)


def train(run: Run) -> None:
    opt = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for handle in getattr(run.model, "handles", ()):
        handle.remove()
    for _, x, y in run.batches():
        opt.zero_grad()
        run.call(x, y).backward()
        run.log_grads()
        opt.step()


def hooks_run(build: Callable[[], nn.Module], mode: str, stage: int) -> None:
    models: list[Any] = []

    def kept() -> nn.Module:
        models.append(build())
        return models[-1]

    check_right(kept, train, mode, stage)
    if build is counting:
        plain, sharded = (sorted(model.seen) for model in models)
        assert sharded == plain and len(plain) == 12


@pytest.mark.parametrize(
    ("build", "stage", "mode"),
    [
        *((build, stage, "eager") for build in BUILDS for stage in STAGES),
        *((build, STAGES[place], "fx") for place, build in enumerate(BUILDS)),
        # A graph more each; each kind of hook and each stage is compiled above.
        *long(*((build, STAGES[place - turn], "fx") for place, build in enumerate(BUILDS) for turn in (1, 2))),
    ],
)
def test_hooks_from_before_shard_run(ranks: Ranks, build: Callable[[], nn.Module], stage: int, mode: str) -> None:
    ranks.run(hooks_run, build, mode, stage)


# --- hooks on modules, and what is made of them -------------------------------------------------------------------


def scaling() -> nn.Module:
    """A hook on a module's backward that scales, and one on its forward that adds what it reads of the module."""
    model = Net()
    model.enter.register_full_backward_hook(lambda module, given, grads: (None if given[0] is None else given[0] * 2,))
    model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    model.enter.register_forward_hook(lambda module, given, out: out + module.bias.tanh())
    model.head.register_forward_pre_hook(lambda module, given: (given[0] * module.weight.mean(),))
    return model


def parametrized() -> nn.Module:
    model = Net()
    parametrizations.weight_norm(model.enter)
    parametrizations.orthogonal(model.head)
    return model


def normed() -> nn.Module:
    model = Net()
    weight_norm(model.enter)
    spectral_norm(model.head)
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {"scaling": scaling, "parametrized": parametrized, "normed": normed}


def wrapped(build: str, mode: str, stage: int) -> None:
    check_right(WRAPPED[build], train, mode, stage)


@pytest.mark.parametrize(
    ("build", "stage", "mode"),
    [
        *((build, stage, "eager") for build in WRAPPED for stage in (0, 3)),
        ("scaling", 3, "fx"),
        ("parametrized", 0, "fx"),
        ("normed", 3, "fx"),  # what parametrized is, without classes of its own
        *long(("scaling", 0, "fx"), ("parametrized", 3, "fx"), ("normed", 0, "fx")),
    ],
)
def test_hooks_on_modules_run(ranks: Ranks, build: str, stage: int, mode: str) -> None:
    ranks.run(wrapped, build, mode, stage)


def attributes() -> tuple[Any, Any]:
    model = nn.Linear(3, 3)
    model.weight.group = "matrices"
    zgraph.shard(model)
    return model.weight.group, getattr(model.bias, "group", None)


def test_attributes_of_parameters_stay(ranks: Ranks) -> None:
    assert ranks.run(attributes) == [("matrices", None)] * 2
