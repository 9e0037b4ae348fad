"""Files for other tools, each made from `report.json` alone and read back as those tools do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import zgraph
from tests.support.graphs import compile_model, deep, fake_world
from zgraph.compiler.pass_list import PassList
from zgraph.compiler.target import Target
from zgraph.passes import presets
from zgraph.reporting.export.chrome_trace import chrome_trace
from zgraph.reporting.export.reading import load, names_of, rows_of
from zgraph.reporting.export.report_json import Document, to_json

HARDWARE = zgraph.Hardware.preset("h100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a small model, in which some collectives are exposed."""
    directory = tmp_path_factory.mktemp("dump")
    pipeline = PassList(presets.default(bucket_bytes=512), target=Target(hardware=HARDWARE))
    with fake_world(2):
        compile_model(deep, {"dump": directory, "passes": pipeline})
    return directory / "rank0" / "frame_0_0"


@pytest.fixture
def document(folder: Path) -> Document:
    return load(folder)


def slices(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def lane_names(events: list[dict[str, Any]], process: int) -> dict[int, str]:
    named = [event for event in events if event["name"] == "thread_name" and event["pid"] == process]
    return {event["tid"]: event["args"]["name"] for event in named}


def test_the_folder_has_the_trace_of_its_report(folder: Path, document: Document) -> None:
    assert json.loads((folder / "trace.json").read_text()) == json.loads(to_json(chrome_trace(document)))


def test_the_trace_has_every_node_that_takes_time(document: Document) -> None:
    """A slice for each, on its lane, as long as predicted; and one where compute waits."""
    (frame,) = document["frames"]
    events = chrome_trace(document)["traceEvents"]
    lanes = lane_names(events, 1)
    found = Counter((event["name"], lanes[event["tid"]], round(event["dur"], 2)) for event in slices(events, 1))
    expected: Counter[tuple[str, str, float]] = Counter()
    offset = 0.0
    for graph in frame["graphs"]:
        for row in rows_of(document, frame, graph):
            us = row["end_us"] - row["start_us"]
            if row["lane"] is not None or us > 0:
                expected[row["name"], row["lane"] or "compute", round(us, 2)] += 1
        offset += graph["predicted_us"]
    assert found == expected
    assert set(lanes.values()) == {"compute", "group:0", "group:0.reductions"}
    assert max(event["ts"] + event["dur"] for event in slices(events, 1)) <= offset + 1e-3
    waited = sum(event["dur"] for event in slices(events, 1) if event["cat"] == "exposed")
    assert waited == pytest.approx(sum(graph["exposed_us"] for graph in frame["graphs"]), abs=0.1) and waited > 0


def test_slices_of_a_thread_do_not_overlap(document: Document) -> None:
    until: dict[int, float] = {}
    for event in sorted(slices(chrome_trace(document)["traceEvents"], 1), key=lambda event: event["ts"]):
        assert event["ts"] >= until.get(event["tid"], 0.0) - 2e-3, event["name"]
        until[event["tid"]] = event["ts"] + event["dur"]


def test_collectives_that_run_at_once_have_rows_of_their_own(document: Document) -> None:
    (frame,) = document["frames"]
    graph = frame["graphs"][0]
    first, second = graph["collectives"]["node"][:2]
    for name in ("start_us", "end_us"):
        graph["nodes"][name][second] = graph["nodes"][name][first]
    events = chrome_trace(document)["traceEvents"]
    assert "group:0 (2)" in lane_names(events, 1).values()


def test_arrows_lead_from_starts_to_waits(document: Document) -> None:
    """Each end lies on a slice: of the start, and of its wait or a later node on the compute lane."""
    (frame,) = document["frames"]
    events = chrome_trace(document)["traceEvents"]
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    drawn = {(event["tid"], event["ts"]): event["name"] for event in slices(events, 1)}
    starts: list[str] = []
    for number, begin in begins.items():
        starts.append(drawn[begin["tid"], begin["ts"]])
        assert (ends[number]["tid"], ends[number]["ts"]) in drawn and ends[number]["ts"] >= begin["ts"]
    expected = [
        name
        for graph in frame["graphs"]
        for name in [names_of(frame, graph)[node] for node in graph["collectives"]["node"]]
    ]
    assert starts == expected


def test_the_memory_counter_reaches_the_peak(document: Document) -> None:
    counted = [event for event in chrome_trace(document)["traceEvents"] if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counted) == document["frames"][0]["memory"]["peak_bytes"]


def test_measured_graphs_have_a_process_of_their_own(document: Document) -> None:
    graph = {"frame": "0/0", "calls": 3, "us": 50.0, "peak_bytes": None}
    waits = {"blocked_us": {"a": 10.0, "b": 4.0, "late": 99.0}, "waited_at_us": {"a": 5.0, "b": 14.0, "late": 45.0}}
    document["times"]["measured"] = [
        {**graph, **waits, "direction": "backward"},
        {**graph, "direction": "forward", "blocked_us": {}, "waited_at_us": {}},
    ]
    events = slices(chrome_trace(document)["traceEvents"], 2)
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("forward", 0, 50),
        ("backward", 50, 50),
        ("wait for a", 55, 10),
        ("wait for b", 65, 4),  # medians: it cannot begin while the first one blocks
        ("wait for late", 95, 5),
    ]


def test_without_a_target_there_is_nothing_to_draw(document: Document) -> None:
    document["frames"][0]["graphs"][0]["predicted_us"] = None
    assert chrome_trace(document)["traceEvents"] == []


STRANGE = '<script>"quoted" \\ back\n{brace} | ]]> & \x00 \ud800'


def test_names_from_models_are_text_in_the_trace(document: Document) -> None:
    """A module called <script>, quotes, control characters and half a surrogate."""
    (frame,) = document["frames"]
    frame["strings"] = [STRANGE if text == "0.weight" or text == "0" else text for text in frame["strings"]]
    frame["lines"]["name"] = [f"{STRANGE}{number}" for number, _ in enumerate(frame["lines"]["name"])]
    events = json.loads(to_json(chrome_trace(document)))["traceEvents"]
    assert any(str(event["name"]).startswith(STRANGE) for event in events)


TRACED = """
import torch, zgraph
from tests.support.graphs import compile_model, deep, fake_world
with fake_world(2):
    compile_model(deep, {})
"""


@pytest.mark.parametrize("on", [True, False])
def test_torchs_trace_has_the_final_graphs_where_it_is_on(tmp_path: Path, on: bool) -> None:
    """In the artifacts that tlparse shows; without TORCH_TRACE no text is made."""
    environment = {**os.environ, **({"TORCH_TRACE": str(tmp_path)} if on else {})}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", TRACED], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts = [path.read_text() for path in tmp_path.iterdir()]
    if not on:
        assert texts == []
        return
    (text,) = texts
    for name in ("zgraph_forward_graph", "zgraph_backward_graph", "zgraph_report"):
        assert text.count(f'"name": "{name}"') == 1
    assert '"format":"zgraph-report"' in text and "_c10d_functional.all_gather_into_tensor" in text


def test_numbers_stay_finite(document: Document) -> None:
    for event in chrome_trace(document)["traceEvents"]:
        assert all(math.isfinite(event.get(key, 0.0)) for key in ("ts", "dur"))
