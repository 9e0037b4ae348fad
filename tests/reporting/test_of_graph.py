"""The report of a graph: what is predicted, judged by a second account of machine and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from tests.support.costs import cost_of
from tests.support.graphs import Traced, deep, fake_world, inputs_for, mlp, traced
from tests.support.judges.event_machine import replay
from tests.support.judges.live_storages import StorageJudge
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.pass_list import PassList
from zgraph.graph import nodes
from zgraph.passes import ScheduleOverlap, presets
from zgraph.reporting.explanation import NO_COSTS, Explanation
from zgraph.reporting.lifetimes import Lifetime
from zgraph.reporting.of_graph import GraphReport, describe, predict
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.timeline import Sharing

RULES = list(PassList(presets.default(bucket_bytes=512)).of("graph"))
PLANNED = [*RULES[:-2], ScheduleOverlap()]


def described(found: Traced, limits: Limits | None = None) -> dict[str, GraphReport]:
    graphs = {direction: gm.graph for direction, gm in found.graphs.items()}
    known = predict(graphs, found.ctx, "0/0")
    names = ("0.weight", "1.weight")
    reports = describe(graphs, found.ctx, known, limits=limits, frame="0/0", parameters=names, reason="")
    return {report.direction: report for report in reports}


def with_costs(passes: list[GraphPass], **options: Any) -> Traced:
    """5 us a collective, 7 us a matmul, 1 us a sum over ranks, and collectives take half of the core."""
    found = traced(deep, RULES[:2], **options)
    found.know(cost_of=cost_of, sharing=Sharing(compute_share=0.5))
    for entry in passes[2:]:
        for direction, gm in found.graphs.items():
            entry.run(gm, replace(found.ctx, direction=direction))
    return found


@pytest.mark.parametrize("passes", [RULES, PLANNED], ids=["rules", "planned"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_time_and_exposure_are_those_of_a_second_account(passes: list[GraphPass], zero_stage: int) -> None:
    with fake_world(2):
        found = with_costs(passes, zero_stage=zero_stage)
        reports = described(found)
        exposed = 0
        for direction, gm in found.graphs.items():
            report = reports[direction]
            costs = {node: cost_of(node) for node in nodes.call_functions(gm.graph, lambda _: True)}
            judged = replay(list(gm.graph.nodes), costs, found.ctx.sharing)
            assert report.us == pytest.approx(float(judged.now))
            expected = {node.name: float(us) for node, us in judged.exposed.items() if us}
            assert {each.name: each.exposed_us for each in report.collectives if each.reason} == pytest.approx(expected)
            assert report.exposed_us == pytest.approx(sum(expected.values()))
            exposed += len(expected)
    assert exposed > 0
    assert all(bool(each.reason) == bool(each.exposed_us) for graph in reports.values() for each in graph.collectives)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_peak_is_what_a_look_at_real_storages_finds(zero_stage: int) -> None:
    """Backward beside what others hold: shards, handles and the step's inputs; saved values and tangents count."""
    with fake_world(2):
        found = traced(mlp, presets.default(), zero_stage=zero_stage)
        reports = described(found)
        for direction, gm in found.graphs.items():
            report, given = reports[direction], inputs_for(gm, 1)
            names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
            judge = StorageJudge([value for place, value in enumerate(given) if place not in report.owned])
            judge.run(gm.graph, given)
            assert report.peak is not None and report.peak.bytes == max(judge.during) > 0
            held = [name for place, name in enumerate(names) if place not in report.owned]
            if direction == "forward":
                assert held == names
            else:  # what forward computes has the name of its node; its inputs are primals
                assert held == [name for name in names if name.startswith("primals")]


def test_without_costs_bytes_and_peaks_remain() -> None:
    with fake_world(2):
        reports = described(traced(deep, RULES))
    assert [report.us for report in reports.values()] == [None, None]
    text = str(Explanation(tuple(reports.values())))
    assert text.endswith(NO_COSTS) and "exposed" not in text
    for report in reports.values():
        assert report.peak is not None and f"predicted peak {report.peak.bytes / 1024:.2f} KiB" in text


def test_a_cost_that_cannot_be_had_fails_no_compile(caplog: pytest.LogCaptureFixture) -> None:
    def broken(node: fx.Node) -> Any:
        raise RuntimeError("no cost")

    with fake_world(2):
        found = traced(deep, RULES)
        found.know(cost_of=broken)
        reports = described(found)
    assert "no prediction for the backward graph of frame 0/0" in caplog.text
    assert [report.us for report in reports.values()] == [None, None] and reports["forward"].sent_bytes == 6 * 128


def test_the_text() -> None:
    with fake_world(2):
        found = with_costs(PLANNED)
        text = str(Explanation(tuple(described(found).values())))
    lines = text.splitlines()
    assert lines[:6] == [
        "zgraph.explain: 2 graphs of 1 frame",
        "frame 0/0",
        f"  {Lifetime.FORWARD}: 1 parameter: 0.weight",
        f"  {Lifetime.REGATHERED}: 1 parameter: 1.weight",
        lines[4],
        lines[5],
    ]
    assert lines[4].startswith("  forward: ") and lines[4].endswith(" nodes, 768 bytes sent, 768 bytes received")
    assert lines[5].startswith("    predicted ") and lines[5].endswith(" us are exposed")
    at = lines.index("    all_gather_bucket_0_weight_2: all_gather_into_tensor f32, 256 bytes sent, 5 us")
    assert lines[at + 1] == "      2 parameters: 0.weight, 1.weight"
    assert lines[at + 2] == "      exposed for 5 us: too little compute before its result is needed"
    assert not text.endswith(NO_COSTS)
