"""Parameters and optimizer state that rest on the host or on disk: the same bits, and less on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.whole_steps import Case, compare

HOST = zgraph.Offload(params="host", optimizer="host")
STATE = zgraph.Offload(optimizer="host")
SHARDS = zgraph.Offload(params="host")
CASES = {
    "stage 3": Case(at_rest=HOST, clip="torch", schedule=True),
    "stage 0": Case(at_rest=HOST, stage=0, optimizer="sgd", clip="zgraph", accumulation=3, no_sync=True),
    "stage 1": Case(at_rest=STATE, stage=1, optimizer="adam", accumulation=3, no_sync=True, schedule=True),
    "stage 2, foreach": Case(at_rest=HOST, stage=2, optimizer="adamw_foreach", clip="torch", precision="bf16"),
    "shards alone": Case(at_rest=SHARDS, optimizer="sgd_foreach", accumulation=2, no_sync=True),
    "loco": Case(at_rest=HOST, loco=True, accumulation=2, clip="torch"),
    "resumed": Case(at_rest=HOST, resume=True, stage=3, optimizer="adamw_fused", precision="bf16"),
    "planned": Case(at_rest=STATE, frugal=True, clip="zgraph"),
}
QUICK = ("stage 3", "stage 1")
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK]


@worlds(2)
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_a_step_on_offloaded_state_equals_the_plain_loop(ranks: Ranks, name: str) -> None:
    assert ranks.run(compare, CASES[name])


DISK_CASES = {
    "stage 3": Case(clip="torch", schedule=True, precision="bf16"),
    "stage 1": Case(stage=1, optimizer="adam", accumulation=2, no_sync=True),
    "resumed": Case(resume=True, optimizer="sgd", loco=True),
}


@worlds(2)
@pytest.mark.parametrize("name", ["stage 3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("stage 1", "resumed"))])
def test_a_step_on_state_of_a_disk_equals_the_plain_loop(ranks: Ranks, name: str, tmp_path: Path) -> None:
    at_rest = zgraph.Offload(params="disk", optimizer="disk", path=tmp_path)
    assert ranks.run(compare, replace(DISK_CASES[name], at_rest=at_rest))
