"""Optimizers that were made before a model was sharded, options of adapters, and state dicts of a part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zgraph
from tests.support.front_ends import loss_of, tied, tokens
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.integrations.sharding import Sharding, is_sharded, load_complete, shard_with_optimizers

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    halves = {"params": parameters[::2], "lr": 0.05}, {"params": parameters[1::2]}
    return torch.optim.AdamW([*halves], lr=0.01, eps=1e-3)


def searched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Keeps a list of its parameters beside its groups."""
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


def followed(build: Build, early: bool) -> list[torch.Tensor]:
    """Weights after two steps of an optimizer of two models, made before they were sharded, or after."""
    model, other = tied(), nn.Linear(2, 2)
    if early:
        optimizer = build([*model.parameters(), *other.parameters()])
        lists = [group["params"] for group in optimizer.param_groups]
        for each in (model, other):
            shard_with_optimizers(each, [optimizer], zero_stage=3)
        assert all(group["params"] is known for group, known in zip(optimizer.param_groups, lists, strict=True))
    else:
        zgraph.shard(model)
        zgraph.shard(other)
        optimizer = build([*model.parameters(), *other.parameters()])
    x, y = tokens(8)[4 * dist.get_rank() : 4 * dist.get_rank() + 4]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return [whole(parameter).clone() for parameter in model.parameters()]


@pytest.mark.parametrize("build", [grouped, searched])
def test_an_optimizer_made_before_follows_its_model(ranks: Ranks, build: Build) -> None:
    late, early = (ranks.run(followed, build, early)[0] for early in (False, True))
    assert all(map(torch.equal, late, early))


def with_state() -> tuple[str, bool]:
    model = tied()
    optimizer = grouped(list(model.parameters()))
    loss_of(model(torch.ones(1, 2, dtype=torch.long)), torch.ones(1, 2, dtype=torch.long)).backward()
    optimizer.step()
    with pytest.raises(ValueError) as caught:
        shard_with_optimizers(model, [optimizer])
    return str(caught.value), is_sharded(model)


def test_an_optimizer_with_state_is_refused_before_anything_is_sharded(ranks: Ranks) -> None:
    for text, sharded in ranks.run(with_state):
        assert text.startswith("zgraph: AdamW has state for gain already") and not sharded


def test_options_are_those_of_shard() -> None:
    assert Sharding(zero_stage=2, options={"lowering": "fx"}).shard_options == {"zero_stage": 2}
    for wrong in ({"stage": 2}, {"module": nn.Linear(1, 1)}):
        with pytest.raises(TypeError, match=f"zgraph.shard has no argument {next(iter(wrong))}; options of the"):
            Sharding(**wrong)


def test_a_folder_without_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zgraph.CheckpointError, match=r"has no complete checkpoint of Linear: .*; resume from another"):
        load_complete(tmp_path, nn.Linear(1, 1), None)


# --- state dicts ------------------------------------------------------------------------------------------------------


class Gathers(TorchDispatchMode):
    """Counts elements that this rank sends to others or gets from them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.elements += sum(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def partly() -> tuple[list[str], int, int]:
    """Keys of a part of a state dict, and the elements that a whole one and the part send."""
    model = zgraph.shard(tied())
    sent: list[int] = []
    keys: list[str] = []
    for keep in (None, lambda key: key.startswith("body.0")):
        with Gathers() as gathers:
            keys = list(zgraph.full_state_dict(model, keep=keep))
        sent.append(gathers.elements)
    return keys, *sent


def test_only_kept_entries_are_gathered(ranks: Ranks) -> None:
    (keys, whole_elements, elements), (none, _, _) = ranks.run(partly)
    assert keys == ["body.0.weight", "body.0.bias"] and none == []
    assert 0 < elements < whole_elements / 2


def kept_otherwise() -> str:
    model = zgraph.shard(tied())
    name = ("body.0.weight", "body.3.weight")[dist.get_rank()]
    with pytest.raises(zgraph.AgreementError) as caught:
        zgraph.full_state_dict(model, keep=lambda key: key == name)
    return str(caught.value)


def test_ranks_that_keep_other_entries_are_told(ranks: Ranks) -> None:
    """Two weights of one shape would become one."""
    for text in ranks.run(kept_otherwise):
        assert "(keep=...) of body.0.weight" in text and "(keep=...) of body.3.weight" in text


def reloaded(stage: int, on_shards: bool, how: str) -> bool:
    """A run goes on as one whose state was whole, plain tensors in between, of a number as well."""
    x, y = tokens(8)[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for _ in range(2):
        model = zgraph.shard(tied(), zero_stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        runs.append((model, zgraph.step_on_shards(optimizer) if on_shards else optimizer))
    (first, optimizer), (second, other) = runs
    loss_of(first(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    box = [get_optimizer_state_dict(first, optimizer, options=options), zgraph.full_state_dict(first)]
    dist.broadcast_object_list(box, 0)
    state, weights = copy.deepcopy(box)  # the first rank's box holds tensors of its optimizer
    second.load_state_dict(weights)
    if how == "torch":
        set_optimizer_state_dict(second, other, state, options=StateDictOptions(full_state_dict=True))
    else:  # Lightning's single file
        names = [name for name, _ in second.named_parameters()]
        groups = [{**state["param_groups"][0], "params": list(range(len(names)))}]
        numbered = {number: state["state"][name] for number, name in enumerate(names)}
        other.load_state_dict({"state": numbered, "param_groups": groups})
    for model, stepped in runs:
        loss_of(model(x), y).backward()
        stepped.step()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(whole(one), whole(two)) for one, two in pairs)


@pytest.mark.parametrize("how", ["torch", "one file"])
@pytest.mark.parametrize(("stage", "on_shards"), [(0, True), (3, False), (3, True)])
def test_state_of_plain_tensors_is_taken(ranks: Ranks, stage: int, on_shards: bool, how: str) -> None:
    assert ranks.run(reloaded, stage, on_shards, how) == [True, True]
