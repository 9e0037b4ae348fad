"""The page of a pipeline's plan: what stands in its files is what was planned, and a browser shows it."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path

import pytest

import zgraph
from tests.support.browser import chromium, opened, pointed_at, rows_of
from tests.support.pipelines import KEEPS, MICRO_BATCHES, kept_by, plan_within
from tests.support.reports import large_report
from zgraph.planner.planned_step import Plan
from zgraph.planner.schedules.pipeline_plan import PipelinePlan
from zgraph.reporting.export.reading import load
from zgraph.reporting.page.write_page import write_page

SCHEDULE = "1F1B"


def pipeline_of(plan: Plan) -> PipelinePlan:
    assert plan.pipeline is not None
    return plan.pipeline


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan_within(KEEPS[SCHEDULE], SCHEDULE)


def test_the_folder_says_what_was_planned(planned: Plan, tmp_path: Path) -> None:
    """Each rank's actions one after the other, in all of the time for which it is busy, and the bytes to keep."""
    plan, folder = pipeline_of(planned), planned.report(tmp_path)
    document = load(tmp_path)
    (data,) = re.findall(r'id="report">(.*?)</script>', (folder / "index.html").read_text(encoding="utf-8"))
    assert json.loads(data)["pipeline"] == document["pipeline"]
    found = document["pipeline"]
    assert found["format"] == "zgraph-report-pipeline"
    assert [stage["keep_bytes"] for stage in found["stages"]] == kept_by(plan) != [0, 0]
    assert found["unkept"]["step_us"] == found["step_us_unkept"] > found["schedules"][SCHEDULE]["step_us"]
    columns = found["actions"]
    rows = list(zip(*(columns[name] for name in ("rank", "start_us", "end_us")), strict=True))
    for rank, busy_us in enumerate(plan.run.busy_us):
        own = [(start_us, end_us) for one, start_us, end_us in rows if one == rank]
        assert len(own) == 2 * MICRO_BATCHES
        assert sum(end_us - start_us for start_us, end_us in own) == pytest.approx(busy_us)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    assert max(columns["end_us"]) == plan.run.step_us
    assert {frame["frame"] for frame in document["frames"]} == {frame.frame for frame in planned.compiled.frames}


def test_a_frame_alone_has_no_pipeline(planned: Plan, tmp_path: Path) -> None:
    folder = planned.report(tmp_path)
    for report in folder.rglob("report.json"):
        assert "pipeline" not in load(report.parent)


def test_a_plan_of_another_version_is_refused(planned: Plan, tmp_path: Path) -> None:
    file = planned.report(tmp_path) / "pipeline.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(document | {"version": "0.0"}), encoding="utf-8")
    with pytest.raises(zgraph.ZgraphError, match=r"pipeline.json is a zgraph-report-pipeline of version 0.0, and this"):
        load(tmp_path)


def test_a_folder_without_room_costs_a_warning(planned: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank0" / "pipeline.json").mkdir(parents=True)  # which is no file to write to
    with caplog.at_level(logging.WARNING):
        folder = planned.report(tmp_path)
    assert any(folder.rglob("report.json")) and not (folder / "index.html").exists()
    assert f"cannot write the report to {folder}" in caplog.text


# --- in a browser -----------------------------------------------------------------------------------------------------


def test_tables_and_chart_show_the_plan(planned: Plan, tmp_path: Path) -> None:
    plan, folder = pipeline_of(planned), planned.report(tmp_path)
    with chromium() as browser, opened(browser, folder / "index.html") as page:
        ranks = rows_of(page, "pipeline-ranks-table")
        stages = rows_of(page, "pipeline-stages-table")
        schedules = rows_of(page, "pipeline-schedules-table")
        assert [int(row[-1]) for row in stages.values()] == kept_by(plan)
        assert [int(row[3]) for row in ranks.values()] == list(plan.run.peak_bytes)
        assert [float(row[1]) for row in ranks.values()] == pytest.approx(plan.run.busy_us)
        assert {name: float(row[0]) for name, row in schedules.items()} == {
            run.schedule: run.step_us for run in plan.runs
        } | {f"{SCHEDULE}, nothing kept": plan.unkept.step_us if plan.unkept else None}
        assert {name: row[3] for name, row in schedules.items() if name == SCHEDULE} == {SCHEDULE: "yes"}
        first = plan.run.actions[0]
        assert pointed_at(page, "pipeline-chart", 0, (first.start_us + first.end_us) / 2 / plan.run.step_us) == (
            "forward of micro-batch 0, stage 0"
        )
        last = plan.run.actions[-1]
        middle = (last.start_us + last.end_us) / 2 / plan.run.step_us
        assert (
            pointed_at(page, "pipeline-chart", last.rank, middle)
            == f"backward of micro-batch {MICRO_BATCHES - 1}, stage 0"
        )


def test_other_reports_have_no_such_section(tmp_path: Path) -> None:
    with chromium() as browser, opened(browser, write_page(large_report(80), tmp_path)) as page:
        assert page.locator("#pipeline").is_hidden() and page.locator("nav a[href='#pipeline']").is_hidden()
        assert page.locator("#summary").is_visible()
