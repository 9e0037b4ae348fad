"""Files for other tools, each made from `report.json` alone and read back as those tools do."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import networkx
import pytest

import zgraph
from tests.support.graphs import compile_model, deep, fake_world
from zgraph.compiler.pipeline import Pipeline
from zgraph.compiler.target import Target
from zgraph.passes import presets
from zgraph.reporting.export.chrome_trace import chrome_trace
from zgraph.reporting.export.dot import dot, quoted
from zgraph.reporting.export.graphml import graphml
from zgraph.reporting.export.model_explorer import model_explorer
from zgraph.reporting.export.reading import load, names_of, rows_of
from zgraph.reporting.export.report_json import Document, to_json

HARDWARE = zgraph.Hardware.preset("h100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of a small model, in which some collectives are exposed."""
    directory = tmp_path_factory.mktemp("dump")
    pipeline = Pipeline(presets.default(bucket_bytes=512), target=Target(hardware=HARDWARE))
    with fake_world(2):
        compile_model(deep, {"dump": directory, "pipeline": pipeline})
    return directory / "rank0" / "frame_0_0"


@pytest.fixture
def document(folder: Path) -> Document:
    return load(folder)


def slices(events: list[dict[str, Any]], process: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def lane_names(events: list[dict[str, Any]], process: int) -> dict[int, str]:
    named = [event for event in events if event["name"] == "thread_name" and event["pid"] == process]
    return {event["tid"]: event["args"]["name"] for event in named}


def test_the_folder_has_a_file_for_every_tool(folder: Path, document: Document) -> None:
    """What the writer left there is what the exporters make of the report that it left there."""
    (frame,) = document["frames"]
    assert json.loads((folder / "trace.json").read_text()) == json.loads(to_json(chrome_trace(document)))
    assert json.loads((folder / "model_explorer.json").read_text()) == model_explorer(document)
    for graph in frame["graphs"]:
        assert (folder / f"{graph['direction']}.dot").read_text() == dot(document, frame, graph)
        assert (folder / f"{graph['direction']}.graphml").read_text() == graphml(document, frame, graph)


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


def test_model_explorer_has_every_node_edge_and_module(document: Document) -> None:
    (frame,) = document["frames"]
    found = model_explorer(document)
    assert set(found) == {"label", "graphs"} and len(found["graphs"]) == len(frame["graphs"])
    for shown, graph in zip(found["graphs"], frame["graphs"], strict=True):
        rows = list(rows_of(document, frame, graph))
        assert [node["id"] for node in shown["nodes"]] == [str(number) for number in range(len(rows))]
        for node, row in zip(shown["nodes"], rows, strict=True):
            assert (node["label"], node["namespace"]) == (row["name"], row["module"].replace(".", "/"))
            assert [int(edge["sourceNodeId"]) for edge in node["incomingEdges"]] == row["inputs"]
            assert all(type(each[key]) is str for each in node["attrs"] for key in ("key", "value"))
        assert {"0", "5"} <= {node["namespace"] for node in shown["nodes"]}


def test_graphml_comes_back_in_networkx(document: Document) -> None:
    (frame,) = document["frames"]
    for graph in frame["graphs"]:
        found: Any = networkx.parse_graphml(graphml(document, frame, graph))
        rows = list(rows_of(document, frame, graph))
        names = [row["name"] for row in rows]
        assert list(found.nodes) == names
        edges = {(names[source], row["name"]) for row in rows for source in row["inputs"]}
        assert set(found.edges) == edges
        waits = {(before, after) for before, after, kind in found.edges(data="kind") if kind == "wait"}
        columns = graph["collectives"]
        assert waits == {(names[a], names[b]) for a, b in zip(columns["node"], columns["wait"], strict=True)}
        for row in rows:
            about = found.nodes[row["name"]]
            assert about["code"] == row["code"] and about["position"] == row["position"]
            assert about["start_us"] == pytest.approx(row["start_us"])


def test_dot_has_every_node_and_edge(document: Document) -> None:
    (frame,) = document["frames"]
    for graph in frame["graphs"]:
        text = dot(document, frame, graph)
        inputs = graph["nodes"]["inputs"]
        assert [int(number) for number in re.findall(r"^\s+n(\d+) \[label=", text, re.M)] and len(
            re.findall(r"^\s+n(\d+) \[label=", text, re.M)
        ) == len(inputs)
        edges = {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+)", text)}
        assert edges == {(source, node) for node, each in enumerate(inputs) for source in each}
        assert text.count("{") == text.count("}")


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed: there is no program called dot")
def test_dot_loads_in_graphviz(folder: Path) -> None:
    for path in sorted(folder.glob("*.dot")):
        done = subprocess.run(["dot", "-Tsvg", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout.count('class="node"') == path.read_text().count("[label=")


STRANGE = '<script>"quoted" \\ back\n{brace} | ]]> & \x00 \ud800'


def test_names_from_models_are_text_in_every_file(document: Document) -> None:
    """A module called <script>, quotes, control characters and half a surrogate."""
    (frame,) = document["frames"]
    frame["strings"] = [STRANGE if text == "0.weight" or text == "0" else text for text in frame["strings"]]
    frame["lines"]["name"] = [f"{STRANGE}{number}" for number, _ in enumerate(frame["lines"]["name"])]
    for graph in frame["graphs"]:
        found: Any = networkx.parse_graphml(graphml(document, frame, graph))
        assert len(found) == len(graph["nodes"]["line"]) and all("<script>" in name for name in found)
        text = dot(document, frame, graph)
        strings = re.findall(r'"(?:[^"\\]|\\.)*"', text)
        assert not set("<>|&") & set(re.sub(r'"(?:[^"\\]|\\.)*"', "", text).replace("->", "")) and strings
        text.encode("utf-8")
    for text in (to_json(chrome_trace(document)), to_json(model_explorer(document))):
        assert STRANGE in json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "surrogatepass").decode(
            "utf-8", "surrogatepass"
        ).replace("\\\\", "\\").replace('\\"', '"').replace("\\n", "\n").replace("\\u0000", "\x00")


def test_dot_strings_are_escaped() -> None:
    assert quoted('a"b\\c\nd') == '"a\\"b\\\\c\\nd"'
    assert quoted("\x00é") == '"\\\\x00é"'


TRACED = """
import torch, zgraph
from tests.support.graphs import compile_model, deep, fake_world
with fake_world(2):
    compile_model(deep, {})
"""


@pytest.mark.slow
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
