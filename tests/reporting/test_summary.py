"""The report: bytes of a step, what passes did, and text for people."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support.graphs import compile_model, fake_world, mlp
from zgraph import PassList, Report
from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.pass_list import PassRun
from zgraph.graph.traffic import Transfer
from zgraph.passes import presets
from zgraph.reporting.of_graph import GraphReport


def transfer(sent: int, kind: str = "all_gather_into_tensor", dtype: torch.dtype = torch.float32) -> Transfer:
    return Transfer(
        kind=kind,
        group_name="0",
        group_size=2,
        dtype=dtype,
        payload_bytes=sent,
        sent_bytes=sent,
        parameters=("h.weight", "h.bias"),
    )


def graph(frame: str, direction: Direction, *sent: int) -> GraphReport:
    return GraphReport(frame=frame, direction=direction, nodes=9, transfers=tuple(map(transfer, sent)))


def test_a_graph_sends_the_sum_of_its_collectives() -> None:
    assert graph("0/0", "forward", 3, 4).sent_bytes == 7
    assert graph("0/0", "forward").sent_bytes == 0


def test_a_step_runs_every_frame_forward_and_backward() -> None:
    report = Report(
        graphs=[
            graph("0/0", "forward", 1),
            graph("0/0", "backward", 10, 100),
            graph("1/0", "forward", 1000),
            graph("1/0", "backward", 10000),
        ]
    )
    assert report.step_bytes == 11111


def test_only_the_newest_compile_of_a_frame_counts() -> None:
    report = Report(
        graphs=[
            graph("0/0", "forward", 1),
            graph("0/0", "backward", 10),
            graph("0/1", "forward", 5),
            graph("0/1", "backward", 50),
            graph("10/0", "forward", 700),
        ]
    )
    assert report.step_bytes == 755


def test_inference_is_no_part_of_a_step() -> None:
    report = Report(graphs=[graph("0/0", "forward", 1), graph("0/1", "inference", 1000)])
    assert report.step_bytes == 1


@pytest.mark.parametrize("batches", [(6,), (6, 4, 5)], ids=["one shape", "recompiled"])
def test_step_bytes_of_a_compiled_model(batches: tuple[int, ...]) -> None:
    """Recompiling for other batch sizes sends the same bytes a step."""
    report = Report()
    with fake_world(2):
        compile_model(mlp, {"report": report}, batches=batches)
    frames = {entry.frame for entry in report.graphs}
    assert len(frames) == min(2, len(batches))
    assert [entry.direction for entry in report.graphs] == ["forward", "backward"] * len(frames)
    # Rows of a rank's chunks: 4, 3; widths 5 + 1, 7 + 1, 5. One gather forward, one of two weights backward, gradients.
    forward, regather = 4 * 6 + 3 * 8 + 3 * 5, 3 * 7 + 3 * 5
    assert report.step_bytes == 4 * (forward + regather + forward)


def test_passes_and_notes_are_listed() -> None:
    report = Report()
    with fake_world(2):
        compile_model(mlp, {"report": report, "passes": PassList(presets.default())})
    pipeline = PassList(presets.default())
    assert [(run.name, run.direction) for run in report.passes] == [
        *[(entry.name, "joint") for entry in pipeline.of("joint")],
        *[(entry.name, where) for entry in pipeline.of("graph") for where in ("forward", "backward")],
    ]
    assert "lower_reductions on forward: nothing is reduced here" in report.notes
    assert all(run.seconds > 0 for run in report.passes)


def test_text_adds_up_by_kind_and_dtype() -> None:
    mib = 2**20
    entry = GraphReport(
        frame="0/0",
        direction="forward",
        nodes=42,
        transfers=(
            transfer(mib),
            transfer(2 * mib),
            transfer(mib // 2, dtype=torch.bfloat16),
            transfer(mib, kind="all_to_all_single"),
        ),
    )
    runs: list[Any] = [
        PassRun(name="sink_waits", direction=where, changed=where == "forward", seconds=0.0015)
        for where in ("forward", "backward")
    ]
    report = Report(graphs=[entry], passes=runs, notes=["a note", "a note"])
    assert str(report).splitlines() == [
        "zgraph compiled 1 graph of 1 frame, 0 recompiles, 4 buckets",
        "  frame 0/0 forward: 42 nodes, 4.50 MiB sent",
        "    2 x all_gather_into_tensor f32: 4 parameters, 3.00 MiB sent",
        "    1 x all_gather_into_tensor bf16: 2 parameters, 512.00 KiB sent",
        "    1 x all_to_all_single f32: 2 parameters, 1.00 MiB sent",
        "passes",
        "  sink_waits: changed forward, 3 ms",
        "one training step sends 4.50 MiB per rank",
    ]


def test_an_empty_report_prints() -> None:
    assert str(Report()).splitlines() == [
        "zgraph compiled 0 graphs of 0 frames, 0 recompiles, 0 buckets",
        "passes",
        "nothing is sent: no compiled training graph has a collective",
    ]


def test_a_phase_inside_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    report = Report()
    with report.phase("passes"), report.phase("predicting"):
        pass
    monkeypatch.undo()
    assert report.seconds == {"predicting": 1.0, "passes": 2.0}
