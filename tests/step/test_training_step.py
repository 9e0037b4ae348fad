"""The whole training step in one graph equals the plain loop, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.whole_steps import Case, Loop, compare, train
from tests.support.whole_tensors import whole

CASES = {
    "stage 3": Case(clip="torch", schedule=True),
    "stage 0": Case(stage=0, optimizer="sgd", clip="zgraph", accumulation=3, no_sync=True),
    "stage 1": Case(stage=1, optimizer="adam", clip="torch", accumulation=3, no_sync=True, schedule=True),
    "stage 2": Case(stage=2, optimizer="adamw_foreach", accumulation=3, no_sync=True, precision="bf16"),
    "stage 3, accumulated": Case(optimizer="sgd_foreach", accumulation=3, clip="zgraph", precision="autocast"),
    "loco": Case(loco=True, clip="torch", optimizer="adagrad", schedule=True),
    "loco, accumulated": Case(loco=True, stage=1, accumulation=3, no_sync=True, optimizer="rmsprop"),
    "loco, twice": Case(loco=True, accumulation=2, optimizer="sgd", clip="zgraph"),
    "loco, window": Case(loco=True, reset_every=2, accumulation=2, no_sync=True, optimizer="sgd"),
    "dropout": Case(dropout=0.5, stage=2, optimizer="adamax", schedule=True),
    "frozen": Case(frozen=True, stage=2, optimizer="adadelta", clip="zgraph", zero_first=True),
    "resumed": Case(resume=True, stage=1, optimizer="adamw_foreach", schedule=True),
    "checkpointed": Case(checkpointed=True, optimizer="sgd", precision="bf16 weights"),
    "compiled": Case(compiled=True, clip="torch"),
}


# Of features that test_step_gate.py has in pairs.
LONG = ("loco, accumulated", "loco, twice", "frozen", "stage 0", "stage 3, accumulated", "dropout")
OTHERS = [name for name in CASES if name not in LONG]


@worlds(2)
@pytest.mark.parametrize("name", [*OTHERS, *long(*LONG)])
def test_a_captured_step_equals_the_plain_loop(ranks: Ranks, name: str) -> None:
    assert ranks.run(compare, replace(CASES[name], started=name in OTHERS and name != "stage 3"))


def close() -> None:
    """Compiled by Inductor, whose kernels round in another order."""
    case = Case(lowering="inductor", optimizer="sgd", clip="zgraph", schedule=True, started=True)
    found, expected = train(case, whole_step=True), train(case, whole_step=False)
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


@worlds(2)
def test_inductor_step_is_close_to_the_plain_loop(ranks: Ranks) -> None:
    ranks.run(close)


def shown(directory: str) -> str:
    """A step planned by costs, dumped, measured and explained."""
    case = Case(clip="torch", optimizer="sgd", accumulation=2)
    loop = Loop(case)
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"))
    pipeline = zgraph.PassList(zgraph.passes.presets.planned(), target=target)
    report = zgraph.Report()
    options = {"lowering": "fx", "passes": pipeline, "dump": directory, "report": report}
    step = zgraph.training_step(loop.model, loop.optimizer, options=options)(loop.plain())
    step(*loop.batch(0))
    with zgraph.measure(loop.model):
        step(*loop.batch(1))
    plain = Loop(case)
    expected = plain.plain()
    for number in range(2):
        expected(*plain.batch(number))
    for ours, theirs in zip(loop.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))
    assert not report.dump_failed
    assert {graph.direction for graph in report.graphs} == {"step"}
    assert report.step_bytes > 0
    return f"{zgraph.summary(loop.model)}{zgraph.explain(loop.model)}"


@worlds(2)
def test_a_step_is_dumped_measured_and_explained(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(shown, str(tmp_path)):
        assert "measured" in text
    written = [path.name for path in tmp_path.rglob("*")]
    assert any(".step." in name for name in written)
    assert "index.html" in written
