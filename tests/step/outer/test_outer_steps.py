"""`zgraph.OuterSteps`: the bits of a plain twin, the identities of its arithmetic, and sites that differ."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.models import Language
from tests.support.outer_runs import LOCO, Run, batches, loss_of
from tests.support.outer_twin import Options, Twin
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph import passes
from zgraph.step.outer.fragments import pack


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


@worlds(3, 6)
def test_three_sites_equal_the_twin(ranks: Ranks) -> None:
    """Of one rank or two; rows do not divide by three."""
    ranks.run(check_twin, ranks.world // 3, 3, LOCO, 1)


# --- identities -------------------------------------------------------------------------------------------------------


def exact_linear() -> nn.Linear:
    """A layer whose weights are small multiples of 1/8: few steps on such numbers are exact in fp32."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6).view(2, 3) / 8)
    return model


def check_every_step_is_ddp() -> None:
    """With a round after each step, lr=1 and momentum=0, SGD is that of the mean gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, replicated = exact_linear(), exact_linear()
    outer = zgraph.OuterSteps(model, dist.group.WORLD, every=1, lr=1.0, momentum=0.0, codec=None, fragments=1, delay=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = [torch.tensor([[1.0, 2.0, -1.0]]) * (site + 1) for site in range(world)]
    for _ in range(4):
        model(inputs[rank]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
        torch.stack([replicated(one).sum() for one in inputs]).mean().backward()
        assert replicated.weight.grad is not None
        with torch.no_grad():
            replicated.weight -= 0.5 * replicated.weight.grad
        replicated.weight.grad = None
        assert torch.equal(model.weight, replicated.weight)


@worlds(2, 4)
def test_a_round_after_each_step_is_data_parallel_sgd(ranks: Ranks) -> None:
    ranks.run(check_every_step_is_ddp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_site_with_lr_1_and_no_momentum_changes_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Language(width=12).to(dtype)
    plain = copy.deepcopy(model)
    outer = zgraph.OuterSteps(model, every=2, lr=1.0, momentum=0.0)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(5):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss_of(one, *batches(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        outer.step()
    outer.finish()
    for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, expected)


def test_momentum_of_one_site_is_nesterovs() -> None:
    """torch.optim.SGD steps anchors to the same values, up to rounding."""
    model = exact_linear()
    expected = copy.deepcopy(model)
    outer = zgraph.OuterSteps(model, every=1, lr=0.5, momentum=0.75)
    sgd = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.75, nesterov=True)
    for step in range(5):
        change = torch.full((2, 3), 0.25 * (-1) ** step)
        with torch.no_grad():
            model.weight += change
        outer.step()
        expected.weight.grad = -change
        sgd.step()
        torch.testing.assert_close(model.weight, expected.weight)


def distances_to_rounds_without_codes(codec: passes.BlockMethod) -> list[float]:
    """Largest distance of any parameter, relative to its size, after each of 40 rounds."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    models = [nn.ParameterList([torch.zeros(40, 64), torch.zeros(300)]) for _ in range(2)]
    group = dist.group.WORLD
    coded = zgraph.OuterSteps(models[0], group, every=1, lr=1.0, momentum=0.0, codec=codec, fragments=1, delay=0)
    exact = zgraph.OuterSteps(models[1], group, every=1, lr=1.0, momentum=0.0, codec=None, fragments=1, delay=0)
    found: list[float] = []
    for _ in range(40):
        with torch.no_grad():
            for pair in zip(*(model.parameters() for model in models), strict=True):
                change = torch.randn(pair[0].shape, generator=generator)
                for one in pair:
                    one += change
        coded.step()
        exact.step()
        pairs = zip(*(model.parameters() for model in models), strict=True)
        found.append(max(float((one - other).norm() / one.numel() ** 0.5) for one, other in pairs))
    return found


@worlds(2)
def test_what_codes_lose_comes_later(ranks: Ranks) -> None:
    """With error feedback, anchors stay as close to those of rounds without codes as after the first round."""
    with_feedback, without = (
        ranks.run(distances_to_rounds_without_codes, codec)[0]
        for codec in (passes.ErrorFeedback(bits=4, error_dtype=torch.float32), passes.NoFeedback(bits=4))
    )
    assert max(with_feedback) < 2 * with_feedback[0]
    assert without[-1] > 4 * without[0], "without it, losses add up as in a random walk"


