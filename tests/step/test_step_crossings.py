"""Captured steps beside other features: lossy passes, meshes, units, autocast, Inductor, metrics, reports."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds
from tests.support.step_gate import Lion
from tests.support.step_scripts import LR, Net, Script, Setting, compare, kinds

P = zgraph.passes


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=LR, momentum=0.9, foreach=False)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


class Windowed(Script):
    """Two of three micro-batches are under no_sync."""

    windows = True

    def step(self, x: Tensor) -> Any:
        for number in range(3):
            with zgraph.no_sync(self.model) if self.windows and number < 2 else contextlib.nullcontext():
                loss = self.loss(x + number) / 3
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.detach(), "norm": norm}


class Accumulated(Windowed):
    """Each micro-batch is reduced by itself."""

    windows = False


class Autocast(Script):
    def loss(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.called(x)
        return (out.float() - x[:, :3]).square().mean()


class Unit(Script):
    """The whole model gathers at once."""

    def sharded(self) -> dict[str, Any]:
        return {"units": [Net]}


class Hybrid(Windowed):
    """Two replicas; of shards there is one each."""

    def sharded(self) -> dict[str, Any]:
        return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))}


LOW_RANK = {"compression": P.LowRank(rank=1, least_saving=1.0)}
EIGHT_BITS = {"gather_compression": P.NoFeedback(bits=8)}


@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "stage", "preset"),
    [
        (Autocast, sgd, 3, EIGHT_BITS),
        # Each of these features is fast without a captured step.
        (Windowed, sgd, 1, LOW_RANK),
        (Unit, adamw_fused, 3, {}),
        (Hybrid, sgd, 2, {}),
        # The same features at other stages, or with fewer of the others.
        *long(
            (Accumulated, sgd, 3, LOW_RANK),
            (Script, adamw_fused, 3, LOW_RANK),
            (Script, adamw_fused, 3, EIGHT_BITS),
            (Windowed, sgd, 2, EIGHT_BITS),
            (Unit, sgd, 1, {}),
            (Hybrid, adamw_fused, 3, {}),
            (Autocast, adamw_fused, 2, {}),
        ),
    ],
)
def test_a_captured_step_equals_the_plain_loop(
    ranks: Ranks, script: type[Script], make: Any, stage: int, preset: dict[str, Any]
) -> None:
    for reasons in ranks.run(compare, Setting(script, make, stage=stage, preset=preset, started=True)):
        assert kinds(reasons) == [""]


# One model: what is compiled for one of them is there for the others.
@worlds(2)
@pytest.mark.parametrize(
    ("script", "make", "stage", "bound"),
    [
        (Windowed, sgd, 1, 0.0),
        (Autocast, sgd, 3, 3e-2),
        *long((Unit, sgd, 3, 0.0), (Script, Lion, 3, 0.0)),  # test_step_pairs.py has them, with more
    ],
)
def test_inductor_step_is_close_to_the_plain_loop(
    ranks: Ranks, script: type[Script], make: Any, stage: int, bound: float
) -> None:
    setting = Setting(script, make, stage=stage, close=True, bound=bound, steps=4, started=True)
    for reasons in ranks.run(compare, setting):
        assert kinds(reasons) == [""]


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    def write(self, step: int, values: Any) -> None:
        self.values.append(dict(values))

    def close(self) -> None:
        pass


def metered(script_of: type[Script]) -> tuple[list[dict[str, Any]], str, str, int]:
    script, report, kept = script_of(Setting(script_of, sgd)), zgraph.Report(), Kept()
    metrics = zgraph.Metrics(script.model, writers=[kept])
    step: Any = zgraph.training_step(script.model, script.opt, options={"lowering": "fx", "report": report})(
        script.step
    )
    for number in range(4):
        found = step(*script.arguments(number))
        metrics.step(tokens=20, loss=found["loss"])
    metrics.close()
    with zgraph.measure(script.model):
        step(*script.arguments(4))
    return (
        kept.values,
        f"{zgraph.summary(script.model)}",
        f"{zgraph.explain(script.model)}",
        report.graphs[-1].sent_bytes,
    )


@worlds(2)
@pytest.mark.parametrize("script", [Autocast, Script])
def test_metrics_and_reports_see_whole_steps(ranks: Ranks, script: type[Script]) -> None:
    for values, summary, explained, sent_bytes in ranks.run(metered, script):
        assert len(values) == 4
        for found in values[1:]:
            assert found["sent_bytes"] == sent_bytes > 0
            assert found["exposed_ms"] is not None
            assert found["graph_peak_bytes"] > 0
            assert found["tokens_per_s"] > 0
        assert "step" in summary
        assert "measured" in explained
