"""Several optimizers in one captured step, forwards after a step, and steps that are repeated."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import zgraph
from tests.support.budget import long
from tests.support.combinations import shared_folder
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, MIXED, under
from tests.support.step_scripts import LR, Script, Setting, compare, first_kinds, kinds


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, foreach=False)


def adam_foreach(groups: Any) -> optim.Optimizer:
    return optim.Adam(groups, lr=LR, foreach=True)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


class Two(Script):
    """Each optimizer steps a part of the parameters, with a schedule of its own; both are stored midway."""

    def prepare(self) -> None:
        first, *others = self.model.parameters()
        self.opt = self.setting.make([{"params": others[:2]}, {"params": others[2:], "lr": LR / 2}])
        self.other = optim.Adagrad([first], lr=LR, foreach=False)
        self.schedulers = [
            optim.lr_scheduler.ExponentialLR(self.opt, 0.9),
            optim.lr_scheduler.LinearLR(self.other, 0.5, total_iters=4),
        ]

    def optimizers(self) -> list[optim.Optimizer]:
        return [self.opt, self.other]

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in (self.opt, self.other):
            optimizer.step()
        self.model.zero_grad()
        return {"loss": loss.detach(), "norm": norm, "lr": self.other.param_groups[0]["lr"]}

    def advance(self, number: int) -> None:
        for scheduler in self.schedulers:
            scheduler.step()
        if number == 3:
            for optimizer in self.optimizers():
                stored = io.BytesIO()
                torch.save(optimizer.state_dict(), stored)
                stored.seek(0)
                optimizer.load_state_dict(torch.load(stored, weights_only=False))


class Pair(nn.Module):
    """What makes samples, and what judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.judge = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


class Adversaries(Script):
    """Two losses and two optimizers; the second forward through the judge reads what its step has updated."""

    def build(self) -> nn.Module:
        return Pair()

    def prepare(self) -> None:
        maker, judge = (list(part.parameters()) for part in (self.model.maker, self.model.judge))
        self.opt = self.setting.make([{"params": maker[:2]}, {"params": maker[2:]}])
        self.other = optim.RMSprop(judge, lr=LR, foreach=True)

    def optimizers(self) -> list[optim.Optimizer]:
        return [self.opt, self.other]

    def losses(self, x: Tensor) -> Any:
        """The loss of the judge; then, once that has stepped, the one of the maker."""
        made, judge = self.model.maker(x), self.model.judge
        yield F.softplus(-judge(x[:, 2:])).mean() + F.softplus(judge(made.detach())).mean()
        yield F.softplus(-judge(made)).mean()

    def step(self, x: Tensor) -> Any:
        found: dict[str, Tensor] = {}
        losses = self.losses(x)
        for name, optimizer in (("judge", self.other), ("maker", self.opt)):
            optimizer.zero_grad()
            loss = next(losses)
            loss.backward()
            optimizer.step()
            found[name] = loss.detach()
        return found


class OftenJudged(Adversaries):
    """The judge steps twice, and its weights are clamped each time, as Wasserstein GANs do."""

    def step(self, x: Tensor) -> Any:
        for _ in range(2):
            self.other.zero_grad()
            made = self.model.maker(x).detach()
            loss = self.model.judge(made).mean() - self.model.judge(x[:, 2:]).mean()
            loss.backward()
            self.other.step()
            with torch.no_grad():
                for parameter in self.model.judge.parameters():
                    parameter.clamp_(-0.2, 0.2)
        self.opt.zero_grad()
        loss = -self.model.judge(self.model.maker(x)).mean()
        loss.backward()
        self.opt.step()
        return {"loss": loss.detach()}


class Scaled(Adversaries):
    """With one scaler for both; an inf in the fifth step spoils the gradients of the maker alone."""

    def prepare(self) -> None:
        super().prepare()
        self.scaler = zgraph.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def arguments(self, number: int) -> tuple[Any, ...]:
        (x,) = super().arguments(number)
        if number == 4 and torch.distributed.get_rank() == 1:
            x[0, 0] = torch.inf
        return (x,)

    def step(self, x: Tensor) -> Any:
        found: dict[str, Tensor] = {}
        losses = self.losses(x)
        for name, optimizer in (("judge", self.other), ("maker", self.opt)):
            optimizer.zero_grad()
            loss = next(losses)
            self.scaler.scale(loss).backward()
            if name == "judge":
                self.scaler.unscale_(optimizer)
                found["norm"] = torch.nn.utils.clip_grad_norm_(self.model.judge.parameters(), 0.5)
            self.scaler.step(optimizer)
            found[name] = loss.detach()
        self.scaler.update()
        return found

    def left(self) -> dict[str, Any]:
        return super().left() | self.scaler.state_dict()


