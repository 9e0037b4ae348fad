"""The second run of a script finds its plans on disk, and computes the bits of the first."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.models import VOCABULARY, Block, Language
from tests.support.ranks import Ranks, fresh_ranks, worlds
from tests.support.saved_plans import equal, grads_of, runs, whole
from zgraph.passes import LoCo, LowRank, presets


class Images(nn.Module):
    """Writes to buffers, draws random numbers, returns an input of its graph and a result without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, VOCABULARY)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(self.norm(self.conv(x)).relu(), 0.25, self.training).mean((2, 3))
        self.calls += 1
        return self.last(h), h.detach() * 2


class Recomputed(Language):
    """Recomputes its blocks, which draw random numbers, in backward."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
        return self.norm(x)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script: how it shards, compiles and trains."""

    shard: dict[str, Any] = field(default_factory=dict[str, Any])
    lowering: str = "fx"
    passes: Callable[[], Any] = lambda: None
    autocast: bool = False
    micro_batches: int = 1
    images: bool = False
    replicas: bool = False
    recomputed: bool = False


def planned() -> Any:
    return zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=zgraph.Hardware.preset("h100")))


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
CASES = {
    "stage 3": Case(),
    "stage 2, bf16, no_sync": Case(shard={"zero_stage": 2} | BF16, micro_batches=3),
    "stage 1, autocast, no_sync": Case(shard={"zero_stage": 1}, autocast=True, micro_batches=2),
    "stage 0, LoCo": Case(shard={"zero_stage": 0}, passes=lambda: presets.default(compression=LoCo())),
    "stage 3, LoCo, no_sync": Case(passes=lambda: presets.default(compression=LoCo()), micro_batches=2),
    "stage 2, LowRank, bf16": Case(
        shard={"zero_stage": 2} | BF16,
        passes=lambda: presets.default(compression=LowRank(rank=1, least_saving=1.0)),
    ),
    "stage 3, planned": Case(passes=planned),
    "stage 3, planned, autocast": Case(passes=planned, autocast=True, micro_batches=2),
    "images, stage 3": Case(images=True),
    "images, stage 1, planned": Case(images=True, shard={"zero_stage": 1}, passes=planned),
    "replicas, recomputed": Case(replicas=True, recomputed=True),
    "stage 2, recomputed, LoCo": Case(
        shard={"zero_stage": 2}, recomputed=True, passes=lambda: presets.default(compression=LoCo())
    ),
    "units": Case(shard={"units": [Block]}),
    "Inductor": Case(lowering="inductor"),
    "Inductor, bf16, images": Case(lowering="inductor", images=True, shard=BF16),
}


@functools.cache  # a second mesh of a process has groups of other names, which another process would not have
def mesh_of_replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))


