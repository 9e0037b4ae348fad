"""The target of a pipeline: costs, the one budget, and what groups share, in the context of all passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.costs import costs_of
from tests.support.graphs import deep, fake_world, traced
from zgraph import Hardware, PassContext, PassList, Target
from zgraph.analysis.hardware import Link
from zgraph.compiler.target import sharing_of
from zgraph.passes import InterleaveMicroBatches, StreamStates, presets
from zgraph.tiers.lanes import Lane

CPU = Hardware.preset("cpu")


def test_the_context_has_costs_budget_and_sharing() -> None:
    machine = replace(
        CPU,
        links={1: Link(latency_us=1.0, bytes_per_us=100.0, gain_at_once=1.5)},
        collectives_at_once=3,
        cpu_us_per_collective=7.0,
        cpu_us_per_wire_byte=0.25 / 100.0,
    )
    with fake_world(2):
        graph = traced(deep, [], world=2).graphs["backward"].graph
        ctx = Target(hardware=machine, budget_bytes=77).known_to(PassContext(), graph)
        assert ctx.cost_of is not None
        assert {node: ctx.cost_of(node) for node in graph.nodes} == costs_of(graph, machine)
    assert (ctx.hardware, ctx.plan_bytes) == (machine, 77)
    assert ctx.sharing.links == dict.fromkeys([Lane.of_group("0"), Lane.of_group("0.reductions")], "axis of stride 1")
    assert ctx.sharing.gains == {"axis of stride 1": 1.5}
    assert (ctx.sharing.at_once, ctx.sharing.issue_us) == (3, 7.0)
    assert ctx.sharing.compute_share == pytest.approx(0.25)


def test_slow_cpu_computes_nothing_during_a_collective() -> None:
    with fake_world(2):
        graph = traced(deep, [], world=2).graphs["forward"].graph
        assert sharing_of(graph, replace(CPU, cpu_us_per_wire_byte=1.0)).compute_share == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": "h100"}, r"zgraph.Target: hardware is a str; write zgraph.calibrate\(\)"),
        ({"hardware": CPU, "budget_bytes": 0}, "zgraph.Target: budget_bytes=0 holds nothing"),
        ({"hardware": CPU, "budget_bytes": "2GiB"}, r"budget_bytes='2GiB' is a str; write a number of bytes, such as"),
    ],
)
def test_invalid_target_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(**options)


def test_a_pipeline_takes_nothing_else_for_a_target() -> None:
    with pytest.raises(ValueError, match=r"zgraph.PassList: target is a Hardware; write zgraph.Target\(hardware="):
        PassList(presets.default(), target=CPU)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("preset", ["default", "planned"])
def test_a_preset_says_where_hardware_goes(preset: str) -> None:
    call: Any = getattr(presets, preset)
    write = r"write zgraph\.PassList\(presets\.planned\(\), target=zgraph\.Target\(hardware=\.\.\."
    with pytest.raises(TypeError, match=rf"presets\.{preset}\(\) takes no hardware, which belongs to .*{write}\)\)$"):
        call(hardware=CPU)
    with pytest.raises(TypeError, match=rf"takes no budget_bytes, .*{write}, budget_bytes=\.\.\.\)\)$"):
        call(budget_bytes=1)
    with pytest.raises(TypeError, match=rf"presets\.{preset}\(\) got an unexpected keyword argument 'bucket_byte'$"):
        call(bucket_byte=1)


def test_planned_preset_differs_only_in_ordering_passes() -> None:
    *planned, overlap, streams, copies = presets.planned(bucket_bytes=77)
    assert planned.pop(1) == InterleaveMicroBatches(when="faster")
    assert [*planned, streams] == [*presets.default(bucket_bytes=77)[:-4], StreamStates(updates="planned")]
    assert presets.default()[-1] == StreamStates()
    assert (overlap.name, streams.name, copies.name) == ("schedule_overlap", "stream_states", "schedule_copies")


def test_streaming_passes_come_last_and_use_costs_if_planned() -> None:
    def ends(pipeline: PassList | None) -> list[str]:
        return [one.name for one in presets.with_streams(pipeline).passes[-3:]]

    target = Target(hardware=CPU)
    bare = presets.planned()[:-2]
    assert ends(PassList(bare, target=target)) == ["schedule_overlap", "stream_states", "schedule_copies"]
    assert presets.with_streams(PassList(bare, target=target)).target == target
    assert ends(None)[-1] == ends(PassList(presets.default()[:-1]))[-1] == "stream_states"
