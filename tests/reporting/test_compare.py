"""`zgraph report` and `zgraph diff`: files made anew from report.json, and what differs between compiles or passes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import zgraph
from zgraph.cli.commands import commands
from zgraph.cli.compare import CAPTURED, Change, compare, compare_passes, lines_between
from zgraph.passes import BucketCollectives, presets
from zgraph.planner.planned_step import Plan
from zgraph.reporting.export.reading import load
from zgraph.reporting.page.write_page import page_text

LAYERS = 3


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(LAYERS)])


def planned(bucket_bytes: int, zero_stage: int = 3, rows: int = 4) -> Plan:
    passes = [
        BucketCollectives(bucket_bytes=bucket_bytes) if each.name == "bucket_collectives" else each
        for each in presets.default()
    ]
    return zgraph.plan(
        build,
        world_size=2,
        batch=lambda: (torch.zeros(rows, 16),),
        shard_fn=lambda model: zgraph.shard(model, zero_stage=zero_stage),
        hardware="cpu",
        passes=zgraph.PassList(passes),
    )


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {"together": planned(2**20), "apart": planned(1, rows=64), "kept": planned(2**20, zero_stage=2)}


@pytest.fixture(scope="module")
def reports(plans: dict[str, Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reports")
    for name, plan in plans.items():
        plan.report(directory / name)
    return directory


def typed(*words: object) -> Result:
    found = CliRunner().invoke(commands, [str(word) for word in words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def refused(*words: object) -> str:
    found = typed(*words)
    assert (found.exit_code, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    return line


def facts(changes: list[Change], section: str) -> dict[tuple[str, str], tuple[Any, Any]]:
    return {(each.subject, each.fact): (each.before, each.after) for each in changes if each.section == section}


# --- diff -------------------------------------------------------------------------------------------------------------


def test_two_compiles_differ_in_what_their_plans_say(plans: dict[str, Plan], reports: Path) -> None:
    """One bucket against one collective for each parameter, and a larger batch."""
    found = compare(load(reports / "together"), load(reports / "apart"))
    graphs = facts(found, "graphs")
    first, second = plans["together"].graphs, plans["apart"].graphs
    for before, after in zip(first, second, strict=True):
        assert graphs[before.direction, "nodes"] == (before.nodes, after.nodes)
        assert graphs[before.direction, "exposed_us"] == pytest.approx(
            (before.exposed_us, after.exposed_us), abs=1e-3
        )  # as report.json rounds it
    assert graphs["forward", "collectives"] == (1, LAYERS)
    assert not any(fact == "sent_bytes" for _, fact in graphs)  # buckets send the same
    assert facts(found, "memory")["step", "peak_bytes"] == (plans["together"].step_bytes, plans["apart"].step_bytes)
    gathers = "forward: _c10d_functional.all_gather_into_tensor"
    assert facts(found, "operators")[gathers, "nodes"] == (1, LAYERS)
    passes = facts(found, "passes")
    assert passes["forward: bucket_collectives", "changed"] == ("yes", "no")
    assert "bucket_bytes=1048576" in passes["forward: bucket_collectives", "options"][0]
    assert ("joint: dedupe_gathers", "nodes") not in passes
    assert facts(found, "parameters") == {}


def test_parameters_differ_in_lifetime_and_bytes(reports: Path) -> None:
    found = facts(compare(load(reports / "together"), load(reports / "kept")), "parameters")
    for row in range(LAYERS):
        assert found[f"{row}.weight", "zero_stage"] == (3, 2)
    regathered, kept = found["1.weight", "wire_bytes"]
    assert regathered == kept * 3 / 2


def test_a_report_does_not_differ_from_itself(reports: Path) -> None:
    assert compare(load(reports / "apart"), load(reports / "apart")) == []
    shown = typed("diff", reports / "apart", reports / "apart")
    assert (shown.exit_code, shown.stdout) == (0, "nothing differs\n")


def test_entries_of_only_one_report_are_shown(reports: Path) -> None:
    """A frame, a graph, and what was measured."""
    first, second = load(reports / "apart"), load(reports / "apart")
    second["frames"][0]["graphs"].pop()
    only = first["frames"][0]["frame"]
    second["times"]["measured"] = [
        {"frame": only, "direction": "forward", "us": 9.0, "blocked_us": {"a": 1.0, "b": 2.0}, "peak_bytes": None}
    ]
    found = facts(compare(first, second), "graphs")
    assert found["backward", "nodes"][1] is None
    assert found["forward", "measured_us"] == (None, 9.0) and found["forward", "blocked_us"] == (None, 3.0)
    second["frames"].append(first["frames"][0] | {"frame": "9/0"})
    assert {each.frame for each in compare(first, second)} == {only, "9/0"}


def test_frames_are_matched_in_their_order(reports: Path) -> None:
    """Dynamo numbers frames by process: two plans of one notebook share no number."""
    first, second = load(reports / "apart"), load(reports / "apart")
    (frame,) = first["frames"]
    second["frames"][0]["frame"] = "9/3"
    assert compare(first, second) == []
    second["frames"][0]["graphs"].pop()
    assert {each.frame for each in compare(first, second)} == {f"{frame['frame']} and 9/3"}
    second["frames"].insert(0, frame)  # as many no longer: by name
    assert {each.frame for each in compare(first, second)} == {"9/3"}


def test_two_passes_of_one_compile(plans: dict[str, Plan], reports: Path) -> None:
    document = load(reports / "together")
    found = facts(compare_passes(document, "bucket_collectives", "hoist_starts"), "graphs")
    final = {graph["direction"]: graph for graph in document["frames"][0]["graphs"]}
    assert not any(fact == "nodes" for _, fact in found)  # they only move
    assert found["forward", "peak_bytes"][1] == final["forward"]["peak_bytes"]
    lines = lines_between(document, "lower_gathers", "bucket_collectives")
    assert f"--- {document['frames'][0]['frame']} forward: lower_gathers" in lines
    assert sum(line.startswith("+") and "all_gather_into_tensor(" in line for line in lines) == 2  # forward, backward
    nodes = facts(compare_passes(document, CAPTURED, "hoist_starts"), "graphs")["forward", "nodes"]
    assert nodes[1] == plans["together"].graphs[0].nodes > nodes[0]


def test_diff_prints_the_changes(reports: Path) -> None:
    found = typed("diff", reports / "together", reports / "apart", "--json")
    expected = compare(load(reports / "together"), load(reports / "apart"))
    assert json.loads(found.stdout) == {"changes": [each.as_json() for each in expected]}
    shown = typed("diff", reports / "together" / "rank0", reports / "apart" / "rank0").stdout
    assert "together/rank0" in shown and "nodes by operator" in shown and "+2 (+200.0%)" in shown
    words = ("diff", next((reports / "apart").rglob("report.json")), "--passes", "lower_gathers", "sink_waits")
    document = json.loads(typed(*words, "--json").stdout)
    shown = typed(*words).stdout
    assert document["lines"] and all(line in shown for line in document["lines"])
    assert {change["section"] for change in document["changes"]} <= {"graphs"}


def test_differences_have_units() -> None:
    def cells(fact: str, before: Any, after: Any) -> tuple[str, ...]:
        change = Change(section="graphs", frame="0/0", subject="forward", fact=fact, before=before, after=after)
        return change.cells()[2:]

    assert cells("peak_bytes", 2048, 1024) == ("peak", "2.00 KiB", "1.00 KiB", "-1.00 KiB (-50.0%)")
    assert cells("exposed_us", 0, 1500) == ("exposed", "0.0 us", "1.50 ms", "+1.50 ms")
    assert cells("zero_stage", 3, 2) == ("zero stage", "3", "2", "-1 (-33.3%)")
    assert cells("lifetime", "kept", None) == ("lifetime", "kept", "-", "")
    assert cells("predicted_us", None, 3.0) == ("predicted", "-", "3.0 us", "")


def test_diff_refuses_in_one_line(reports: Path, tmp_path: Path) -> None:
    one = reports / "apart"
    assert "write two reports, or one with --passes" in refused("diff", one)
    assert "write one report with --passes" in refused("diff", one, one, "--passes", "sink_waits", "hoist_starts")
    assert "there is no report.json in" in refused("diff", one, tmp_path)
    assert "cannot read the report" in refused("diff", one, tmp_path / "absent.json")
    assert "there is no pass 'bucket'" in refused("diff", one, "--passes", "bucket", "hoist_starts")
    assert "ran on different graphs" in refused("diff", one, "--passes", "dedupe_gathers", "hoist_starts")


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_makes_the_other_files_anew(reports: Path, tmp_path: Path) -> None:
    shutil.copytree(reports, tmp_path / "copy")
    kept = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert any(path.name == "trace.json" for path in kept)
    for path in kept:
        if path.name not in ("report.json", "times.json"):
            path.unlink()
    found = typed("report", tmp_path / "copy", "--json")
    assert found.exit_code == 0, found.stderr
    written = json.loads(found.stdout)
    page = tmp_path / "copy" / "index.html"
    assert Path(written["page"]) == page
    assert page.read_text() == page_text(load(tmp_path / "copy"))
    page.unlink()
    files = {path for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert {path: path.read_bytes() for path in files} == kept
    made = set(map(Path, written["files"]))
    assert made == {path for path in kept if path.name not in ("report.json", "times.json")}
    (document,) = (tmp_path / "copy" / "apart").rglob("report.json")
    assert "trace.json" in typed("report", document).stdout
    assert document.with_name("index.html").read_text() == page_text(load(document))


def test_report_opens_the_page(reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(reports, tmp_path / "copy")
    opened: list[str] = []
    found = True

    def browser(address: str) -> bool:
        opened.append(address)
        return found

    monkeypatch.setattr("webbrowser.open", browser)
    assert typed("report", tmp_path / "copy").exit_code == 0
    assert opened == []
    assert typed("report", tmp_path / "copy", "--open").exit_code == 0
    assert opened == [(tmp_path / "copy" / "index.html").as_uri()]
    found = False
    refused_now = typed("report", tmp_path / "copy", "--open")
    assert refused_now.exit_code == 2 and "there is no browser" in refused_now.stderr


def test_report_refuses_in_one_line(tmp_path: Path) -> None:
    assert "there is no report.json in" in refused("report", tmp_path)
    (tmp_path / "report.json").write_text("{")
    assert "cannot read the report" in refused("report", tmp_path)
    (tmp_path / "report.json").write_text('{"format": "zgraph-report", "version": "9.0"}')
    assert "of version 9.0" in refused("report", tmp_path)


def test_report_and_diff_as_processes(reports: Path, tmp_path: Path) -> None:
    shutil.copytree(reports, tmp_path / "copy")
    for words in (["report", "copy"], ["diff", "copy/together", "copy/apart"]):
        command = [sys.executable, "-m", "zgraph", *words, "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)


def test_plan_writes_a_report_that_can_be_compared(reports: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "planned_step.py").write_text(
        "import torch\nfrom tests.reporting.test_compare import build\n"
        "def step():\n    return build(), (torch.zeros(4, 16),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = ("plan", "planned_step:step", "--world-size", "2", "--hardware", "cpu", "--html")
    found = json.loads(typed(*words, "out", "--json").stdout)
    assert Path(found["report"]) == Path("out/index.html")
    assert Path("out/index.html").read_text() == page_text(load(Path("out")))
    assert compare(load(Path("out")), load(reports / "together")) != []
    (tmp_path / "file").write_text("")
    assert "the report cannot be written to file" in typed(*words, "file").stderr.splitlines()[-1]
