"""The page of a plan with outer steps: the rounds that were planned, on a lane below the steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import zgraph
from tests.support.browser import chromium, opened, pointed_at
from zgraph.planner.outer_rounds import OuterPlan
from zgraph.planner.planned_step import Plan
from zgraph.reporting.export.reading import load


@pytest.fixture(scope="module")
def planned() -> Plan:
    return zgraph.plan(_net, world_size=1, batch=lambda: (torch.ones(2, 64),), hardware="cpu")


def _net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def hidden(planned: Plan) -> OuterPlan:
    """A round of each of several fragments, with pauses; bars of rounds are some pixels wide, bars of steps less."""
    found = planned.outer_steps(sites=2, link="100mbit", every=1500, latency_us=0.0)
    assert found.fragments > 1 and not found.exposed_us
    return found


def test_the_folder_says_what_was_planned(planned: Plan, tmp_path: Path) -> None:
    outer = hidden(planned)
    planned.report(tmp_path, outer)
    found = load(tmp_path)["sites"]
    assert found["format"] == "zgraph-report-sites"
    assert {name: found[name] for name in ("every", "fragments", "delay")} == {
        "every": outer.every, "fragments": outer.fragments, "delay": outer.delay,
    }  # fmt: skip
    rounds = found["rounds"]
    assert rounds["fragment"] == [*range(outer.fragments)]
    for start_us, end_us in zip(rounds["start_us"], rounds["end_us"], strict=True):
        assert end_us - start_us == pytest.approx(outer.round_us)
    assert "sites" not in load(planned.report(tmp_path / "without"))


def test_rounds_that_began_before_are_there(planned: Plan) -> None:
    """A link that is never idle: rounds follow each other without a pause, from before the first step to the end."""
    busy = planned.outer_steps(sites=2, link="10kbit", every=10)
    rounds = busy.rounds()
    assert rounds[0][1] < 0 < rounds[0][2] and busy.exposed_us > 0
    assert all(one[2] == other[1] for one, other in itertools.pairwise(rounds))


def test_a_browser_shows_the_rounds(planned: Plan, tmp_path: Path) -> None:
    outer = hidden(planned)
    folder = planned.report(tmp_path, outer)
    with chromium() as browser, opened(browser, folder / "index.html") as page:
        assert page.locator("#sites").is_visible() and page.locator("#pipeline").is_hidden()
        fragment, begin, end = outer.rounds()[1]
        middle = (begin + end) / 2 / outer.every
        assert pointed_at(page, "sites-chart", 1, middle) == f"round of fragment {fragment}"
        assert "of the steps" in pointed_at(page, "sites-chart", 0, middle)
