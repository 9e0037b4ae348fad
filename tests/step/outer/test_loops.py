"""Outer steps in loops of all kinds: each loop runs twice, with `zgraph.OuterSteps` and with a twin on whole values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zgraph
from tests.support import models
from tests.support.outer_twin import Options, Twin
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, under
from tests.support.whole_steps import Case, Loop, assert_same, train
from tests.support.whole_tensors import whole
from zgraph import passes
from zgraph.step.outer.fragments import pack

STEPS = 7
LOCO = passes.LoCo(bits=4)
TWO_SITES = Case(sites=2, width=12)
# Any two of stage, precision, optimizer, tier, window and plan that may meet stand together in some row.
CASES = {
    "stage 3, clipped": replace(TWO_SITES, clip="torch"),
    "stage 2, planned": replace(TWO_SITES, stage=2, planned=True, precision="autocast", accumulation=2, no_sync=True),
    "stage 1, compressed": replace(TWO_SITES, stage=1, loco=True, precision="bf16", optimizer="sgd"),
    "stage 0, frozen": replace(TWO_SITES, stage=0, frozen=True, accumulation=2, no_sync=True, schedule=True),
    "on the host": replace(TWO_SITES, at_rest=HOST, optimizer="adamw_8bit", precision="bf16 weights", width=32),
    "on disk": replace(TWO_SITES, at_rest=DISK, stage=2, clip="zgraph", resume=True),
}


def with_outer(loop: Loop) -> None:
    outer = zgraph.OuterSteps(loop.model, loop.mesh["site"], every=3, lr=0.7, momentum=0.5, fragments=3)
    loop.after_step, loop.finish = outer.step, outer.finish


def with_twin(loop: Loop) -> None:
    """Gather all values of all sites, step the twin, and load this site's values."""
    sites, dp = loop.mesh.shape
    plain = models.Language(layers=1, width=loop.case.width).to(next(loop.model.parameters()).dtype)
    for one, own in zip(plain.parameters(), loop.model.parameters(), strict=True):
        one.requires_grad_(own.requires_grad).data.copy_(whole(own.detach()))
    trained = [place for place, one in enumerate(plain.parameters()) if one.requires_grad]
    numels = [one.numel() for one in plain.parameters() if one.requires_grad]
    fragments = [[trained[place] for place in places] for places in pack(numels, 3)]
    twin = Twin(plain, sites, dp, loop.case.stage, Options(fragments, every=3, codec=LOCO))
    group = loop.mesh["site"].get_group()

    def stepped(step: Callable[[], None]) -> None:
        for name, own in loop.model.named_parameters():
            mine = whole(own.detach())
            values = [torch.empty_like(mine) for _ in range(sites)]
            dist.all_gather(values, mine.contiguous(), group=group)
            for model, value in zip(twin.models, values, strict=True):
                model.get_parameter(name).data.copy_(value)
        step()
        loop.model.load_state_dict(twin.models[loop.mesh["site"].get_local_rank()].state_dict())

    loop.after_step, loop.finish = lambda: stepped(twin.step), lambda: stepped(twin.finish)


def compare(case: Case) -> None:
    found = train(case, whole_step=True, steps=STEPS, prepare=with_outer)
    assert_same(found, train(replace(case, at_rest=None), whole_step=False, steps=STEPS, prepare=with_twin))


@worlds(4)
@pytest.mark.parametrize("name", [*CASES])
def test_a_loop_equals_one_whose_sites_exchange_whole_values(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(compare, replace(CASES[name], at_rest=under(tmp_path, CASES[name].at_rest)))
