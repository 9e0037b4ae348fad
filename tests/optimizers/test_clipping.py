"""Clipping sees the norm of the whole gradient: uneven shards, ranks without rows, parts at different stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zgraph
from tests.support import models
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks, every_world
from tests.support.whole_tensors import whole
from zgraph.optimizers.local_norm import ShardedGradients
from zgraph.torch_compat.dtensor import layouts_of

MAX_NORM = 0.5


def _layers_replicated(model: nn.Module) -> None:
    zgraph.shard(model.layers, zero_stage=0)
    zgraph.shard(model, zero_stage=3)


def _layers_sharded(model: nn.Module) -> None:
    zgraph.shard(model.layers, zero_stage=3)
    zgraph.shard(model, zero_stage=0)


def _one_layer_replicated(model: nn.Module) -> None:
    zgraph.shard(model.layers[2], zero_stage=0)
    zgraph.shard(model, zero_stage=3)


# models.Uneven has 13, 5, 2 and 1 rows and a scalar: no world size divides them all, and some ranks get none.
STAGES: dict[str, Callable[[nn.Module], Any]] = {
    "stage0": lambda model: zgraph.shard(model, zero_stage=0),
    "stage3": lambda model: zgraph.shard(model, zero_stage=3),
    "layers_replicated": _layers_replicated,
    "layers_sharded": _layers_sharded,
    "one_layer_replicated": _one_layer_replicated,
}


def with_gradients(stages: str) -> nn.Module:
    torch.manual_seed(5)
    model = models.Uneven()
    STAGES[stages](model)
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    (model(inputs).square().sum() * 10).backward()
    return model


def clip(stages: str, norm_type: float, foreach: bool | None, ours: bool) -> float:
    model = with_gradients(stages)
    before = {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
    everything = torch.cat([grad.flatten() for grad in before.values()]).double()
    clip_grad_norm_ = zgraph.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
    norm = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
    assert isinstance(norm, DTensor)
    found = norm.full_tensor()

    if norm_type == math.inf:
        bound = 0.0  # the largest entry is one of the entries
    else:
        # A square root of a sum of n squares, added up as partial sums: of each rank's rows, of the parameters, of the
        # ranks. All terms are positive, so a rounding changes the sum by at most u = 2^-24 of it. An entry meets its
        # own square, at most n + P + N additions, and per level (3: rows, ranks, parameters) a root, the next square
        # and the power's own error (1 ulp = 2 u). The last root halves the sum's relative error; not counted here.
        parameters = len(before)
        bound = (len(everything) + parameters + dist.get_world_size() + 3 * 4 + 1) * 2**-24
    exact = torch.linalg.vector_norm(everything, norm_type).item()
    assert abs(found.item() - exact) <= bound * exact, f"norm {found.item()}, exactly {exact}"

    assert exact > MAX_NORM, "nothing is clipped"
    for name, parameter in model.named_parameters():
        clipped = before[name] * (MAX_NORM / (found + 1e-6))
        assert torch.equal(whole(parameter.grad), clipped), name
    return found.item()


def assert_clips(ranks: Ranks, *case: Any) -> None:
    found = ranks.run(clip, *case)
    assert len(set(found)) == 1, f"the ranks have other norms: {found}"


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("stages", STAGES)
@every_world
def test_the_norm_is_the_whole_models(ranks: Ranks, stages: str, norm_type: float, foreach: bool | None) -> None:
    assert_clips(ranks, stages, norm_type, foreach, True)


@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("stages", STAGES)
@every_world
def test_torchs_own_norm_is_the_whole_models(ranks: Ranks, stages: str, foreach: bool | None) -> None:
    assert_clips(ranks, stages, 2.0, foreach, False)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("stages", STAGES)
@every_world
def test_torchs_own_infinity_norm(ranks: Ranks, stages: str, foreach: bool) -> None:
    assert_clips(ranks, stages, math.inf, foreach, False)


def not_finite(bad: float, error_if_nonfinite: bool) -> str:
    model = with_gradients("stage3")
    if dist.get_rank() == dist.get_world_size() - 1:
        model.layers[0].weight.grad.to_local()[0, 0] = bad
    try:
        norm = zgraph.clip_grad_norm_(model.parameters(), MAX_NORM, math.inf, error_if_nonfinite)
    except RuntimeError as error:
        return str(error)
    return str(norm.full_tensor().item())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@every_world
def test_every_rank_sees_what_one_of_them_found(ranks: Ranks, bad: float) -> None:
    assert set(ranks.run(not_finite, bad, False)) == {str(bad)}
    [message] = set(ranks.run(not_finite, bad, True))
    assert f"the norm of order inf is {bad} on every rank" in message


def without_gradients() -> list[Any]:
    """First no parameter has a gradient, then two have one: is the norm 0, and the largest entry of the two?"""
    model = zgraph.shard(models.Uneven())
    nothing = zgraph.clip_grad_norm_(model.parameters(), MAX_NORM, math.inf).full_tensor().item()
    model = with_gradients("stage3")
    largest = max(whole(parameter.grad).abs().max().item() for parameter in list(model.parameters())[:2])
    for parameter in list(model.parameters())[2:]:
        parameter.grad = None
    found = zgraph.clip_grad_norm_(model.parameters(), MAX_NORM, math.inf).full_tensor().item()
    return [nothing, found == largest]


@every_world
def test_parameters_without_gradients_are_left_out(ranks: Ranks) -> None:
    for found in ranks.run(without_gradients):
        assert found == [0.0, True]


def test_gradients_sharing_a_layout_keep_their_own_placements() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        rows, whole = (distribute_tensor(torch.ones(4, 3), mesh, [kind]) for kind in (Shard(0), Replicate()))
        grads = [rows + 1, rows + 2, whole + 3, rows + 4]
        assert len(set(map(id, layouts_of(grads)))) == 2
        found, alike = ShardedGradients.of(grads), ShardedGradients.of(grads[:2])
    assert found is not None and found.is_replicated == [[False, False, True, False]]
    assert alike is not None and alike.is_replicated == [[False, False]]


def test_without_sharding_it_is_torchs_own() -> None:
    def clipped(function: Callable[..., Tensor]) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(5)
        model = models.Uneven()
        model(torch.ones(4, 6)).square().sum().backward()
        norm = function(model.parameters(), MAX_NORM, norm_type=math.inf)
        return norm, [parameter.grad for parameter in model.parameters()]

    norm, grads = clipped(zgraph.clip_grad_norm_)
    expected_norm, expected = clipped(torch.nn.utils.clip_grad_norm_)
    assert torch.equal(norm, expected_norm)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))
