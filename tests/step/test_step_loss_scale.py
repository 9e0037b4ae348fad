"""GradScaler in a captured step: the graph decides whether the optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import zgraph
from tests.support.budget import long
from tests.support.lazy_streams import late_gpu
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, MIXED, STATE, machine, under
from tests.support.step_scripts import LR, Script, Setting, compare, kinds


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, foreach=False)


def adamw_foreach(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, foreach=True)


def adam(groups: Any) -> optim.Optimizer:
    return optim.Adam(groups, lr=LR, amsgrad=True, foreach=False)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


class Scaled(Script):
    """The usual lines, with an inf on one rank in the fifth step."""

    infinite: tuple[int, ...] = (4,)

    def prepare(self) -> None:
        self.scaler = zgraph.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def arguments(self, number: int) -> tuple[Any, ...]:
        (x,) = super().arguments(number)
        if number in self.infinite and torch.distributed.get_rank() == 1:
            x[0, 0] = torch.inf
        return (x,)

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return {"loss": loss.detach(), "norm": norm}

    def advance(self, number: int) -> None:
        self.scales = [*getattr(self, "scales", []), self.scaler.get_scale()]

    def left(self) -> dict[str, Any]:
        assert len(set(self.scales)) > 2
        return super().left() | self.scaler.state_dict() | {"scales": self.scales}


class OfTorch(Scaled):
    """With torch's own scaler, and without unscaling first."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return {"loss": loss.detach()}


class FromTheStart(Scaled):
    """The first steps are skipped, so that there is no state yet."""

    infinite = (0, 1)

    def advance(self, number: int) -> None:
        super().advance(number)
        if not self.opt.defaults["fused"]:  # which decides inside of its step, and has made its state by then
            self.entries = [*getattr(self, "entries", []), len(self.opt.state)]

    def left(self) -> dict[str, Any]:
        return super().left() | ({"entries": self.entries} if hasattr(self, "entries") else {})


class Following(Scaled):
    """Error feedback follows the scale, and forgets steps that are skipped."""

    def prepare(self) -> None:
        super().prepare()
        zgraph.set_loss_scale(self.model, self.scaler)


CASES = [
    (FromTheStart, adamw_foreach, 3, False),
    (Scaled, adamw_foreach, 1, False),
    (OfTorch, adam, 2, False),
    # The same lines with other optimizers, at other stages.
    *long((Scaled, sgd, 3, False), (Scaled, adamw_fused, 0, False), (OfTorch, adamw_fused, 2, False)),
    *long((FromTheStart, adamw_fused, 1, False)),
    (Scaled, sgd, 1, True),  # a C++ compiler takes seconds for each kernel
]


@worlds(2)
@pytest.mark.parametrize(("script", "make", "stage", "close"), CASES)
def test_a_step_with_an_inf_is_skipped_in_the_graph(
    ranks: Ranks, script: type[Script], make: Any, stage: int, close: bool
) -> None:
    started = script is not FromTheStart
    for reasons in ranks.run(compare, Setting(script, make, stage=stage, close=close, steps=7, started=started)):
        # A fused update skips by itself, so its state can be made before the first step.
        assert kinds(reasons) == ([""] if started or make is adamw_fused else ["", "state"])


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "at_rest", "close"),
    [
        # Its state is made in a step that counts. What rests on the host is fast below, where costs choose.
        (FromTheStart, adamw_fused, HOST, False),
        # The same lines on tensors that come from elsewhere, and go back.
        (Scaled, sgd, DISK, False),
        (OfTorch, adamw_fused, DISK, False),
        (Scaled, adamw_foreach, MIXED, False),
        (OfTorch, adam, HOST, False),
        (FromTheStart, adam, DISK, False),
        (Scaled, sgd, DISK, True),  # compiles C++
    ],
)
def test_step_with_an_inf_changes_no_offloaded_tensor(
    ranks: Ranks, script: type[Script], make: Any, at_rest: zgraph.Offload, close: bool, tmp_path: Path
) -> None:
    setting = Setting(script, make, steps=7, at_rest=under(tmp_path, at_rest), activations=True, close=close)
    started = script is not FromTheStart
    for reasons in ranks.run(compare, replace(setting, started=started)):
        assert kinds(reasons) == ([""] if started else ["", "state"])


def compare_on_host(setting: Setting) -> int:
    with late_gpu() as lanes:
        compare(setting)
    return lanes.late.done


@worlds(2)
@pytest.mark.parametrize("script", [OfTorch, Scaled])
def test_gradients_are_unscaled_before_going_to_the_host(ranks: Ranks, script: type[Script]) -> None:
    """Of a GPU, for an update there; one step is skipped."""
    setting = Setting(script, adamw_fused, stage=2, steps=7, at_rest=STATE, started=True)
    assert min(ranks.run(compare_on_host, setting)) > 0


SLOW_BOTH = 1.0, 2.0  # bytes/us of copies and updates, at which one of two updates on the host is fastest


def chosen_by(setting: Setting) -> tuple[list[str], list[str]]:
    """The kinds of the graphs, and where their updates run; the plain loop updates on the device."""
    notes: list[str] = []
    with late_gpu():
        found = kinds(compare(setting, notes))
    return found, [note for note in notes if note.startswith("stream_states") and "us predicted" in note]


@worlds(2)
@pytest.mark.parametrize(
    ("script", "at_rest"),
    [
        (Scaled, HOST),  # clipped: both wait for the norm
        (OfTorch, STATE),
        (FromTheStart, HOST),  # the same kernels; the first divide out the scale themselves
    ],
)
def test_step_with_an_inf_changes_neither_host_nor_device(
    ranks: Ranks, script: type[Script], at_rest: zgraph.Offload
) -> None:
    """On a GPU whose costs let the first updates run on the host and the later ones on the device."""
    target = zgraph.Target(hardware=machine(*SLOW_BOTH))
    started = script is not FromTheStart
    setting = Setting(script, adamw_fused, steps=7, at_rest=at_rest, started=started, target=target)
    first, *others = ranks.run(chosen_by, replace(setting, preset={"bucket_bytes": 64}))
    assert others == [first] * len(others)
    reasons, (chosen,) = first  # the step that makes the state chooses nothing
    assert reasons == ([""] if started else ["", "state"])
    assert "1 of 2 updates on the host, the later ones on the device" in chosen


@worlds(2)
@pytest.mark.parametrize("make", [adamw_fused, sgd])  # which divides the loss's scale out itself
def test_error_feedback_is_told_of_skipped_steps(ranks: Ranks, make: Any) -> None:
    loco = {"compression": zgraph.passes.LoCo()}
    for reasons in ranks.run(compare, Setting(Following, make, preset=loco, steps=7, started=True)):
        assert kinds(reasons) == [""]


def unscaled_alone() -> str:
    script = Scaled(Setting(Scaled, sgd))

    @zgraph.training_step(script.model, script.opt, options={"lowering": "fx"})
    def step(x: Tensor) -> None:
        script.scaler.scale(script.loss(x)).backward()
        script.scaler.step(script.opt)
        script.opt.zero_grad()

    with pytest.raises(zgraph.ZgraphError) as caught:
        step(torch.ones(2, 5))
    script.step(torch.ones(2, 5))  # nothing is left of the try
    return str(caught.value)


@worlds(2)
def test_scaler_not_updated_in_the_step_is_refused(ranks: Ranks) -> None:
    for error in ranks.run(unscaled_alone):
        assert "scaler.update()" in error
