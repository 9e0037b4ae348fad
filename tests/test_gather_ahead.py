"""Parameters that one step gathers for the next: the same bits, and never those of before a write."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn, optim
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks, worlds
from tests.support.step_scripts import LR, Script, Setting, compare, kinds
from tests.support.tiers import long, slow
from zgraph.analysis.liveness import memory_curve
from zgraph.dialect import ahead
from zgraph.graph import nodes
from zgraph.passes import GatherAhead, LoCo, presets
from zgraph.torch_compat.dtensor import local_of

WRITTEN_AFTER = 3  # of six steps


def adamw(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, weight_decay=0.1)


def adamw_fused(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=LR, fused=True)


def sgd(groups: Any) -> optim.Optimizer:
    # Last bits of a gradient near zero do not decide the direction of a step.
    return optim.SGD(groups, lr=LR)


class Clipped(Script):
    """Updates wait for the norm of all gradients."""

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.opt.step()
        self.opt.zero_grad()
        return {"loss": loss.detach(), "norm": norm}

    def advance(self, number: int) -> None:
        if number == WRITTEN_AFTER:
            self.between(number)

    def between(self, number: int) -> None:
        """What happens once between two steps."""


class Accumulated(Clipped):
    """Two forwards and backwards, of which the first is under no_sync."""

    def step(self, x: Tensor) -> Any:
        with zgraph.no_sync(self.model):
            self.loss(x).backward()
        return super().step(x * 0.5)


class Halved(Clipped):
    """What travels is half as wide as what is updated."""

    def sharded(self) -> dict[str, Any]:
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Evaluated(Clipped):
    """Reads parameters, and writes to none."""

    def between(self, number: int) -> None:
        with torch.no_grad():
            self.model(*self.arguments(number))


class Stepped(Clipped):
    """The plain function, of which fused kernels leave no trace in any version counter."""

    def between(self, number: int) -> None:
        super().step(*self.arguments(number))


class Loaded(Clipped):
    """Goes back to the parameters and the state of before."""

    def advance(self, number: int) -> None:
        if number == 1:
            self.stored = copy.deepcopy((self.model.state_dict(), self.opt.state_dict()))
        super().advance(number)

    def between(self, number: int) -> None:
        self.model.load_state_dict(self.stored[0])
        self.opt.load_state_dict(self.stored[1])


class Written(Clipped):
    """In place."""

    def between(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)


class WrittenUnseen(Clipped):
    """By one rank alone, to one element, past every hook and counter."""

    def between(self, number: int) -> None:
        shard = local_of(cast(DTensor, self.model.get_parameter("first.weight"))).data
        if dist.get_rank() == 1:
            shard.view(-1)[0] = -shard.view(-1)[0]


def gathers_of(setting: Setting) -> tuple[list[str], int]:
    """Compare a script with its plain loop; why graphs were made, and how often the ranks had to gather after all."""
    with patch.object(ahead, "start_all_gather", wraps=ahead.start_all_gather) as gathers:
        reasons = compare(setting)
    return kinds(reasons), gathers.call_count


AHEAD = Setting(Clipped, adamw, more=(GatherAhead(),))


@pytest.mark.parametrize(
    ("ranks", "stage", "make"),
    [
        (2, 3, adamw),
        (3, 1, adamw_fused),
        # Which pairs the same; stage 2 has a row of its own below. Every two of them are met by then.
        *slow((3, 2, adamw)),
        *long(*((2, stage, adamw) for stage in (1, 2)), *((2, stage, adamw_fused) for stage in (1, 2, 3))),
        *long((3, 1, adamw), (3, 3, adamw), (3, 2, adamw_fused), (3, 3, adamw_fused)),
    ],
    indirect=["ranks"],
    scope="session",
)
def test_only_the_first_step_gathers(ranks: Ranks, stage: int, make: Any) -> None:
    for found in ranks.run(gathers_of, replace(AHEAD, stage=stage, make=make)):
        assert found == (["", "state"], 1)


@worlds(2)
@pytest.mark.parametrize(
    "setting",
    [
        replace(AHEAD, script=Halved, stage=2),
        *slow(replace(AHEAD, script=Accumulated)),
        # A window at a stage below is one more reduction; a C++ compiler takes seconds for each kernel.
        *slow(replace(AHEAD, script=Accumulated, stage=1), replace(AHEAD, close=True, stage=2, make=sgd)),
        *slow(replace(AHEAD, script=Script)),
    ],
    ids=["bf16", "no_sync, stage 3", "no_sync, stage 1", "inductor", "unclipped"],
)
def test_other_steps_gather_ahead(ranks: Ranks, setting: Setting) -> None:
    for _, gathers in ranks.run(gathers_of, replace(setting, started=True)):
        assert gathers == 1


@pytest.mark.slow  # seconds, for many small gathers
@worlds(2)
def test_several_buckets_are_held(ranks: Ranks) -> None:
    for _, gathers in ranks.run(gathers_of, replace(AHEAD, preset={"bucket_bytes": 160}, started=True)):
        assert gathers > 1


@worlds(2)
@pytest.mark.slow  # the two meet nowhere in the graph
def test_compressed_gradients_change_nothing_of_it(ranks: Ranks) -> None:
    for _, gathers in ranks.run(gathers_of, replace(AHEAD, preset={"compression": LoCo()}, stage=2, started=True)):
        assert gathers == 1


@worlds(2)
@pytest.mark.parametrize(
    ("script", "again"),
    [(Evaluated, 0), (Stepped, 1), (WrittenUnseen, 1), *slow((Loaded, 1), (Written, 1))],  # which are seen more easily
)
def test_what_was_gathered_is_dropped_when_a_parameter_was_written(ranks: Ranks, script: Any, again: int) -> None:
    setting = replace(AHEAD, script=script, make=adamw_fused, stage=2, started=True)
    for _, gathers in ranks.run(gathers_of, setting):
        assert gathers == 1 + again


@dataclass(frozen=True, kw_only=True)
class Ranges(zgraph.GraphPass):
    """Changes nothing; keeps the names of what is alive before the step computes anything, and at its end."""

    first: list[str]
    last: list[str]

    name: ClassVar[str] = "ranges"

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        calls = [node.op == "call_function" and not nodes.is_communication(node) for node in gm.graph.nodes]
        found = [entry for entry in memory_curve(gm.graph).ranges if not entry.held]
        self.first.extend(entry.node.name for entry in found if entry.first < calls.index(True))
        self.last.extend(entry.node.name for entry in found if entry.last == len(calls) - 1)
        return False


def test_what_is_held_counts_in_the_memory_of_the_step() -> None:
    """From the beginning, where it is taken, and to the end."""
    seen = Ranges(first=[], last=[])
    with fake_world(2):
        model = zgraph.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), zero_stage=2)
        optimizer = sgd(model.parameters())
        passes = [*presets.default(), GatherAhead(), seen]
        options = {"lowering": "fx", "pipeline": zgraph.Pipeline(passes)}

        @zgraph.training_step(model, optimizer, options=options)
        def step(x: Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(torch.zeros(2, 8))
    assert any(name.startswith("ahead_") for name in seen.first)
    assert any(name.startswith("all_gather_") for name in seen.last)


def test_a_size_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="gather_ahead: most_bytes=0"):
        GatherAhead(most_bytes=0)
