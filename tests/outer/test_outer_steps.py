"""`zgraph.OuterSteps`: the bits of a plain twin, the identities of its arithmetic, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.models import VOCABULARY, Language
from tests.support.outer_twin import Options, Twin
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph import passes
from zgraph.outer.fragments import pack

LOCO = passes.LoCo(bits=4)


def batches(step: int, site: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * site + rank))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def check_twin(dp: int, stage: int, codec: passes.BlockMethod | None, delay: int) -> None:
    """Three rounds of a sharded, compiled model against the twin: all parameters after each step."""
    torch.manual_seed(0)
    model = Language(width=12)
    sites = dist.get_world_size() // dp
    mesh = init_device_mesh("cpu", (sites, dp), mesh_dim_names=("site", "dp"))
    site, rank = mesh["site"].get_local_rank(), mesh["dp"].get_local_rank()
    fragments = pack([one.numel() for one in model.parameters()], 3)
    options = Options(fragments, codec=codec, delay=delay)
    twin = Twin(model, sites, dp, stage, options)
    zgraph.shard(model, mesh["dp"], zero_stage=stage)
    compiled = torch.compile(model, backend="zgraph", options={"lowering": "fx"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in twin.models]
    outer = zgraph.OuterSteps(
        model, mesh["site"], every=options.every, lr=options.lr, momentum=options.momentum,
        codec=codec, fragments=3, delay=delay,
    )  # fmt: skip

    def compare(when: str) -> None:
        for (name, one), expected in zip(model.named_parameters(), twin.models[site].parameters(), strict=True):
            assert torch.equal(whole(one), expected), f"{name} {when}"

    for step in range(3 * options.every):
        loss_of(compiled, *batches(step, site, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, (plain, stepping) in enumerate(zip(twin.models, inner, strict=True)):
            grads = [
                torch.autograd.grad(loss_of(plain, *batches(step, number, one)), [*plain.parameters()])
                for one in range(dp)
            ]
            for parameter, *parts in zip(plain.parameters(), *grads, strict=True):
                parameter.grad = sum(parts[1:], parts[0]) / dp
            stepping.step()
        compare(f"before outer step {step}")
        outer.step()
        twin.step()
        compare(f"after outer step {step}")
    outer.finish()
    twin.finish()
    compare("at the end")
    ends = [torch.empty_like(whole(one)) for one in model.parameters()]
    for one, end in zip(model.parameters(), ends, strict=True):
        end.copy_(whole(one))
        dist.broadcast(end, 0)
        assert torch.equal(end, whole(one)), "all sites end with the same bits"


@worlds(2)
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("codec", [None, LOCO])
def test_two_sites_of_one_rank_equal_the_twin(ranks: Ranks, codec: passes.BlockMethod | None, delay: int) -> None:
    ranks.run(check_twin, 1, 3, codec, delay)


@worlds(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_sites_of_two_ranks_equal_the_twin(ranks: Ranks, stage: int) -> None:
    ranks.run(check_twin, 2, stage, LOCO, 1)
