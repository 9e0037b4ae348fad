"""Writers of `zgraph.Metrics`: lines of JSON, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zgraph
from tests.support.graphs import fake_world
from zgraph.metrics import JsonLines, TensorBoard, WeightsAndBiases


def train(*writers: Any, steps: int = 2, **values: float) -> None:
    with zgraph.Metrics(nn.Linear(2, 2), writers=writers) as metrics:
        for _ in range(steps):
            metrics.step(tokens=3, **values)


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_of_json_have_every_value(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    train(JsonLines(path), loss=2.5, worst=float("inf"), least=float("-inf"), none=float("nan"))
    found = lines_of(path)
    assert [row["step"] for row in found] == [1, 2]
    assert [row["loss"] for row in found] == [2.5, 2.5]
    assert found[0]["sent_bytes"] is None and found[0]["tokens_per_s"] > 0
    assert (found[0]["worst"], found[0]["least"], found[0]["none"]) == ("Infinity", "-Infinity", "NaN")


def test_a_second_run_adds_lines(tmp_path: Path) -> None:
    for _ in range(2):
        train(JsonLines(tmp_path / "run.jsonl"))
    assert [row["step"] for row in lines_of(tmp_path / "run.jsonl")] == [1, 2, 1, 2]


def test_line_is_written_when_its_step_ends(tmp_path: Path) -> None:
    metrics = zgraph.Metrics(nn.Linear(2, 2), writers=[JsonLines(tmp_path / "run.jsonl")])
    metrics.step()
    assert len(lines_of(tmp_path / "run.jsonl")) == 1


def test_each_rank_or_only_rank_0_has_a_file(tmp_path: Path) -> None:
    for rank in (0, 1):
        with fake_world(2, rank):
            train(JsonLines(tmp_path / "run.jsonl"), JsonLines(tmp_path / "run-{rank}.jsonl"), steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0.jsonl", "run-1.jsonl", "run.jsonl"]
    assert all(len(lines_of(path)) == 1 for path in tmp_path.iterdir())


class Viewer:
    """What TensorBoard's SummaryWriter and a run of Weights & Biases are to a writer."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_known_values_by_step() -> None:
    viewer = Viewer()
    train(TensorBoard(viewer), loss=2.5)
    tags = ["zgraph/tokens_per_s", "zgraph/step_ms", "zgraph/loss"]
    assert [(tag, step) for tag, _, step in viewer.scalars] == [(tag, step) for step in (1, 2) for tag in tags]
    assert [value for tag, value, _ in viewer.scalars if tag == "zgraph/loss"] == [2.5, 2.5]
    assert not viewer.closed  # it is the user's


def test_tensorboards_own_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install tensorboard to have its files read back")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rank in (0, 1):
        with fake_world(2, rank):
            train(TensorBoard(tmp_path / "one"), TensorBoard(tmp_path / "all-{rank}", prefix="x/"), loss=2.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-0", "all-1", "one"]
    found = EventAccumulator(str(tmp_path / "one")).Reload()
    assert [(each.step, each.value) for each in found.Scalars("zgraph/loss")] == [(1, 2.5), (2, 2.5)]
    assert "x/step_ms" in EventAccumulator(str(tmp_path / "all-1")).Reload().Tags()["scalars"]


def test_weights_and_biases_gets_known_values_by_step() -> None:
    run = Viewer()
    train(WeightsAndBiases(run, prefix=""), loss=2.5)
    assert [step for _, step in run.logged] == [1, 2]
    assert list(run.logged[0][0]) == ["tokens_per_s", "step_ms", "loss"] and run.logged[0][0]["loss"] == 2.5
    assert not run.closed


class Module:
    """The module wandb, before or after wandb.init()."""

    def __init__(self, run: Viewer | None) -> None:
        self.run = run


def test_missing_writer_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(zgraph.ZgraphError, match="TensorBoard is not installed; pip install tensorboard"):
        TensorBoard(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(zgraph.ZgraphError, match="wandb is not installed; pip install wandb"):
        WeightsAndBiases()
    monkeypatch.setitem(sys.modules, "wandb", Module(None))
    with pytest.raises(zgraph.ZgraphError, match=r"no run has begun; call wandb.init\(...\) first"):
        WeightsAndBiases()
    run = Viewer()
    monkeypatch.setitem(sys.modules, "wandb", Module(run))
    train(WeightsAndBiases(), steps=1)
    assert len(run.logged) == 1
