"""Outer steps in loops of all kinds: each loop runs twice, with `zgraph.OuterSteps` and with a twin on whole values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


# --- other kinds of models --------------------------------------------------------------------------------------------


def check_a_pipeline() -> None:
    """Each stage has its own outer steps, with its like on the other site; at the end stages are equal on both."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("site", "pp", "dp"))
    site, place = mesh["site"].get_local_rank(), mesh["pp"].get_local_rank()
    torch.manual_seed(place)
    chunk = zgraph.shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), mesh["dp"])
    stage = zgraph.PipelineStage(chunk, place, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)
    outer = zgraph.OuterSteps(chunk, mesh["site"], every=3, fragments=2)
    generator = torch.Generator().manual_seed(site)
    for _ in range(7):
        x, y = torch.randn(2, 4, 6, generator=generator)
        schedule.step(*([x] if place == 0 else []), target=y if place == 1 else None)
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    before = [whole(one.detach()).clone() for one in chunk.parameters()]
    outer.finish()
    for one, old in zip(chunk.parameters(), before, strict=True):
        first = whole(one.detach()).clone()
        assert not torch.equal(first, old), "the sites had other values before"
        dist.broadcast(first, group=mesh["site"].get_group(), group_src=0)
        assert torch.equal(first, whole(one.detach()))


@worlds(4)
def test_stages_of_a_pipeline_have_outer_steps_of_their_own(ranks: Ranks) -> None:
    ranks.run(check_a_pipeline)


def check_layouts(split: bool) -> None:
    """Hybrid sharding, or layers split inside a site: values at the end equal those of sites without either."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("site", "inner", "dp"))
    site = mesh["site"].get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = [copy.deepcopy(model) for _ in range(2)]
    if split:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = zgraph.shard(parallelize_module(model, mesh["inner"], plan), mesh["dp"])
    else:
        model = zgraph.shard(model, mesh["inner", "dp"])
    options = {"every": 2, "lr": 0.7, "momentum": 0.5, "fragments": 2, "codec": None}
    outer = zgraph.OuterSteps(model, mesh["site"], **options)
    numels = [one.numel() for one in plain[0].parameters()]
    twin = Twin(plain[0], 2, 1, 0, Options(pack(numels, 2), every=2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, *twin.models)]
    for step in range(6):
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + one)) for one in range(2)]
        for one, batch in zip((model, *twin.models), (batches[site], *batches), strict=True):
            one(batch).square().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        outer.step()
        twin.step()
    outer.finish()
    twin.finish()
    for one, expected in zip(model.parameters(), twin.models[site].parameters(), strict=True):
        torch.testing.assert_close(whole(one.detach()), expected.detach())


@worlds(4)
@pytest.mark.parametrize("split", [False, True])
def test_replicas_and_split_layers_inside_a_site(ranks: Ranks, split: bool) -> None:
    ranks.run(check_layouts, split)
