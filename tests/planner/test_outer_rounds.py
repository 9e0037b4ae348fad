"""Rounds planned for a link between sites: hidden where they can be, and said where not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgraph
from zgraph.passes import LoCo
from zgraph.planner.outer_rounds import OuterPlan, plan_rounds
from zgraph.step.outer.rounds import WEIGHT_BYTES

NUMELS = [2**20] * 40
STEP_US = 400e3


def planned(link: str, every: int = 30, latency_us: float = 0.0, ranks: int = 1) -> OuterPlan:
    return plan_rounds(
        NUMELS, STEP_US, ranks=ranks, sites=2, link=link, every=every, codec=LoCo(bits=4), latency_us=latency_us
    )


def test_a_fast_link_needs_one_fragment_and_one_step() -> None:
    found = planned("1gbit")
    assert (found.fragments, found.delay, found.exposed_us) == (1, 1, 0.0)


def test_fragments_keep_the_delay_short() -> None:
    found = planned("100mbit")
    assert found.fragments > 1 and found.delay == 1 and found.exposed_us == 0


def test_what_a_link_cannot_carry_is_waited_for() -> None:
    """The bytes of all rounds, less the time of `every` steps."""
    found = planned("10mbit")
    assert found.exposed_us == pytest.approx(found.sent_bytes / (10 / 8) - STEP_US)
    assert found.fragments > 1, "a round then takes the fewest steps"
    assert planned("10mbit", every=120).exposed_us == 0


def test_the_lane_shows_when_the_link_is_busy() -> None:
    assert planned("1gbit").lane() == "0" + "." * 29
    lane = planned("100mbit").lane()
    shares = [lane.count(name) for name in dict.fromkeys(lane) if name != "."]
    assert len(shares) == planned("100mbit").fragments and set(shares) == {1}
    assert "." not in planned("10mbit").lane(), "the link is never idle where steps wait for it"
    assert len(planned("10mbit", every=120).lane()) == 60


def test_latency_speaks_for_few_fragments() -> None:
    assert planned("10mbit", latency_us=1e5).fragments < planned("10mbit").fragments


def test_bytes_are_those_of_codes_and_scales() -> None:
    """4 bits an element and 16 bits a group of 128, there and back, for half of the rows."""
    found = planned("1gbit")
    numel = sum(NUMELS)
    assert found.sent_bytes * 30 == 2 * (numel // 2) * (4 + 16 / 128) / 8 + WEIGHT_BYTES
    assert planned("1gbit", ranks=4).sent_bytes == pytest.approx(4 * found.sent_bytes, rel=1e-5)


def test_a_plan_has_the_parameters_of_a_rank() -> None:
    plan = zgraph.plan(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
        world_size=4,
        batch=lambda: (torch.zeros(4, 64),),
        hardware="h100",
    )
    assert plan.trained == (64 * 16, 16, 64 * 16, 16)
    assert str(plan.outer_steps(sites=2, link="1gbit")).startswith("zgraph.OuterSteps(model, sites, every=30, ")


@pytest.mark.parametrize(
    ("options", "text"),
    [({"sites": 1}, "sites=1"), ({"link": "fast"}, "link='fast'"), ({"every": 0}, "every=0")],
)
def test_options_are_refused_by_name(options: dict[str, object], text: str) -> None:
    given: dict[str, object] = {"sites": 2, "link": "1gbit", "every": 30, "ranks": 1, "codec": None, **options}
    with pytest.raises(ValueError, match=f"zgraph.Plan.outer_steps: {text}"):
        plan_rounds(NUMELS, STEP_US, **given)  # pyright: ignore
