"""Units: equal blocks share graphs, reads outside forward see the DTensor, failures leave nothing behind."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.runtime.handle import name_of
from zgraph.sharding.scope import state_of
from zgraph.torch_compat.collectives import is_functional_collective


class CountGraphs(zgraph.GraphPass):
    """Counts how often each direction is compiled."""

    name = "count_graphs"

    def __init__(self, seen: list[str]) -> None:
        object.__setattr__(self, "seen", seen)

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        self.seen.append(ctx.direction)
        return False


def four_equal_blocks() -> dict[str, Any]:
    torch.manual_seed(3)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    plain = copy.deepcopy(blocks)
    zgraph.shard(blocks)
    seen: list[str] = []
    pipeline = zgraph.PassList([*zgraph.passes.presets.default(), CountGraphs(seen)])
    for block in blocks:
        block.compile(backend="zgraph", options={"lowering": "fx", "passes": pipeline})
    x = torch.randn(5, 6, requires_grad=True)
    blocks(x).square().mean().backward()
    plain(x.detach()).square().mean().backward()
    same = [
        torch.equal(whole(found.grad), expected.grad)
        for found, expected in zip(blocks.parameters(), plain.parameters(), strict=True)
    ]
    return {"graphs": seen, "same": same}


def test_equal_blocks_share_a_graph_but_know_their_parameters(ranks: Ranks) -> None:
    """All ranks have the same batch here, so the average is the plain gradient; a mixed-up one would differ."""
    for result in ranks.run(four_equal_blocks):
        assert result["graphs"] == ["forward", "backward"]
        assert result["same"] == [True] * 8


def handles_in_backward() -> list[str]:
    torch.manual_seed(3)
    blocks = zgraph.shard(nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)]))
    found: list[str] = []
    eager = torch.ops.zgraph.reduce_grad.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is eager:
                found.append(name_of(args[1]))
            return func(*args, **(kwargs or {}))

    for block in blocks:
        block.compile(backend="zgraph", options={"lowering": "fx", "passes": zgraph.PassList([])})
    loss = blocks(torch.randn(3, 4, requires_grad=True)).sum()
    with Watch():
        loss.backward()
    return found


def test_the_handle_names_the_parameter_in_a_shared_backward(ranks: Ranks) -> None:
    for found in ranks.run(handles_in_backward):
        assert found == ["3.weight", "2.weight", "1.weight", "0.weight"]


def penalized(zero_stage: int) -> list[bool]:
    """Gradients of a loss with a term that is computed from parameters outside forward."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    plain = copy.deepcopy(model)
    zgraph.shard(model, zero_stage=zero_stage)
    x = torch.randn(4, 6)
    penalty = sum(parameter.full_tensor().square().sum() for parameter in model.parameters())
    (with_fx(model)(x).square().mean() + 0.1 * penalty).backward()
    penalty = sum(parameter.square().sum() for parameter in plain.parameters())
    (plain(x).square().mean() + 0.1 * penalty).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [torch.allclose(whole(found.grad), expected.grad) for found, expected in pairs]


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_loss_may_read_full_tensors_outside_forward(ranks: Ranks, zero_stage: int) -> None:
    """All ranks have the same batch, so that the mean of the gradients is the plain gradient."""
    for same in ranks.run(penalized, zero_stage):
        assert same == [True, True]


def reads_outside_forward() -> dict[str, Any]:
    model = zgraph.shard(models.Language())
    weight = model.embed.weight
    model.head.weight = weight
    return {
        "outside": isinstance(weight, DTensor),
        "tied": model.head.weight is model.embed.weight,
        "keys": list(model.state_dict()) == list(models.Language().state_dict()),
        "class": type(model.embed).__name__,
        "isinstance": isinstance(model.embed, nn.Embedding),
        "repr": repr(model) == repr(models.Language()),
        "copy": isinstance(copy.deepcopy(model).embed.weight, DTensor),
    }


def test_outside_forward_a_parameter_is_the_dtensor(ranks: Ranks) -> None:
    for result in ranks.run(reads_outside_forward):
        assert result == {
            "outside": True,
            "tied": True,
            "keys": True,
            "class": "Embedding",
            "isinstance": True,
            "repr": True,
            "copy": True,
        }


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fail = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fail:
            raise KeyError("on purpose")
        return x


def after_a_failing_forward(mode: str) -> dict[str, Any]:
    model = zgraph.shard(Failing())
    called = with_fx(model) if mode == "fx" else model
    x = torch.ones(2, 4)
    with pytest.raises(KeyError, match="on purpose"):
        called(x)
    states = [state_of(module) for module in model.modules()]
    released = all(state is not None and state.unsharded is None and not state.scope.active for state in states)
    model.fail = False
    called(x).sum().backward()
    return {"released": released, "grad": model.linear.weight.grad is not None}


