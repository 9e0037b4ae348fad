"""Files of a report in the programs that they are for: Perfetto's trace processor and tlparse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reports import large_report
from tests.support.trace_processor import trace_processor
from zgraph.reporting.export.chrome_trace import chrome_trace
from zgraph.reporting.export.report_json import to_json

MEASURED = {
    "frame": "0/0",
    "direction": "forward",
    "calls": 3,
    "us": 800.0,
    "blocked_us": {"all_gather_0_2_0": 17.5},
    "waited_at_us": {"all_gather_0_2_0": 100.0},
    "peak_bytes": 4,
}


def test_perfetto_reads_lanes_slices_arrows_and_memory() -> None:
    """Every node that takes time is a slice on its lane, and an arrow leads from each start to what waits for it."""
    document = large_report(400)
    document["times"] = {"phases": {}, "passes": {}, "measured": [MEASURED]}
    (frame,) = document["frames"]
    with trace_processor() as processor:
        assert processor.load(to_json(chrome_trace(document)).encode()) == ""
        assert processor.rows("select count(*) from stats where severity = 'error' and value > 0") == [(0,)]
        lanes = dict(
            processor.rows(
                "select thread.name, count(*) from slice join thread_track on track_id = thread_track.id "
                "join thread using (utid) join process using (upid) where process.name glob '*predicted' group by 1"
            )
        )
        gathers = sum(len(graph["collectives"]["node"]) for graph in frame["graphs"])
        computes = sum(graph["nodes"]["lane"].count(0) for graph in frame["graphs"])
        assert lanes == {"group:0": gathers, "compute": computes + gathers}  # every wait blocks
        names = frame["lines"]["name"]
        arrows = processor.rows(
            "select start.name, done.name from flow join slice start on slice_out = start.id "
            "join slice done on slice_in = done.id"
        )
        assert sorted(arrows) == sorted(
            (names[graph["nodes"]["line"][start]], names[graph["nodes"]["line"][wait]])
            for graph in frame["graphs"]
            for start, wait in zip(graph["collectives"]["node"], graph["collectives"]["wait"], strict=True)
        )
        predicted = sum(graph["predicted_us"] for graph in frame["graphs"])
        ((begin, end),) = processor.rows(
            "select min(ts), max(ts + dur) from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) join process using (upid) where process.name glob '*predicted'"
        )
        assert (end - begin) / 1000 == pytest.approx(predicted)
        sums = processor.rows(
            "select sum(value) from counter join process_counter_track on track_id = process_counter_track.id "
            "where process_counter_track.name glob 'memory*' group by ts"
        )
        assert max(total for (total,) in sums) == frame["memory"]["peak_bytes"]
        measured = processor.rows(
            "select slice.name, dur from slice join thread_track on track_id = thread_track.id "
            "join thread using (utid) join process using (upid) where process.name glob '*measured' order by dur desc"
        )
        assert measured == [("forward", 800_000), ("wait for all_gather_0_2_0", 17_500)]


TRACED = """
import torch, zgraph
from tests.support.graphs import compile_model, deep, fake_world
with fake_world(2):
    compile_model(deep, {})
"""


def test_tlparse_shows_the_final_graphs_and_the_report(tmp_path: Path) -> None:
    program = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("tlparse is not installed: pip install tlparse")
    root = Path(__file__).resolve().parents[2]
    logs = tmp_path / "logs"
    environment = {**os.environ, "TORCH_TRACE": str(logs)}
    subprocess.run([sys.executable, "-c", TRACED], cwd=root, env=environment, check=True, capture_output=True)
    (log,) = logs.iterdir()
    shown = tmp_path / "shown"
    subprocess.run([program, log, "-o", shown, "--no-browser"], check=True, capture_output=True)
    index = (shown / "index.html").read_text()
    for name in ("zgraph_forward_graph", "zgraph_backward_graph", "zgraph_report"):
        (file,) = shown.glob(f"*/{name}_*")
        assert str(file.relative_to(shown)) in index
        assert ("zgraph-report" if name == "zgraph_report" else "all_gather_into_tensor") in file.read_text()