# --- sites that differ ------------------------------------------------------------------------------------------------


def check_first_values() -> None:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("site", "dp"))
    torch.manual_seed(mesh["site"].get_local_rank())
    model = zgraph.shard(Language(width=12), mesh["dp"])
    zgraph.OuterSteps(model, mesh["site"])
    torch.manual_seed(0)
    for one, first in zip(model.parameters(), Language(width=12).parameters(), strict=True):
        assert torch.equal(whole(one), first)


@worlds(2, 4)
def test_sites_start_from_the_values_of_the_first(ranks: Ranks) -> None:
    ranks.run(check_first_values)


def check_weights() -> None:
    """A site with three times the tokens counts three times."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(8.0)
    outer = zgraph.OuterSteps(model, dist.group.WORLD, every=2, lr=1.0, momentum=0.0, codec=None, fragments=1, delay=0)
    for step in range(2):
        with torch.no_grad():
            model.weight -= 1 + dist.get_rank()
        outer.step(weight=[0.5, 1.5][dist.get_rank()])
        assert model.weight[0, 0] == (8 - (0.25 * 2 + 0.75 * 4) if step else 7 - dist.get_rank())


@worlds(2)
def test_sites_count_by_their_weights(ranks: Ranks) -> None:
    ranks.run(check_weights)


def test_the_text_says_what_has_happened() -> None:
    outer = zgraph.OuterSteps(nn.Linear(2, 2), every=1)
    outer.step()
    done = "1 step, 1 round, 0 bytes sent, waited 0.0 s, keeps 2.00 KiB"
    assert str(outer) == f"OuterSteps: 1 site, 1 fragment, every=1; {done}"


def check_metrics() -> None:
    """Each step's bytes and waiting add up to those of the run, pauses and other models left out."""
    run, steps = Run(2), list[zgraph.metrics.StepValues]()
    metrics = zgraph.Metrics(run.model)
    run.outer.step()
    for step in range(8):
        metrics.step()
        assert metrics.last is not None
        steps.append(metrics.last)
        run.train(step, step + 1)
    metrics.step()
    assert metrics.last is not None
    assert [one.site_bytes is None for one in steps] == [False] * 8
    counted = [*steps, metrics.last]
    assert sum(one.site_bytes or 0 for one in counted) == run.outer.sent_bytes > 0
    assert sum(one.site_wait_ms or 0 for one in counted) == pytest.approx(1e3 * run.outer.waited_s)
    metrics.step()
    assert metrics.last.site_bytes is metrics.last.site_wait_ms is None
    with metrics.pause():
        run.outer.finish()
    metrics.step()
    assert metrics.last.site_bytes is None


@worlds(2)
def test_metrics_count_what_sites_send(ranks: Ranks) -> None:
    ranks.run(check_metrics)


def check_other_first_values() -> None:
    """With copies inside a site, and a parameter of which one rank has no slice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "dp"))
    torch.manual_seed(mesh["site"].get_local_rank())
    model = zgraph.shard(nn.Linear(8, 1), mesh["dp"], zero_stage=0)
    zgraph.OuterSteps(model, mesh["site"])
    torch.manual_seed(0)
    for one, first in zip(model.parameters(), nn.Linear(8, 1).parameters(), strict=True):
        assert torch.equal(whole(one), first)


@worlds(4)
def test_copies_start_from_the_first_sites_values_together(ranks: Ranks) -> None:
    ranks.run(check_other_first_values)


def check_anchors_seen_by_all() -> None:
    """While rounds run, all sites evaluate the same anchors."""
    run = Run(2)
    for step in range(12):
        run.train(step, step + 1)
        with run.outer.anchor():
            for one in run.values():
                first = one.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, one), f"after step {step}"


@worlds(2)
def test_sites_evaluate_the_same_anchors(ranks: Ranks) -> None:
    ranks.run(check_anchors_seen_by_all)
