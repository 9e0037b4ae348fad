"""Facts as tables: for notebooks as HTML in which names from models are text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.graphs import fake_world
from zgraph.passes import presets
from zgraph.reporting.explanation import Explanation
from zgraph.reporting.of_graph import GraphReport
from zgraph.reporting.summary import Report
from zgraph.reporting.tables import Table, as_html, counted, duration, rate, size
from zgraph.runtime.profiler import Measured

NAME = "<script>alert('&')</script>"


class Cells(HTMLParser):
    """The tags of a page, and the texts of the cells in each row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.captions: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "caption":
            self.captions.append("")

    def handle_data(self, data: str) -> None:
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside == "caption":
            self.captions[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


class Odd(nn.Module):
    """A module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(NAME, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[NAME](x).sum()  # type: ignore[misc]


@pytest.fixture(scope="module")
def report() -> Report:
    """What was compiled of a model with an odd name."""
    found = Report()
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"))
    pipeline = zgraph.PassList(presets.planned(), target=target)
    with fake_world(2):
        model = zgraph.shard(Odd())
        options = {"lowering": "fx", "report": found, "passes": pipeline}
        torch.compile(model, backend="zgraph", options=options)(torch.ones(4, 8)).backward()
    return found


def test_names_are_text() -> None:
    page = as_html([Table(NAME, (NAME, "b"), ((NAME, "[bold]x[/bold]"),))])
    found = Cells(page)
    assert "script" not in found.tags
    assert found.captions == [NAME]
    assert found.rows == [[NAME, "b"], [NAME, "[bold]x[/bold]"]]


def test_a_table_without_rows_is_left_out() -> None:
    assert as_html([Table("empty", ("a",), ()), Table("facts", (), (("a", "1"),))]).count("<table>") == 1


def test_an_explanation_shows_a_modules_name_as_text(report: Report) -> None:
    graph = report.graphs[0]
    measured = Measured(calls=1, us=2000.0, blocked_us={graph.collectives[0].name: 30.0}, peak_bytes=2048)
    explained = Explanation(tuple(report.graphs), {(graph.frame, graph.direction): measured}, feedback_bytes=5)
    found = Cells(explained._repr_html_())
    assert {*found.tags} == {"table", "caption", "tr", "th", "td"}
    assert any(cell == f"{NAME}.weight" for row in found.rows for cell in row)
    first = next(row for row in found.rows if row[:2] == [graph.frame, "forward"])
    assert first[2:5] == [str(graph.nodes), size(graph.sent_bytes), size(graph.received_bytes)]
    assert first[7:10] == ["2.00 ms", "30.0 us", "1"] and first[-1] == "2.00 KiB"
    waited = next(row for row in found.rows if len(row) > 2 and row[2] == graph.collectives[0].name)
    assert waited[8] == "30.0 us"
    assert ["error feedback of a rank", "5 bytes"] in found.rows


def test_without_costs_it_says_how_to_get_times() -> None:
    entry = GraphReport(frame="0/0", direction="forward", nodes=1, transfers=())
    assert any("no target" in row[-1] for row in Cells(Explanation((entry,))._repr_html_()).rows)


def test_a_summary_has_the_facts_of_its_text(report: Report) -> None:
    found = Cells(report._repr_html_())
    assert ["sent in a training step", size(report.step_bytes)] in found.rows
    lines = str(report).splitlines()
    for row in (row for row in found.rows if len(row) == 3 and row[-1].endswith(" ms")):
        changed = row[1] if row[1] == "nothing to do" else f"changed {row[1]}"
        assert f"  {row[0]}: {changed}, {row[2]}" in lines
    graph = report.graphs[0]
    assert [graph.frame, "forward", str(graph.nodes), size(graph.sent_bytes), ""] in found.rows


def test_a_frame_that_was_compiled_again_says_why() -> None:
    entry = GraphReport(frame="0/1", direction="forward", nodes=1, transfers=(), reason="x.size(0) < 9")
    assert Cells(Report(graphs=[entry])._repr_html_()).rows[-1][-1] == "x.size(0) < 9"


def test_a_plan_has_the_facts_of_its_text() -> None:
    plan = zgraph.plan(Odd, world_size=2, batch=lambda: (torch.zeros(4, 8),), hardware="cpu")
    found = Cells(plan._repr_html_())
    assert "script" not in found.tags
    assert ["together", size(plan.peak_bytes)] in found.rows
    forward = next(row for row in found.rows if row[0] == "forward")
    assert forward[1:4] == [
        str(plan.graphs[0].nodes),
        size(plan.graphs[0].sent_bytes),
        duration(plan.graphs[0].timeline.step_us),
    ]
    assert next(row for row in found.rows if row[0] == "step")[2] == size(plan.sent_bytes)


def test_units_suit_what_they_count() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 29)] == ["0 bytes", "1023 bytes", "1.50 KiB", "1.50 GiB"]
    assert size(-2048) == "-2.00 KiB"
    assert [duration(us) for us in (1.25, 1500, 2e6)] == ["1.2 us", "1.50 ms", "2.00 s"]
    assert [rate(each) for each in (1250.0, 3.35e6)] == ["1.25 GB/s", "3.35 TB/s"]


def test_an_explanation_prints_and_shows_the_same_facts(report: Report) -> None:
    """Text rounds to whole microseconds, tables take the unit that suits; of many parameters the text names four."""
    measured = {
        (graph.frame, graph.direction): Measured(
            calls=7,
            us=1234.0,
            blocked_us={each.name: 56.0 for each in graph.collectives},
            peak_bytes=3 << 20,
        )
        for graph in report.graphs
    }
    unknown = replace(report.graphs[0], peak=replace(report.graphs[0].peak, unknown=("nonzero",)))  # type: ignore
    graphs = (unknown, *report.graphs[1:])
    explained = Explanation(graphs, measured, feedback_bytes=5)
    text, rows = str(explained), Cells(explained._repr_html_()).rows
    for graph in graphs:
        (row,) = (cells for cells in rows if cells[:2] == [graph.frame, graph.direction] and cells[2].isdigit())
        assert graph.peak is not None and graph.us is not None and graph.exposed_us is not None
        facts = [str(graph.nodes), size(graph.sent_bytes), size(graph.received_bytes), size(graph.peak.bytes)]
        facts += [graph.peak.node, "7", "3.00 MiB", *graph.peak.unknown]
        facts += [f"{name} {size(count)}" for name, count in graph.peak.largest]
        times = [graph.us, graph.exposed_us, 1234.0, 56.0 * len(graph.collectives)]
        assert [fact for fact in facts if not any(fact in cell for cell in row)] == []
        assert [us for us in times if duration(us) not in row] == []
        assert [fact for fact in facts if fact not in text] == []
        assert [us for us in times if f"{us:.0f} us" not in text] == []
        for each in graph.collectives:
            (row,) = (cells for cells in rows if cells[:3] == [graph.frame, graph.direction, each.name])
            assert f"  {each.name}: {row[3]}, {row[5]} sent, {each.us:.0f} us" in text
            assert row[4] == ", ".join(each.parameters) and each.parameters[0] in text
            assert row[6:9] == [duration(each.us or 0), duration(each.exposed_us or 0), "56.0 us"]
            assert row[9] == each.reason and each.reason in text
        for name, lifetime in graph.lifetimes.items():
            assert [graph.frame, name, str(lifetime)] in rows
            assert re.search(rf"  {lifetime}: .*{re.escape(name)}", text)
    assert "error feedback: 5 bytes a rank" in text and ["error feedback of a rank", "5 bytes"] in rows


def test_a_summary_prints_and_shows_the_same_facts(report: Report) -> None:
    whole = replace(report, feedback_bytes=5, islands=4, distinct_islands=3, cached_islands=2)
    text, rows = str(whole), Cells(whole._repr_html_()).rows
    said = dict(row for row in rows if len(row) == 2)
    assert said["graphs"] == "2 of 1 frame" and "compiled 2 graphs of 1 frame, " in text
    assert f"{counted(int(said['recompiles']), 'recompile')}, {counted(int(said['buckets']), 'bucket')}\n" in text
    assert f"one training step sends {said['sent in a training step']} per rank" in text
    assert f"error feedback: {said['error feedback']} a rank" in text
    islands = "3 distinct, 2 of them from Inductor's cache"
    assert f"; 4 islands, {islands}" in text and said["islands"] == f"4, {islands}"
    assert f"compiling took {said['seconds of compiling']} s: " in text
    phases = {name: said[f"seconds of {name}"] for name in whole.seconds}
    assert ", ".join(f"{name} {seconds} s" for name, seconds in phases.items()) in text
    for graph in whole.graphs:
        assert f"frame {graph.frame} {graph.direction}: {graph.nodes} nodes, {size(graph.sent_bytes)} sent" in text
        assert [graph.frame, graph.direction, str(graph.nodes), size(graph.sent_bytes), graph.reason] in rows
    for _, _, kind, dtype, count, parameters, sent in (row for row in rows if len(row) == 7 and row[4].isdigit()):
        assert f"{count} x {kind} {dtype}: {counted(int(parameters), 'parameter')}, {sent} sent" in text
    assert sum(len(row) == 7 for row in rows) == 1 + len(re.findall(r" parameters?, ", text))


def test_a_plan_prints_and_shows_the_same_facts() -> None:
    plan = zgraph.plan(Odd, world_size=2, batch=lambda: (torch.zeros(4, 8),), hardware="cpu")
    text, rows = str(plan), Cells(plan._repr_html_()).rows
    assert ["step", "", size(plan.sent_bytes), duration(plan.step_us)] == next(r for r in rows if r[0] == "step")[:4]
    assert f"{plan.step_us / 1e3:.2f} ms" in text and "one of 2 ranks" in plan._repr_html_() and "2 ranks" in text
    for curve in plan.curves:
        node = curve.nodes[curve.peak_position].name
        assert [size(curve.peak_bytes), node, ""] in rows
        assert f"peak {size(curve.peak_bytes)} while {node} runs: " in text
        for entry in curve.alive_at(curve.peak_position)[:3]:
            assert [entry.node.name, size(entry.bytes), node] in rows
            assert f"{entry.node.name} {size(entry.bytes)}" in text
    for graph in plan.graphs:
        (row,) = (cells for cells in rows if cells[0] == graph.direction)
        assert f"  {graph.direction}: {row[1]} nodes, {graph.timeline.step_us / 1e3:.2f} ms, " in text
        assert row[3:5] == [duration(graph.timeline.step_us), duration(graph.exposed_us)]
        assert f"{graph.exposed_us / 1e3:.2f} ms exposed; busy: {row[5]}" in text
