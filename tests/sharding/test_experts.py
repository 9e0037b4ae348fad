"""Experts on an axis of their own: each gets tokens of all ranks, and its gradient is that of one model on one rank."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support import experts
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.compressing import compressing, feedback_of
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.passes import LoCo, presets

# Sums over tokens and ranks are in another order than on one rank.
ROUNDING = 2e-5
MAX_NORM = 0.1


Step = Callable[[int], None]


def stepped(model: nn.Module, way: str, micro_batches: int) -> Step:
    """Forwards and backwards of one step's micro-batches on this rank's tokens."""
    called = model if way == "eager" else torch.compile(model, backend="zgraph", options={"lowering": way})

    def step(index: int) -> None:
        for micro in range(micro_batches):
            waits = micro < micro_batches - 1
            with zgraph.no_sync(model) if waits else contextlib.nullcontext():
                loss = experts.loss_of(called(experts.tokens_of(dist.get_rank(), micro_batches * index + micro)))
            loss.backward()

    return step


def plain_gradients(plain: nn.Module, index: int, micro_batches: int) -> None:
    for micro in range(micro_batches):
        for rank in range(dist.get_world_size()):
            loss = experts.loss_of(plain(experts.tokens_of(rank, micro_batches * index + micro)))
            (loss / dist.get_world_size()).backward()


def trained(zero_stage: int, way: str, micro_batches: int) -> list[float]:
    """Norms of three steps whose gradients are those of all tokens of all ranks through one plain model."""
    model, plain = experts.built(zero_stage)
    step = stepped(model, way, micro_batches)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain)]
    norms: list[float] = []
    for index in range(3):
        step(index)
        plain_gradients(plain, index, micro_batches)
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            grad, wanted = parameter.grad, expected[name].grad
            assert grad is not None and wanted is not None and grad.shape == wanted.shape
            off = ((whole(grad) - wanted).abs().max() / wanted.abs().max()).item()
            assert off <= ROUNDING, f"gradient of {name} in step {index} is off by {off:.3g}"
        found = whole(zgraph.clip_grad_norm_(model.parameters(), MAX_NORM)).item()
        wanted_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM).item()
        assert found == pytest.approx(wanted_norm, rel=ROUNDING)
        norms.append(found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                expected[name].copy_(whole(parameter.detach()))
    return norms


@worlds(2)
@pytest.mark.parametrize("way", ["eager", "fx"])
def test_experts_on_one_rank_each_train_like_one_model(ranks: Ranks, way: str) -> None:
    assert min(min(norms) for norms in ranks.run(trained, 3, way, 1)) > MAX_NORM


@worlds(4)
@pytest.mark.parametrize(
    ("zero_stage", "way", "micro_batches"),
    [(0, "fx", 2), (1, "eager", 1), (2, "fx", 1), (1, "inductor", 2), (3, "fx", 2), (3, "inductor", 1)],
)
def test_experts_on_two_ranks_each_train_like_one_model(
    ranks: Ranks, zero_stage: int, way: str, micro_batches: int
) -> None:
    assert min(min(norms) for norms in ranks.run(trained, zero_stage, way, micro_batches)) > MAX_NORM


def same_bits(options: dict[str, Any], autocast: bool, whole_step: bool, planned: bool) -> int:
    """Three steps, compiled and not; the number of parameters whose bits were compared."""
    models = [experts.built(3, **options)[0] for _ in range(2)]
    eager, compiled = models
    target = zgraph.Target(hardware=zgraph.calibrate()) if planned else None
    passes = presets.planned() if planned else presets.default()
    forward = compiled if whole_step else with_fx(compiled, passes=zgraph.PassList(passes, target=target))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in models]

    def step(called: Callable[..., Any], optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = experts.loss_of(called(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(tokens: Tensor) -> None:
        step(forward, optimizers[1], tokens)

    if whole_step:
        run = zgraph.training_step(compiled, optimizers[1], options={"lowering": "fx"})(run)
    for index in range(3):
        tokens = experts.tokens_of(dist.get_rank(), index)
        step(eager, optimizers[0], tokens)
        run(tokens)
    pairs = list(zip(eager.parameters(), compiled.parameters(), strict=True))
    for one, other in pairs:
        assert torch.equal(whole(one), whole(other))
    return len(pairs)


@worlds(4)
@pytest.mark.parametrize(
    ("options", "autocast", "whole_step", "planned"),
    [
        ({"param_dtype": torch.bfloat16}, False, False, False),
        ({}, True, False, False),
        ({}, False, False, True),
        *long(({}, False, True, False)),  # the next two are steps, too
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, False, True, False),
        ({"offload": zgraph.Offload(params="host", optimizer="host")}, False, True, False),
    ],
    ids=["bf16", "autocast", "planned", "step", "step_bf16", "step_host"],
)
def test_a_compiled_mixture_has_the_bits_of_eager_mode(
    ranks: Ranks, options: dict[str, Any], autocast: bool, whole_step: bool, planned: bool
) -> None:
    assert min(ranks.run(same_bits, options, autocast, whole_step, planned)) > 0


def step_of(called: Callable[..., Any], optimizer: torch.optim.Optimizer, index: int) -> None:
    experts.loss_of(called(experts.tokens_of(dist.get_rank(), index))).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_and_continued(folder: str) -> int:
    """A run that compresses gradients and one that loads its checkpoint end with the same bits; how many compress."""
    (model, _), (other, _) = experts.built(2), experts.built(2)
    optimizer, of_other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, other))
    called = compressing(model, LoCo())
    for index in range(2):
        step_of(called, optimizer, index)
    path = zgraph.save_checkpoint(folder, model, optimizer, step=2)
    full = zgraph.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    zgraph.load_checkpoint(path, other, of_other)
    kept = feedback_of(other)
    assert kept.keys() == feedback_of(model).keys()
    for run, one in ((called, optimizer), (compressing(other, LoCo()), of_other)):
        for index in range(2, 4):
            step_of(run, one, index)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(another))
    return sum(name.startswith("experts.") for name in kept)


def loaded(folder: str, ep: int) -> None:
    """All experts arrive on another layout, which goes on."""
    model, _ = experts.built(3, ep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zgraph.ZgraphWarning)  # errors of compression start as zeros there
        zgraph.load_checkpoint(f"{folder}/step_00000002", model, optimizer)
    full = torch.load(f"{folder}/full.pt")
    for name, value in model.named_parameters():
        assert torch.equal(whole(value.detach()), full[name]), name
    step_of(model, optimizer, 2)


@worlds(4)
def test_checkpoints_hold_all_experts(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(saved_and_continued, str(tmp_path)) == [2] * 4
    for ep in (1, 4):
        ranks.run(loaded, str(tmp_path), ep)


def without_a_divisor() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = experts.Mixture()
    model.experts.split(mesh["ep"])
    zgraph.shard(model.experts, mesh["dp"])
    with pytest.raises(ValueError) as error:
        zgraph.shard(model, mesh)
    return str(error.value)


@worlds(2)
def test_a_mean_over_few_of_the_ranks_is_refused(ranks: Ranks) -> None:
    (text, _) = ranks.run(without_a_divisor)
    assert re.search(r"experts\.(up|down) is split over \('ep',\).*2 times too large: write reduction=2", text)
