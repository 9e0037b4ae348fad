"""Moments of bf16, rounded stochastically: steps equal plain lines with a plain twin of the kernel, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.budget import long
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, worlds
from tests.support.resting import check_rests, under
from tests.support.rounded_updates import RoundedSteps
from tests.support.whole_steps import Case, Outcome, assert_same, train
from tests.support.whole_tensors import whole

P = zgraph.passes
HOST = zgraph.Offload(optimizer="host", moments_dtype=torch.bfloat16)
BOTH = replace(HOST, params="host")
DISK = zgraph.Offload(params="disk", optimizer="disk", path="given by `under`", moments_dtype=torch.bfloat16)
STATE_ON_DISK = replace(DISK, params=None)

# Any two of tier, stage, precision, window, plan and clipping that may meet stand together in some row.
CASES = {
    "stage 3, host": Case(at_rest=BOTH, clip="torch", schedule=True),
    "stage 2, disk": Case(at_rest=DISK, stage=2, precision="bf16", clip="zgraph", accumulation=2),
    "stage 1, adam": Case(at_rest=HOST, stage=1, optimizer="adam_fused", accumulation=2, no_sync=True, schedule=True),
    "stage 0": Case(at_rest=STATE_ON_DISK, stage=0, optimizer="adam_fused", clip="torch"),
    "loco": Case(at_rest=HOST, stage=2, loco=True, accumulation=2, no_sync=True, clip="torch"),
    "resumed": Case(at_rest=DISK, resume=True, precision="autocast", frozen=True),
    "planned": Case(at_rest=STATE_ON_DISK, frugal=True, stage=1, clip="zgraph", precision="bf16"),
    "planned, streamed": Case(at_rest=BOTH, frugal=True, streamed=True, resume=True, accumulation=2, no_sync=True),
}
LONG = ("stage 1, adam", "stage 0", "planned, streamed")


def twin(case: Case, steps: int) -> Outcome:
    """What the plain lines leave."""
    return train(
        replace(case, at_rest=None, offload=False, lowering="fx"),
        whole_step=False,
        steps=steps,
        prepare=lambda loop: RoundedSteps(loop.model, loop.optimizer),
    )


def compare(case: Case) -> None:
    found = train(case, whole_step=True, steps=4)
    assert_same(found, twin(case, 4))
    moments = [value for key, (_, value) in found.state.items() if "exp_avg" in key]
    assert moments and {value.dtype for value in moments} == {torch.bfloat16}


@worlds(2)
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in LONG), *long(*LONG)])
def test_a_step_with_rounded_moments_equals_the_plain_twin(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(compare, replace(CASES[name], at_rest=under(tmp_path, CASES[name].at_rest)))


# --- in one process ---------------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]
WIDTH = 16
STEPS = 12


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Net(nn.Module):
    """Has a parameter without dims, whose moments do not rest elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


