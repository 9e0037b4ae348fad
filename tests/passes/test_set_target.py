"""The target of a pipeline: costs, the one budget, and what groups share, in the context of all passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.graphs import deep, fake_world, traced
from zgraph import Hardware, PassContext
from zgraph.analysis.cost import costs_of
from zgraph.analysis.hardware import Link
from zgraph.passes import ScheduleOverlap, SetTarget, presets

CPU = Hardware.preset("cpu")


def test_the_context_has_costs_budget_and_sharing() -> None:
    machine = replace(
        CPU,
        links={1: Link(latency_us=1.0, bytes_per_us=100.0, gain_at_once=1.5)},
        collectives_at_once=3,
        cpu_us_per_collective=7.0,
        cpu_us_per_wire_byte=0.25 / 100.0,
    )
    ctx = PassContext()
    with fake_world(2):
        graph = traced(deep, [], world=2).graphs["backward"]
        assert not SetTarget(hardware=machine, budget_bytes=77).run(graph, ctx)
        assert ctx.cost_of is not None
        assert {node: ctx.cost_of(node) for node in graph.graph.nodes} == costs_of(graph.graph, machine)
    assert ctx.budget_bytes == 77
    assert ctx.sharing.links == dict.fromkeys(["group:0", "group:0.reductions"], "axis of stride 1")
    assert ctx.sharing.gains == {"axis of stride 1": 1.5}
    assert (ctx.sharing.at_once, ctx.sharing.issue_us) == (3, 7.0)
    assert ctx.sharing.compute_share == pytest.approx(0.25)


def test_a_cpu_that_cannot_keep_up_computes_nothing_beside_a_collective() -> None:
    ctx = PassContext()
    with fake_world(2):
        graph = traced(deep, [], world=2).graphs["forward"]
        SetTarget(hardware=replace(CPU, cpu_us_per_wire_byte=1.0)).run(graph, ctx)
    assert ctx.sharing.compute_share == 1


def test_the_preset_with_hardware_plans_instead_of_following_rules() -> None:
    first, *between, last = presets.default(hardware=CPU, budget_bytes=99, bucket_bytes=77)
    assert (first, last) == (SetTarget(hardware=CPU, budget_bytes=99), ScheduleOverlap())
    assert between == presets.default(bucket_bytes=77)[:-2]


def test_what_is_no_hardware_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set_target: hardware is a str; write zgraph.calibrate\(\)"):
        SetTarget(hardware="h100")  # pyright: ignore[reportArgumentType]
