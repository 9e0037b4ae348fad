"""Moments of bf16, rounded stochastically: steps equal plain lines with a plain twin of the kernel, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.judges.replicated import whole
from tests.support.late_updates import LateSteps
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, worlds
from tests.support.resting import under
from tests.support.rounded_updates import RoundedSteps
from tests.support.tiers import slow
from tests.support.whole_steps import Case, Loop, Outcome, assert_same, train

P = zgraph.passes
HOST = zgraph.Offload(optimizer="host", moments_dtype=torch.bfloat16)
BOTH = replace(HOST, params="host")
DISK = zgraph.Offload(params="disk", optimizer="disk", path="given by `under`", moments_dtype=torch.bfloat16)
STATE_ON_DISK = replace(DISK, params=None)

# Any two of tier, stage, precision, window, plan and clipping that may meet stand together in some row.
CASES = {
    "stage 3, host": Case(at_rest=BOTH, clip="torch", schedule=True),
    "stage 2, disk": Case(at_rest=DISK, stage=2, precision="bf16", clip="zgraph", accumulation=2),
    "stage 1, adam": Case(at_rest=HOST, stage=1, optimizer="adam_fused", accumulation=2, no_sync=True, schedule=True),
    "stage 0": Case(at_rest=STATE_ON_DISK, stage=0, optimizer="adam_fused", clip="torch"),
    "loco": Case(at_rest=HOST, stage=2, loco=True, accumulation=2, no_sync=True, clip="torch"),
    "resumed": Case(at_rest=DISK, resume=True, precision="autocast", frozen=True),
    "planned": Case(at_rest=STATE_ON_DISK, frugal=True, stage=1, clip="zgraph", precision="bf16"),
    "planned, streamed": Case(at_rest=BOTH, frugal=True, streamed=True, resume=True, accumulation=2, no_sync=True),
    "late": Case(at_rest=replace(HOST, delayed_update_after=1), stage=2, clip="torch", precision="bf16"),
    "late, resumed": Case(at_rest=replace(DISK, delayed_update_after=1), resume=True, optimizer="adam_fused"),
}
QUICK = ("stage 3, host", "resumed")


def twin(case: Case, steps: int) -> Outcome:
    """What the plain lines leave."""
    after = None if case.at_rest is None else case.at_rest.delayed_update_after
    late: list[LateSteps] = []

    def prepare(loop: Loop) -> None:
        RoundedSteps(loop.model, loop.optimizer)
        if after is not None:
            late.append(LateSteps(loop.optimizer, after))

    return train(
        replace(case, at_rest=None, offload=False, lowering="fx"),
        whole_step=False,
        steps=steps,
        prepare=prepare,
        finish=lambda function: late[0].flush() if late else None,
    )


def compare(case: Case) -> None:
    found = train(case, whole_step=True, steps=4, finish=lambda function: function.flush())
    assert_same(found, twin(case, 4))
    moments = [value for key, (_, value) in found.state.items() if "exp_avg" in key]
    assert moments and {value.dtype for value in moments} == {torch.bfloat16}


@worlds(2)
@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_a_step_with_rounded_moments_equals_the_plain_twin(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(compare, replace(CASES[name], at_rest=under(tmp_path, CASES[name].at_rest)))
