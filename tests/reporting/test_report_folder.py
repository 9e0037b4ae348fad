"""The folder of a report: on real ranks, crossed with lowerings, stages, compression, plans and windows."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jsonschema import Draft202012Validator
from torch import nn

import zgraph
from tests.support.graphs import compile_model, fake_world, mlp
from tests.support.ranks import Ranks
from zgraph.errors import ZgraphError
from zgraph.passes import LoCo, presets
from zgraph.reporting.export.reading import bytes_by_class, line_text, load, names_of, texts_of
from zgraph.reporting.export.report_json import schema

WIDTH = 128  # wide enough for a weight to be compressed
VALIDATOR = Draft202012Validator(schema())
HARDWARE = zgraph.Hardware.preset("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to compile a model."""

    lowering: str = "fx"
    zero_stage: int = 3
    compressed: bool = False
    planned: bool = False
    windows: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}={value}" for name, value in vars(self).items() if value)

    def options(self) -> dict[str, Any]:
        compression = LoCo() if self.compressed else None
        if not self.planned:
            return {"passes": zgraph.PassList(presets.default(compression=compression)), "lowering": self.lowering}
        passes = presets.planned(compression=compression)
        return {
            "passes": zgraph.PassList(passes, target=zgraph.Target(hardware=HARDWARE, budget_bytes=2**24)),
            "lowering": self.lowering,
        }


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def reports(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("report.json"))}


def train(case: Case, directory: Path, dump: bool) -> dict[str, Any]:
    """Two steps, the second one measured, and a report; what the library says of them in other ways."""
    model = zgraph.shard(build(), zero_stage=case.zero_stage)
    options = case.options() | ({"dump": directory} if dump else {})
    compiled = torch.compile(model, backend="zgraph", options=options)
    x = torch.randn(8, WIDTH)

    def step() -> None:
        if case.windows:
            with zgraph.no_sync(model):
                compiled(x).square().mean().backward()
        compiled(x).square().mean().backward()
        model.zero_grad()

    step()
    before = reports(directory / f"rank{dist.get_rank()}")
    with zgraph.measure(model):
        step()
        step()
    folder = zgraph.report(compiled, directory)
    summary = zgraph.summary(model)
    return {
        "folder": folder.name,
        "same": before == reports(directory / folder.name) if dump else None,
        "nodes": {(graph.frame, graph.direction): graph.nodes for graph in summary.graphs},
        "sent": {(graph.frame, graph.direction): graph.sent_bytes for graph in summary.graphs},
        "exposed": {(graph.frame, graph.direction): graph.exposed_us for graph in summary.graphs},
        "blocked": {key: dict(found.blocked_us) for key, found in summary.measured.items()},
        "feedback": summary.feedback_bytes,
        "at_rest": sum(parameter.to_local().nbytes for parameter in model.parameters()),  # pyright: ignore
    }