class Evaluated(Script):
    """A forward behind the step, of which something is returned."""

    def step(self, x: Tensor) -> Any:
        found = super().step(x)
        with torch.no_grad():
            found["after"] = self.model(x)
        return found


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "stage", "close"),
    [
        (Two, adamw_fused, 3, False),
        (Adversaries, adam_foreach, 1, False),
        (Scaled, adamw_fused, 3, False),
        (Evaluated, sgd, 0, False),
        (OftenJudged, sgd, 3, False),
        (Adversaries, adamw_fused, 3, False),
        # The same lines at other stages.
        *long(
            (Two, sgd, 0, False),
            (Adversaries, sgd, 2, False),
            (Adversaries, adamw_fused, 0, False),
            (OftenJudged, adam_foreach, 1, False),
            (Scaled, sgd, 1, False),
            (Evaluated, adamw_fused, 2, False),
        ),
        (Adversaries, sgd, 1, True),  # a C++ compiler takes seconds for each kernel
    ],
)
def test_several_optimizers_step_as_in_the_plain_loop(
    ranks: Ranks, script: type[Script], make: Any, stage: int, close: bool
) -> None:
    started = script is not Two  # whose states are made in the captured step
    for reasons in ranks.run(compare, Setting(script, make, stage=stage, close=close, steps=7, started=started)):
        assert kinds(reasons) == ([""] if started else first_kinds(make))


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "at_rest"),
    [
        (Two, adamw_fused, MIXED),  # one of them fused, the other not
        # What they write is read again in the same step: from disk, and where it rests.
        (Adversaries, adamw_fused, DISK),
        (OftenJudged, sgd, DISK),
        (Evaluated, sgd, DISK),
        (Scaled, adamw_fused, HOST),
        (Evaluated, adamw_fused, HOST),
        (OftenJudged, adam_foreach, MIXED),
    ],
)
def test_several_optimizers_step_on_what_rests_elsewhere(
    ranks: Ranks, script: type[Script], make: Any, at_rest: zgraph.Offload, tmp_path: Path
) -> None:
    started = script is not Two  # whose states are made in the captured step
    setting = Setting(script, make, steps=7, at_rest=under(tmp_path, at_rest), activations=True, started=started)
    for reasons in ranks.run(compare, setting):
        assert kinds(reasons) == ([""] if started else ["", "state"])


class Stored(Two):
    """Goes on from a checkpoint of zgraph's, which holds both optimizers."""

    def advance(self, number: int) -> None:
        if number != 3:
            return
        with shared_folder() as folder:
            path = zgraph.save_checkpoint(folder, self.model, self.optimizers(), step=number)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(2)
            for optimizer in self.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] *= 2
                for entries in optimizer.state.values():
                    for value in entries.values():
                        value.add_(1)
            zgraph.load_checkpoint(path, self.model, self.optimizers())
            torch.distributed.barrier()  # before the folder goes


class NotStored(Two):
    """Never stops."""

    def advance(self, number: int) -> None:
        pass


def resumed(at_rest: zgraph.Offload | None) -> list[bool]:
    found: list[list[Tensor]] = []
    for kind in (Stored, NotStored):
        script = kind(Setting(kind, adamw_fused, at_rest=at_rest))
        step = zgraph.training_step(script.model, script.optimizers(), options={"lowering": "fx"})(script.step)
        for number in range(6):
            step(*script.arguments(number))
            script.advance(number)
        found.append([value.to_local() for value in script.left().values() if hasattr(value, "to_local")])
    return [torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True)]


@worlds(2)
@pytest.mark.parametrize("at_rest", [None, DISK])  # of one optimizer: test_offload_state.py
def test_several_optimizers_go_on_from_a_checkpoint(
    ranks: Ranks, at_rest: zgraph.Offload | None, tmp_path: Path
) -> None:
    for equal in ranks.run(resumed, under(tmp_path, at_rest)):
        assert equal and all(equal)


def unknown() -> str:
    script = Two(Setting(Two, sgd))
    with pytest.raises(ValueError) as caught:
        zgraph.training_step(script.model, script.opt)(script.step)
    return str(caught.value)


@worlds(2)
def test_an_optimizer_that_was_not_given_is_refused(ranks: Ranks) -> None:
    for error in ranks.run(unknown):
        assert "an optimizer that it was not given, self.other" in error