@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_a_failing_forward_releases_what_it_gathered(ranks: Ranks, mode: str) -> None:
    for result in ranks.run(after_a_failing_forward, mode):
        assert result == {"released": True, "grad": True}


def gathers_per_forward() -> list[int]:
    """How many gathers a forward issues without a compiler: in training, and under no_grad."""
    model = zgraph.shard(models.Reused())
    counts: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[-1] += func is torch.ops.zgraph.unshard.default
            return func(*args, **(kwargs or {}))

    for grad in (True, False):
        counts.append(0)
        with Count(), torch.set_grad_enabled(grad):
            model(torch.ones(2, 6))
    return counts


def test_eager_gathers_are_shared_in_training_and_released_otherwise(ranks: Ranks) -> None:
    """Three parameters. Without grad the block (2 parameters) gathers in each of its 3 calls, scale.weight twice."""
    assert ranks.run(gathers_per_forward) == [[3, 8], [3, 8]]


def gathers_in_the_graph() -> list[tuple[str, int]]:
    report = zgraph.Report()
    model = zgraph.shard(models.Reused())
    compiled = with_fx(model, report=report)
    compiled(torch.ones(2, 6)).sum().backward()
    with torch.no_grad():
        compiled(torch.ones(2, 6))
    return [
        (graph.direction, sum(len(entry.parameters) for entry in graph.transfers if "all_gather" in entry.kind))
        for graph in report.graphs
    ]


def test_a_graph_gathers_each_parameter_once(ranks: Ranks) -> None:
    """However often it is read; backward needs the two weights again, but no bias."""
    assert ranks.run(gathers_in_the_graph) == [[("forward", 3), ("backward", 2), ("inference", 3)]] * 2


def ignored_parameters() -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    kept = model[0].weight.detach().clone()
    zgraph.shard(model, ignored=[model[0]])
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    grad = model[0].weight.grad
    assert grad is not None
    return {
        "kept": torch.equal(model[0].weight.detach().to_local(), kept),
        "type": isinstance(model[0].weight, DTensor),
        "grad": grad.to_local().abs().sum().item(),
    }


def test_ignored_parameters_keep_each_ranks_values_and_gradients(ranks: Ranks) -> None:
    first, second = ranks.run(ignored_parameters)
    assert first["kept"] and second["kept"] and first["type"] and second["type"]
    assert first["grad"] != second["grad"]


def broadcast_from_rank_zero() -> tuple[float, float]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 4)
    model.register_buffer("offset", torch.rand(2))
    zgraph.shard(model)
    return whole(model.weight.detach()).sum().item(), model.offset.sum().item()


def test_rank_zeros_parameters_and_buffers_become_everyones(ranks: Ranks) -> None:
    first, second = ranks.run(broadcast_from_rank_zero)
    assert first == second


def slice_of_a_sharded_model() -> bool:
    model = zgraph.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    return torch.equal(model[1:](x), model[1](x))


def test_a_slice_of_a_sharded_sequential_works(ranks: Ranks) -> None:
    assert ranks.run(slice_of_a_sharded_model) == [True, True]


def plain_model_communicates_nothing() -> list[str]:
    model = nn.Linear(4, 4)
    started: list[str] = []

    class Look(zgraph.GraphPass):
        name = "look"

        def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
            started.extend(str(node.target) for node in gm.graph.nodes if is_functional_collective(node.target))
            return False

    options = {"passes": zgraph.PassList([*zgraph.passes.presets.default(), Look()])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as a user's script has it
        compiled = with_fx(model, **options)
        compiled(torch.ones(2, 4)).sum().backward()
        compiled(torch.ones(3, 4)).sum().backward()
    return [*started, *(str(entry.message) for entry in caught if entry.category is zgraph.ZgraphWarning)]


def test_plain_model_on_several_ranks_warns_and_communicates_nothing(ranks: Ranks) -> None:
    for found in ranks.run(plain_model_communicates_nothing):
        assert len(found) == 1
        assert re.search(r"2 ranks train .* call zgraph\.shard\(model\)", found[0])


def test_a_plain_model_without_a_process_group_just_works() -> None:
    torch.manual_seed(0)
    model = models.Uneven()
    plain = copy.deepcopy(model)
    x = torch.randn(3, 6)
    compiled = with_fx(model)
    compiled(x).square().mean().backward()
    plain(x).square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