CASES = [
    Case(zero_stage=0, compressed=True),
    Case(planned=True, compressed=True),
    Case(zero_stage=2, windows=True),
    *(Case(zero_stage=stage, compressed=lossy) for stage, lossy in ((0, False), (3, False), (3, True))),
    Case(lowering="inductor", zero_stage=0),
    Case(lowering="inductor", compressed=True, planned=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_folder_agrees_with_the_library(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Nodes, bytes, exposure, measurements and error feedback, and the dump's texts, all from the files."""
    told = ranks.run(train, case, tmp_path, True)
    for rank, found in enumerate(told):
        assert found["folder"] == f"rank{rank}" and found["same"]
        document = load(tmp_path / f"rank{rank}")
        check(document, tmp_path / f"rank{rank}")
        graphs = {(frame["frame"], graph["direction"]): graph for frame, graph in all_graphs(document)}
        assert {key: len(graph["nodes"]["line"]) for key, graph in graphs.items()} == found["nodes"]
        assert {key: graph["sent_bytes"] for key, graph in graphs.items()} == found["sent"]
        if case.planned:
            assert {key: graph["exposed_us"] for key, graph in graphs.items()} == pytest.approx(found["exposed"], abs=1)
        assert document["at_rest"] == {"parameters": found["at_rest"], "error feedback": found["feedback"]}
        measured = {(each["frame"], each["direction"]): each["blocked_us"] for each in document["times"]["measured"]}
        assert measured == found["blocked"]
        assert bool(found["feedback"]) == case.compressed
    merged = load(tmp_path)
    assert [entry["rank"] for entry in merged["ranks"]] == list(range(len(told)))
    assert all(entry["times"]["measured"] for entry in merged["ranks"])


def all_graphs(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(frame, graph) for frame in document["frames"] for graph in frame["graphs"]]


def check(document: dict[str, Any], folder: Path) -> None:
    """The document keeps to its schema and to itself, and shows the graphs that the dump shows."""
    VALIDATOR.validate({key: value for key, value in document.items() if key != "times"})
    names = {frame["frame"]: f"frame_{frame['frame'].replace('/', '_')}" for frame in document["frames"]}
    for frame in document["frames"]:
        memory = frame["memory"]
        curve = [sum(each) for each in zip(*bytes_by_class(document, frame).values(), strict=True)]
        assert max(curve) == memory["peak_bytes"]
        dumped = folder / names[frame["frame"]]
        for direction in frame["captured"]:
            for entry, lines in texts_of(frame, direction):
                name = "captured" if entry is None else entry["name"]
                (path,) = dumped.glob(f"*_{name}.{direction}.py")
                text = [line for line in path.read_text().splitlines() if not line.startswith("# ")]
                assert [line_text(frame, line) for line in lines] == text
        for graph in frame["graphs"]:
            found = names_of(frame, graph)
            assert len(set(found)) == len(found)
            for row, members in enumerate(graph["collectives"]["parameters"]):
                assert members and graph["collectives"]["sent_bytes"][row] >= 0
        json.loads((dumped / "trace.json").read_text())


def test_without_a_dump_a_report_has_all_but_the_texts(ranks: Ranks, tmp_path: Path) -> None:
    case = Case(planned=True)
    ranks.run(train, case, tmp_path / "without", False)
    ranks.run(train, case, tmp_path / "with", True)
    without, dumped = load(tmp_path / "without"), load(tmp_path / "with")
    for frame, other in zip(without["frames"], dumped["frames"], strict=True):
        assert frame["captured"] == {} and other["captured"]
        assert [entry["name"] for entry in frame["passes"]] == [entry["name"] for entry in other["passes"]]
        assert [entry["changed"] for entry in frame["passes"]] == [entry["changed"] for entry in other["passes"]]
        assert {entry["before"] for entry in frame["passes"]} == {None}
        assert all(entry["after"]["predicted_us"] > 0 for entry in other["passes"])
        assert frame["memory"] == other["memory"]
        for graph, same in zip(frame["graphs"], other["graphs"], strict=True):
            assert names_of(frame, graph) == names_of(other, same)
            assert graph["nodes"]["end_us"] == same["nodes"]["end_us"]


def test_a_plan_writes_its_folder(tmp_path: Path) -> None:
    plan = zgraph.plan(build, world_size=64, batch=lambda: (torch.zeros(8, WIDTH),), hardware="h100")
    assert plan.report(tmp_path) == tmp_path / "rank0"
    document = load(tmp_path)
    VALIDATOR.validate({key: value for key, value in document.items() if key != "times"})
    assert document["world_size"] == 64 and document["at_rest"]["optimizer state"] == plan.moment_bytes
    (frame,) = document["frames"]
    assert frame["hardware"]["name"] == plan.hardware.name
    assert [graph["predicted_us"] for graph in frame["graphs"]] == pytest.approx(
        [graph.timeline.step_us for graph in plan.graphs], abs=1e-3
    )
    assert frame["captured"] and all(entry["after"] is not None for entry in frame["passes"])


def test_nothing_compiled_is_an_error(tmp_path: Path) -> None:
    with fake_world(2), pytest.raises(ZgraphError, match=r"zgraph\.report: nothing was compiled yet"):
        zgraph.report(zgraph.shard(mlp()), tmp_path)
    with pytest.raises(ZgraphError, match=r"zgraph\.report: the model was not sharded"):
        zgraph.report(mlp(), tmp_path)


def test_no_folder_no_report(tmp_path: Path) -> None:
    with pytest.raises(ZgraphError, match=r"there is no report.json in .*; write one with"):
        load(tmp_path)
    (tmp_path / "report.json").write_text('{"format": "zgraph-report", "version": "7.0"}')
    with pytest.raises(ZgraphError, match=r"version 7.0, and this zgraph reads zgraph-report of version 1"):
        load(tmp_path)
    (tmp_path / "report.json").write_text('{"format": "zgraph-rep')
    with pytest.raises(ZgraphError, match="cannot read the report"):
        load(tmp_path)


def blocked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[None]:
    directory.write_text("a file")
    return contextlib.nullcontext()


def full(directory: Path, monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[None]:
    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", write_text)
    return contextlib.nullcontext()


@pytest.mark.parametrize("spoil", [blocked, full])
def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], Any],
) -> None:
    """Several frames are compiled and trained; the user is told once."""
    directory = tmp_path / "out"
    spoil(directory, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="zgraph"), fake_world(2):
        compile_model(mlp, {"dump": directory}, batches=(6, 7, 8))
    told = [record.getMessage() for record in caplog.records if record.name.startswith("zgraph.reporting")]
    assert len(told) == 1 and "cannot write the dump to" in told[0] and str(directory) in told[0]


def test_a_report_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_world(2):
        model = zgraph.shard(mlp())
        torch.compile(model, backend="zgraph", options={"lowering": "fx"})(torch.zeros(6, 5)).sum().backward()
        full(tmp_path, monkeypatch)
        with caplog.at_level(logging.WARNING, logger="zgraph"):
            zgraph.report(model, tmp_path / "out")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("zgraph.reporting")]
    assert len(told) == 1 and "cannot write the report" in told[0] and "No space left" in told[0]