class Training:
    """A small regression."""

    def __init__(self, offload: zgraph.Offload | None, make: Make = adamw, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = zgraph.shard(Net(), offload=offload)
        self.optimizer, self.scaler = make(self.model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        self.report = zgraph.Report()
        self.options: dict[str, Any] = {"lowering": "fx", "report": self.report, **options}
        self.losses: list[float] = []

    def lines(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def scaled_lines(self, x: Tensor, y: Tensor) -> Tensor:
        loss = (self.model(x) - y).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, lines: Any = None) -> Any:
        return zgraph.training_step(self.model, self.optimizer, options=self.options)(lines or self.lines)

    def run(self, function: Any, first: int = 0, last: int = STEPS, overflowing: int | None = None) -> Training:
        for number in range(first, last):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            y = x[:, :1].sin() if number != overflowing else x[:, :1] * torch.inf
            self.losses.append(number_of(function(x, y)))
        return self

    def assert_equals(self, other: Training) -> None:
        assert self.losses == other.losses
        for ours, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(local(ours), local(theirs))
            mine, its = self.optimizer.state[ours], other.optimizer.state[theirs]
            assert list(mine) == list(its) == ["step", "exp_avg", "exp_avg_sq"]
            for key, value in mine.items():
                assert value.dtype == its[key].dtype == (torch.float32 if key == "step" else torch.bfloat16)
                assert torch.equal(local(value), local(its[key]))


def number_of(loss: Tensor) -> float:
    return whole(loss).item()


def test_plain_steps_in_between_round_as_captured_ones() -> None:
    with loopback(1, Wire()):
        captured, mixed, expected = Training(HOST), Training(HOST), Training(None)
        captured.run(captured.step())
        mixed_step = mixed.step()
        mixed.run(mixed.lines, 0, 2).run(mixed_step, 2, 6).run(mixed.lines, 6, STEPS)
        RoundedSteps(expected.model, expected.optimizer)
        captured.assert_equals(expected.run(expected.lines))
        mixed.assert_equals(expected)


def test_steps_on_shards_and_learning_rates_that_are_tensors() -> None:
    """Which another one of torch's kernels takes, and another overload of this one."""
    with loopback(1, Wire()):
        captured = Training(HOST, lambda given: torch.optim.AdamW(given, lr=torch.tensor(1e-2), fused=True))
        plain = Training(HOST, lambda given: torch.optim.AdamW(given, lr=torch.tensor(1e-2), fused=True))
        plain_step = plain.step()
        zgraph.step_on_shards(plain.optimizer)
        captured.run(captured.step()).assert_equals(plain.run(plain_step.function))


def test_a_gradient_scaler_divides_and_skips() -> None:
    """An inf in the third batch changes nothing."""
    with loopback(1, Wire()):
        captured, expected = Training(HOST), Training(None)
        RoundedSteps(expected.model, expected.optimizer)
        captured.run(captured.step(captured.scaled_lines), overflowing=2)
        captured.assert_equals(expected.run(expected.scaled_lines, overflowing=2))
        assert captured.scaler.get_scale() == expected.scaler.get_scale() == 4.0
        (step,) = {number_of(entries["step"]) for entries in captured.optimizer.state.values()}
        assert step == STEPS - 1


def resumed(offload: zgraph.Offload, folder: str) -> None:
    """A training, the same from a checkpoint, and one that loads what was saved with moments of fp32."""
    first = Training(offload)
    step = first.step()
    first.run(step, 0, 5)
    saved = zgraph.save_checkpoint(Path(folder, "rounded"), first.model, first.optimizer, step=5)
    kept = first.optimizer.state_dict()["state"].values()
    dtypes = {key: value.dtype for entries in kept for key, value in entries.items()}
    assert dtypes == {"step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    first.run(step, 5)
    again = Training(offload)
    zgraph.load_checkpoint(saved, again.model, again.optimizer)
    again.losses = first.losses[:5]
    again.run(again.step(), 5).assert_equals(first)
    check_rests(again.model, [again.optimizer])

    exact = Training(replace(offload, moments_dtype=None))
    exact.run(exact.step(), 0, 5)
    saved = zgraph.save_checkpoint(Path(folder, "exact"), exact.model, exact.optimizer, step=5)
    zgraph.load_checkpoint(saved, again.model, again.optimizer)
    again.run(again.step(), 5, 6)
    moments = {value.dtype for entries in again.optimizer.state.values() for value in entries.values()}
    assert moments == {torch.float32, torch.bfloat16} and again.losses[-1] == exact.run(exact.step(), 5, 6).losses[-1]


@worlds(2)
@pytest.mark.parametrize("offload", [STATE_ON_DISK, HOST], ids=["disk", "host"])
def test_checkpoint_holds_two_byte_moments_and_resumes_bitwise(
    ranks: Ranks, offload: zgraph.Offload, tmp_path: Path
) -> None:
    at_rest = under(tmp_path, offload)
    assert at_rest is not None
    ranks.run(resumed, at_rest, str(tmp_path))


def test_half_of_the_bytes_are_read_and_written(tmp_path: Path) -> None:
    """Of moments; the state of this optimizer has no others that rest on disk."""
    moved: list[tuple[int, ...]] = []
    with loopback(1, Wire()):
        for number, offload in enumerate((STATE_ON_DISK, replace(STATE_ON_DISK, moments_dtype=None))):
            training = Training(replace(offload, path=tmp_path / str(number)))
            training.run(training.step(), 0, 2)
            notes = [note for note in training.report.notes if "are brought to the device in" in note]
            moved.append(tuple(map(int, re.findall(r"(\d+) bytes", notes[-1]))))  # the first step makes them
    elements = 32 * WIDTH + 32 + 32 + 1
    assert moved[1] == (8 * elements, 8 * elements) and moved[0] == (4 * elements, 4 * elements)


def test_losses_stay_close_to_those_with_moments_of_fp32() -> None:
    """Over 150 steps, in which a moment rounded to nearest would hardly move."""
    with loopback(1, Wire()):
        rounded, exact = Training(HOST), Training(replace(HOST, moments_dtype=None))
        for training in (rounded, exact):
            training.run(training.step(), 0, 150)
    late = [sum(training.losses[-50:]) / 50 for training in (rounded, exact)]
    assert exact.losses[0] == rounded.losses[0] and late[1] < exact.losses[0] / 10
    assert rounded.losses != exact.losses and abs(late[0] / late[1] - 1) < 0.02


def test_a_step_that_inductor_compiles_rounds_its_moments() -> None:
    with loopback(1, Wire()):
        compiled, plain = Training(HOST, lowering="inductor"), Training(HOST)
        for training in (compiled, plain):
            training.run(training.step(), 0, 4)
        torch.testing.assert_close(torch.tensor(compiled.losses), torch.tensor(plain.losses))
        moments = {value.dtype for entries in compiled.optimizer.state.values() for value in entries.values()}
        assert moments == {torch.float32, torch.bfloat16}


# --- what cannot be honoured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": "host", "moments_dtype": torch.float16},
            r"torch.float16 is not available; write torch.bfloat16",
        ),
        ({"optimizer": "host", "moments_dtype": "bf16"}, r"'bf16' is not available; write torch.bfloat16"),
        ({"params": "host", "moments_dtype": torch.bfloat16}, 'not offloaded; write optimizer="host", or leave'),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zgraph.Offload(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda given: torch.optim.SGD(given, momentum=0.9), r"the optimizer is SGD; use torch.optim.AdamW\("),
        (lambda given: torch.optim.AdamW(given), r"AdamW is not fused; write AdamW\(..., fused=True\)"),
        (
            lambda given: torch.optim.Adam(given, fused=True, amsgrad=True),
            "a third moment, amsgrad=True; leave amsgrad",
        ),
    ],
)
def test_an_optimizer_without_such_moments_is_refused(make: Make, message: str) -> None:
    with loopback(1, Wire()):
        training = Training(HOST, make)
        with pytest.raises(ValueError, match=message):
            training.step()


def test_parameters_of_bf16_are_refused() -> None:
    with loopback(1, Wire()):
        model = zgraph.shard(nn.Linear(4, 4).bfloat16(), offload=HOST)
        with pytest.raises(ValueError, match=r"\[4, 4\] is torch.bfloat16; keep parameters in float32"):
            zgraph.training_step(model, adamw(model.parameters()))


def test_training_without_a_captured_step_is_refused() -> None:
    """Forwards with gradients, and steps on gradients that somebody else has made."""
    with loopback(1, Wire()):
        training = Training(HOST)
        with pytest.raises(zgraph.ZgraphError, match=r"only that can round moments; .* or leave moments_dtype out"):
            training.run(training.lines, 0, 1)
        with torch.no_grad():
            training.model(torch.zeros(2, WIDTH))
        with pytest.raises(zgraph.ZgraphError, match=r"a step of AdamW, .* no zgraph.training_step was given; pass it"):
            training.optimizer.step()
        adamw([nn.Parameter(torch.zeros(3))]).step()  # of another model
        training.step()
        with pytest.raises(zgraph.ZgraphError, match="a step of AdamW with a closure, and moments_dtype"):
            training.optimizer.step(lambda: 0.0)
