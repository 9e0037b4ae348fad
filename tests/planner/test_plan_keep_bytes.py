"""What a budget lets the stages of a pipeline keep: in the plan, and beside real ranks that are given its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.pipelines import (
    KEEPS,
    MICRO_BATCHES,
    WIDTH,
    beside_rest,
    buffers_of,
    kept_by,
    peak_for_real,
    plan_within,
    within,
)
from tests.support.ranks import Ranks, worlds


def test_room_for_all_parameters_is_stage_2() -> None:
    """In each time and size of each stage, and so in the step under every schedule; with nothing kept it is stage 3."""
    roomy, at_2, at_3 = within(2**30, "1F1B"), within(None, "1F1B", 2), within(None, "1F1B")
    assert [stage.cost for stage in roomy.stages] == [stage.cost for stage in at_2.stages]
    assert roomy.runs == at_2.runs and roomy.unkept == at_3.run
    weights = 2 * 2 * WIDTH * WIDTH * 4
    assert [(stage.keep_bytes, stage.stage_3_bytes) for stage in roomy.stages] == [(weights, weights)] * 2
    assert [(stage.keep_bytes, stage.stage_3_bytes) for stage in at_2.stages] == [(None, 0)] * 2
    assert roomy.run.step_us < at_3.run.step_us


def test_budget_keeps_every_parameter_that_fits() -> None:
    """One byte less than what all of them hold takes some from the rank that holds it, and from no other.

    Beside that rank's first stage a micro-batch holds both weights anyway, in a bucket: to keep one of them makes it
    smaller, so that it fits where nothing kept would not. One byte less than that fits in no way.
    """
    weight = 2 * WIDTH * WIDTH * 4
    full = within(2**30, "1F1B")
    most = max(beside_rest(full))
    assert beside_rest(full).index(most) == 1
    less = within(most - 1, "1F1B")
    assert kept_by(less) == [2 * weight, weight] and kept_by(within(most, "1F1B")) == [2 * weight] * 2
    least = beside_rest(less)[1]
    assert less.unkept is not None and less.unkept.peak_bytes[1] - less.stages[1].cost.resting_bytes > least
    tight = within(least, "1F1B")
    assert kept_by(tight)[1] == weight and max(beside_rest(tight)) <= least
    with pytest.raises(
        ValueError, match=rf"zgraph\.plan_pipeline: the step of the pipeline does not fit into .*={least - 1}: "
    ) as e:
        within(least - 1, "1F1B")
    assert f"a rank holds at least {least} bytes in addition to parameters and the optimizer's state" in str(e.value)


def test_one_micro_batch_keeps_nothing() -> None:
    found = within(2**30, "GPipe", micro_batches=1)
    assert kept_by(found) == [0, 0] and found.unkept == found.run
    # Nor does a micro-batch save for its backward what the budget has room for: others may be in flight.
    without = within(None, "GPipe", micro_batches=1)
    assert [stage.cost for stage in found.stages] == [stage.cost for stage in without.stages]


def test_the_text_json_and_tables_of_a_budget() -> None:
    plan = plan_within(KEEPS["1F1B"], "1F1B")
    found = plan.pipeline
    assert found is not None and found.unkept is not None
    text = str(plan)
    assert f"within budget_bytes={KEEPS['1F1B']}: {found.run.step_us / 1e3:.2f} ms; if each micro-batch" in text
    assert f"is at stage 3, {found.unkept.step_us / 1e3:.2f} ms" in text
    assert "stage 1: gathers 32.00 KiB of 64.00 KiB once per step, keep_bytes=32768" in text
    others = {line.split()[1]: line.endswith(", over the budget") for line in text.splitlines() if "  with " in line}
    assert others == {"GPipe:": True, "Interleaved1F1B:": False, "InterleavedZeroBubble:": True}
    as_json = plan.as_json()["pipeline"]
    assert as_json["budget_bytes"] == KEEPS["1F1B"] and as_json["step_us_unkept"] == found.unkept.step_us
    assert [(stage["keep_bytes"], stage["stage_3_bytes"]) for stage in as_json["stages"]] == [
        (65536, 65536),
        (32768, 65536),
    ]
    assert {name: run["fits"] for name, run in as_json["schedules"].items()} == {
        one.schedule: max(beside_rest(replace(found, schedule=one.schedule))) <= KEEPS["1F1B"] for one in found.runs
    }
    rows = {table.title: table.rows for table in plan.tables()}
    assert [row[-1] for row in rows["stages, for each micro-batch"]] == [
        "64.00 KiB of 64.00 KiB",
        "32.00 KiB of 64.00 KiB",
    ]
    last = rows["schedules of 2 stages and 4 micro-batches"][-1]
    assert last[0] == "1F1B, nothing kept" and last[-1] == "yes"
    # Only what is planned in the end is reported, and counted.
    frames = {graph.frame for graph in plan.compiled.graphs}
    assert frames == {
        f"stage{number}.keep{kept}.{position}.0/0"
        for number, kept in ((0, 65536), (1, 32768))
        for position in ("open", "closing")
    }


@worlds(4)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_stages_keeping_planned_parameters_stay_within_budget(ranks: Ranks, schedule: str) -> None:
    """Some stages keep a part; on each rank the figure of the plan is the real one."""
    chunks, found = 1 if schedule == "1F1B" else 2, within(KEEPS[schedule], schedule)
    kept = kept_by(found)
    assert any(0 < count < stage.stage_3_bytes for count, stage in zip(kept, found.stages, strict=True)), kept
    real = ranks.run(peak_for_real, 3, chunks, schedule, 2, MICRO_BATCHES, kept)
    for rank, peak in enumerate(beside_rest(found)):
        buffers = buffers_of(schedule, rank, chunks)
        assert peak <= KEEPS[schedule]
        for each in real[2 * rank : 2 * rank + 2]:
            assert each + buffers <= KEEPS[schedule]
            assert peak - buffers == pytest.approx(each, rel=0.05)
