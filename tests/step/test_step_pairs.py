"""Captured steps in which two features meet that have tests of their own: one small model, one row for each pair."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.combinations import shared_folder
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, MIXED, under
from tests.support.shared_memory import SharedMemory
from tests.support.step_gate import Lion
from tests.support.step_scripts import LR, Script, Setting, compare, first_kinds, kinds
from tests.support.whole_tensors import whole

P = zgraph.passes
H100 = zgraph.Hardware.preset("h100")
TARGET = zgraph.Target(hardware=H100)
LOW_RANK = {"compression": P.LowRank(rank=1, least_saving=1.0)}
EIGHT_BITS = {"gather_compression": P.NoFeedback(bits=8)}
STEPS = 6


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, foreach=False)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


class Clipped(Script):
    """Two micro-batches, of which the first may be under no_sync, and clipping by the norm of all gradients."""

    windows = False

    def step(self, x: Tensor) -> Any:
        with zgraph.no_sync(self.model) if self.windows else contextlib.nullcontext():
            self.loss(x * 0.5).backward()
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers():
            optimizer.step()
        self.model.zero_grad()
        return {"loss": loss.detach(), "norm": norm}


class Windowed(Clipped):
    windows = True


class Two(Clipped):
    """One parameter has an optimizer of its own."""

    def prepare(self) -> None:
        first, *others = self.model.parameters()
        self.opt = self.setting.make([{"params": others[:2]}, {"params": others[2:], "lr": LR / 2}])
        self.other = optim.Adagrad([first], lr=LR, foreach=False)

    def optimizers(self) -> list[optim.Optimizer]:
        return [self.opt, self.other]


class InTurn(Two):
    """The second optimizer steps by a loss that reads what the first one has updated."""

    def step(self, x: Tensor) -> Any:
        found: dict[str, Any] = {}
        for name, optimizer in (("first", self.opt), ("second", self.other)):
            loss = self.loss(x)
            loss.backward()
            optimizer.step()
            self.model.zero_grad()
            found[name] = loss.detach()
        return found


class Autocast(Clipped):
    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.called(x)
        return (out.float() - x[:, :3]).square().mean()


class Hybrid(Windowed):
    """Two replicas of two shards each."""

    def sharded(self) -> dict[str, Any]:
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


class Stored(Clipped):
    """Goes back to a checkpoint of an earlier step."""

    def prepare(self) -> None:
        self.stack = contextlib.ExitStack()
        self.folder = self.stack.enter_context(shared_folder())

    def advance(self, number: int) -> None:
        if number == 1:
            self.path = zgraph.save_checkpoint(self.folder, self.model, self.opt, step=number)
        if number == 3:
            zgraph.load_checkpoint(self.path, self.model, self.opt)
            torch.distributed.barrier()  # before the folder goes
            self.stack.close()


def run_some(setting: Setting, numbers: range, folder: str) -> tuple[Script, list[Tensor], int]:
    """Train these steps from the latest checkpoint and write one; the script, its losses, its number of graphs."""
    script, report = Clipped(setting), zgraph.Report()
    options = {"lowering": "fx", "report": report}
    step: Any = zgraph.training_step(script.model, script.opt, options=options)(script.step)
    latest = zgraph.latest_checkpoint(folder)
    if latest is not None:
        zgraph.load_checkpoint(latest, script.model, script.opt)
    losses = [step(*script.arguments(number))["loss"] for number in numbers]
    zgraph.save_checkpoint(folder, script.model, script.opt, step=numbers.stop)
    return script, losses, len(report.graphs)


def resumed(setting: Setting) -> int:
    """Train half of the steps, and the other half with a new model from a checkpoint; graphs of the second."""
    plain = Clipped(setting)
    expected = [plain.step(*plain.arguments(number))["loss"] for number in range(STEPS)]
    with shared_folder() as folder:
        _, first, _ = run_some(setting, range(STEPS // 2), folder)
        script, second, graphs = run_some(setting, range(STEPS // 2, STEPS), folder)
        torch.distributed.barrier()  # before the folder goes
    assert torch.equal(torch.stack([*first, *second]), torch.stack(expected))
    theirs = plain.left()
    for name, ours in script.left().items():
        assert ours is theirs[name] is None or torch.equal(whole(ours), whole(theirs[name])), name
    return graphs


@worlds(2)
@pytest.mark.parametrize("stage", [3, 2])
def test_a_clipped_run_is_resumed(ranks: Ranks, stage: int) -> None:
    assert ranks.run(resumed, Setting(Clipped, adamw_fused, stage=stage)) == [1, 1]  # its state is there


# --- several optimizers -----------------------------------------------------------------------------------------------


@worlds(2)
@pytest.mark.parametrize("script", [Two, InTurn])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(Two, adamw_fused, target=TARGET), id="planned"),
        pytest.param(Setting(Two, sgd, target=TARGET, frugal=True), id="frugal"),
        pytest.param(Setting(Two, sgd, close=True, steps=4), id="inductor"),  # compiles C++
    ],
)
def test_several_optimizers_step(ranks: Ranks, script: type[Script], setting: Setting) -> None:
    for reasons in ranks.run(compare, replace(setting, script=script, started=script is InTurn)):
        assert kinds(reasons) == ([""] if script is InTurn else first_kinds(setting.make))


# --- replicated parameters, in a bucket each --------------------------------------------------------------------------


EACH = {"bucket_bytes": 1}


@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(Script, adamw_fused, stage=0, preset=EACH), id="by rules"),
        pytest.param(Setting(Windowed, sgd, stage=0, preset=EACH, target=TARGET), id="planned, no_sync"),
        pytest.param(Setting(InTurn, sgd, stage=0, preset=EACH), id="in turn"),
    ],
)
def test_updates_run_while_later_means_arrive(ranks: Ranks, setting: Setting) -> None:
    for reasons in ranks.run(compare, replace(setting, started=True)):
        assert kinds(reasons) == [""]


# --- replicas of several shards ---------------------------------------------------------------------------------------


@worlds(4)
@pytest.mark.parametrize(
    "setting",
    [
        # Rows below are of stages 2 and 3.
        *(pytest.param(Setting(Hybrid, adamw_fused, stage=stage), id=f"stage {stage}") for stage in (0, 1)),
        *(
            pytest.param(Setting(Hybrid, adamw_fused, stage=stage), id=f"stage {stage}", marks=pytest.mark.long)
            for stage in (2, 3)
        ),
        pytest.param(Setting(Hybrid, sgd, target=TARGET), id="planned"),
        pytest.param(Setting(Hybrid, sgd, preset={"compression": P.LoCo()}), id="loco"),
        pytest.param(Setting(Hybrid, Lion, stage=3), id="own"),
    ],
)
def test_replicas_of_several_shards_step(ranks: Ranks, setting: Setting) -> None:
    for reasons in ranks.run(compare, replace(setting, started=True)):
        assert kinds(reasons) == [""]


@worlds(4)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(Hybrid, adamw_fused, at_rest=HOST), id="host"),
        pytest.param(Setting(Hybrid, adamw_fused, stage=2, at_rest=DISK, activations=True), id="disk, stage 2"),
        pytest.param(Setting(Hybrid, Lion, at_rest=DISK, target=TARGET), id="disk, own, planned"),
    ],
)
def test_replicas_step_on_what_rests_elsewhere(ranks: Ranks, setting: Setting, tmp_path: Path) -> None:
    for reasons in ranks.run(compare, replace(setting, at_rest=under(tmp_path, setting.at_rest), started=True)):
        assert kinds(reasons) == [""]


# --- compiled by Inductor ---------------------------------------------------------------------------------------------


# One model: what is compiled for one of them is there for the others.
@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(Autocast, sgd, stage=2, bound=3e-2), id="autocast"),
        pytest.param(Setting(Windowed, sgd, stage=0), id="no_sync, stage 0", marks=pytest.mark.long),
        pytest.param(Setting(Windowed, sgd, stage=1, preset=LOW_RANK), id="low rank, no_sync", marks=pytest.mark.long),
        pytest.param(Setting(Windowed, sgd, stage=2, preset=EIGHT_BITS), id="quantized gathers, no_sync"),
        pytest.param(Setting(Autocast, Lion, bound=3e-2), id="own, autocast"),
        # One of these features without the other, or both at another stage.
        pytest.param(Setting(Windowed, sgd), id="no_sync, stage 3", marks=pytest.mark.long),
        pytest.param(Setting(Clipped, sgd, preset=LOW_RANK), id="low rank", marks=pytest.mark.long),
        pytest.param(Setting(Clipped, sgd, preset=EIGHT_BITS), id="quantized gathers", marks=pytest.mark.long),
        pytest.param(Setting(Windowed, Lion, stage=2), id="own, no_sync", marks=pytest.mark.long),
    ],
)
def test_a_step_compiled_by_inductor_is_close(ranks: Ranks, setting: Setting) -> None:
    for reasons in ranks.run(compare, replace(setting, close=True, steps=4, started=True)):
        assert kinds(reasons) == [""]


class Halved(Windowed):
    """Parameters travel, and are read, as bfloat16."""

    def sharded(self) -> dict[str, Any]:
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


# Inductor's updates run in islands, which read and write where tensors rest, or copies of what rests on disk.
@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            Setting(Windowed, sgd, at_rest=HOST, activations=True), id="host, no_sync", marks=pytest.mark.long
        ),
        pytest.param(Setting(Halved, sgd, at_rest=DISK, activations=True, bound=3e-2), id="disk, bf16, no_sync"),
        pytest.param(Setting(Autocast, sgd, stage=2, at_rest=MIXED, bound=3e-2), id="both, autocast"),
        pytest.param(Setting(Windowed, sgd, preset={"compression": P.LoCo()}, at_rest=DISK), id="disk, loco, no_sync"),
        pytest.param(
            Setting(InTurn, sgd, at_rest=DISK, target=TARGET), id="disk, in turn, planned", marks=pytest.mark.long
        ),
        pytest.param(Setting(Clipped, Lion, at_rest=HOST, target=TARGET, frugal=True), id="host, own, frugal"),
        pytest.param(Setting(Stored, sgd, at_rest=DISK, activations=True), id="disk, resumed", marks=pytest.mark.long),
    ],
)
def test_a_compiled_step_on_what_rests_elsewhere_is_close(ranks: Ranks, setting: Setting, tmp_path: Path) -> None:
    at_rest = under(tmp_path, setting.at_rest)
    for reasons in ranks.run(compare, replace(setting, at_rest=at_rest, close=True, steps=5, started=True)):
        assert kinds(reasons) == [""]


# --- a tier of the user ----------------------------------------------------------------------------------------------


SHARED = zgraph.Offload(params=SharedMemory(), optimizer=SharedMemory())


class HalvedWindows(Windowed):
    def sharded(self) -> dict[str, Any]:
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(HalvedWindows, adamw_fused, stage=2, at_rest=SHARED),
        *(Setting(Windowed, adamw_fused, stage=stage, at_rest=SHARED) for stage in (0, 1, 3)),
        Setting(Autocast, adamw_fused, at_rest=SHARED),
        Setting(Stored, adamw_fused, at_rest=SHARED),
        Setting(Two, adamw_fused, at_rest=SHARED, target=TARGET),
        Setting(HalvedWindows, sgd, at_rest=SHARED, close=True, bound=3e-2),
    ],
)
def test_a_tier_of_the_user_meets_other_features(ranks: Ranks, setting: Setting) -> None:
    """Windows, bf16, autocast, a checkpoint, two optimizers by costs, and Inductor."""
    ranks.run(compare, setting)