def train(case: Case) -> tuple[dict[str, Tensor], zgraph.Report]:
    """Two steps and an evaluation; return gradients, parameters and results."""
    model: nn.Module = Images() if case.images else Recomputed() if case.recomputed else Language(dropout=0.1)
    zgraph.shard(model, mesh_of_replicas() if case.replicas else None, **case.shard)
    report = zgraph.Report()
    options = {"lowering": case.lowering, "passes": case.passes(), "report": report}
    compiled = torch.compile(model, backend="zgraph", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    found: dict[str, Tensor] = {}
    for step in range(2):
        for number in range(case.micro_batches):
            closing = number == case.micro_batches - 1
            with contextlib.nullcontext() if closing else zgraph.no_sync(model):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    result = compiled(batch(case))
                    logits = result[0] if case.images else result
                loss = logits.float().square().mean()
            with contextlib.nullcontext() if closing else zgraph.no_sync(model):
                loss.backward()
        found |= {f"{name} in step {step}": value for name, value in grads_of(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        result = compiled(batch(case))
    results = dict(enumerate(result if case.images else [result]))
    return found | whole(model.state_dict()) | {f"result {name}": one for name, one in results.items()}, report


def batch(case: Case) -> Tensor:
    return torch.randn(4, 2, 8, 8) if case.images else torch.randint(VOCABULARY, (2, 5))


def in_two_runs(name: str, folder: Path) -> tuple[bool, int, int, int]:
    """Whether both runs computed the same bits; the number of frames, and how many plans each run found."""
    (one, frames, before), (other, _, after) = runs(folder / str(dist.get_rank()), lambda: train(CASES[name]))
    return equal(one, other), frames, before, after


@pytest.mark.parametrize("name", CASES)
@worlds(2)
def test_second_run_finds_all_plans_and_computes_the_same_bits(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for same, frames, before, after in ranks.run(in_two_runs, name, tmp_path):
        assert same
        assert (before, after) == (0, frames)


STEPS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


def step_twice(optimizer: str, passes: Callable[[], Any]) -> tuple[dict[str, Tensor], zgraph.Report]:
    """Three whole steps of two micro-batches each, with clipping."""
    model = zgraph.shard(Language())
    report = zgraph.Report()
    opt = STEPS[optimizer](model)

    @zgraph.training_step(model, opt, options={"lowering": "fx", "passes": passes(), "report": report})
    def step(first: Tensor, second: Tensor) -> Tensor:
        with zgraph.no_sync(model):
            model(first).square().mean().backward()
        loss = model(second).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        return loss

    torch.manual_seed(dist.get_rank())
    losses = {f"loss {number}": step(*torch.randint(VOCABULARY, (2, 2, 5))) for number in range(3)}
    return whole(model.state_dict()) | whole(losses), report


def steps_in_two_runs(optimizer: str, passes: Callable[[], Any], folder: Path) -> tuple[bool, int, int, int]:
    both = runs(folder / str(dist.get_rank()), lambda: step_twice(optimizer, passes))
    (one, frames, before), (other, _, after) = both
    return equal(one, other), frames, before, after


def default() -> Any:
    return None


@pytest.mark.parametrize(("optimizer", "passes"), [("AdamW", default), ("momentum", planned)])
@worlds(2)
def test_second_run_finds_whole_steps(ranks: Ranks, optimizer: str, passes: Any, tmp_path: Path) -> None:
    for same, frames, before, after in ranks.run(steps_in_two_runs, optimizer, passes, tmp_path):
        assert same
        assert (before, after) == (0, frames)


def where_one_rank_compiles(folder: Path) -> tuple[bool, int]:
    """Rank 0 loses its plans between the runs."""
    own = folder / str(dist.get_rank())
    ((one, _, _),) = runs(own, lambda: train(CASES["stage 3"]), 1)
    if dist.get_rank() == 0:
        for file in own.iterdir():
            file.unlink()
    ((other, _, found),) = runs(own, lambda: train(CASES["stage 3"]), 1)
    return equal(one, other), found


@worlds(2)
def test_ranks_that_find_their_plans_agree_with_one_that_compiles(ranks: Ranks, tmp_path: Path) -> None:
    (same, none), (also, found) = ranks.run(where_one_rank_compiles, tmp_path)
    assert same and also
    assert none == 0 < found


def forward_of(width: int) -> tuple[Tensor, zgraph.Report]:
    model = zgraph.shard(Language(width=width))
    compiled = torch.compile(model, backend="zgraph", options={"lowering": "fx", "agreement_timeout_s": 30.0})
    return compiled(torch.zeros(2, 5, dtype=torch.long)).detach(), zgraph.summary(compiled)


def save_two_plans(folder: Path) -> None:
    for width in (10, 14):
        runs(folder / str(dist.get_rank()), lambda width=width: forward_of(width), 1)


def find_different_plans(folder: Path) -> str:
    try:
        runs(folder / str(dist.get_rank()), lambda: forward_of((10, 14)[dist.get_rank()]), 1)
    except zgraph.AgreementError as error:
        return str(error)
    return "no error"


def test_ranks_that_find_different_plans_are_told(tmp_path: Path) -> None:
    with fresh_ranks(2) as ranks:
        ranks.run(save_two_plans, tmp_path)
    with fresh_ranks(2) as ranks:  # which have not agreed on anything yet
        found = ranks.run(find_different_plans, tmp_path)
    assert ["compiled different communication" in text for text in found] == [True, True], found
