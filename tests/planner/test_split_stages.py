"""Stages of a pipeline that take equally long, beside all ways to cut; what layers cost; refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zgraph
from tests.support.graphs import fake_world
from zgraph.planner import split_stages as module
from zgraph.planner.split_stages import even_cuts

# Only arithmetic takes time on it: 2 flops for each weight and row in forward, 4 in backward.
ARITHMETIC = replace(zgraph.Hardware.preset("cpu"), launch_us=0.0, memory_bytes_per_us=1e18)


def names(stages: list[nn.Sequential]) -> list[list[str]]:
    return [[name for name, _ in stage.named_children()] for stage in stages]


def rows(width: int, count: int = 4) -> Any:
    return lambda: (torch.zeros(count, width),)


# --- cuts -----------------------------------------------------------------------------------------------------------


def every_cut(times: list[int], stages: int) -> list[tuple[int, int, list[int]]]:
    """The slowest stage, the sum of squares, and the cut, of all ways to cut."""
    found: list[tuple[int, int, list[int]]] = []
    for inner in itertools.combinations(range(1, len(times)), stages - 1):
        cuts = [0, *inner, len(times)]
        took = [sum(times[begin:end]) for begin, end in itertools.pairwise(cuts)]
        found.append((max(took), sum(one * one for one in took), cuts))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    """Small numbers bring ties, zeros are layers that cost nothing."""
    draw = random.Random(seed)
    times = [draw.randint(0, 9 if seed % 2 else 1000) for _ in range(draw.randint(1, 9))]
    for stages in range(1, len(times) + 1):
        assert even_cuts(times, stages) == min(every_cut(times, stages))[2]


def test_equal_layers_make_early_stages_short() -> None:
    """They hold the activations of most micro-batches."""
    assert even_cuts([7] * 5, 3) == [0, 1, 3, 5]
    assert even_cuts([7] * 6, 3) == [0, 2, 4, 6]


# --- layers ---------------------------------------------------------------------------------------------------------


def test_stages_of_unequal_layers_take_equally_long() -> None:
    """The first layer's input needs no gradient, which saves it a third."""
    widths = [64, 8, 96, 16, 128, 32, 32, 256, 64]
    model = nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in itertools.pairwise(widths)))
    weights = [one * other for one, other in itertools.pairwise(widths)]
    times = [(6 if place else 4) * count for place, count in enumerate(weights)]
    for stages in (2, 3, 5):
        cuts = min(every_cut(times, stages))[2]
        wanted = [[str(place) for place in range(begin, end)] for begin, end in itertools.pairwise(cuts)]
        assert names(zgraph.split_stages(model, stages, batch=rows(64), hardware=ARITHMETIC)) == wanted


def test_a_stage_has_the_layers_themselves_under_their_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    tokens = torch.randint(0, 10, (2, 5))
    stages = zgraph.split_stages(model, 2, batch=lambda: (tokens,))
    x: Tensor = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))
    together = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert together.keys() == model.state_dict().keys()
    assert all(value.data_ptr() == model.state_dict()[name].data_ptr() for name, value in together.items())


def test_layers_need_no_memory() -> None:
    """4 TB each; on the meta device, as here, or where tensors have no values."""
    with torch.device("meta"):
        model = [nn.Linear(10**6, 10**6, bias=False) for _ in range(4)]
    assert names(zgraph.split_stages(model, 2, batch=rows(10**6))) == [["0", "1"], ["2", "3"]]


class Repeated(nn.Module):
    """The same layer several times, which is written nowhere but in an attribute."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(32, 32, bias=False), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has an input without gradient, and what an attribute changes is another layer."""
    traced: list[nn.Module] = []
    layer_time = module.layer_time

    def counted(layer: nn.Module, *args: Any) -> Any:
        traced.append(layer)
        return layer_time(layer, *args)

    monkeypatch.setattr(module, "layer_time", counted)
    model = [Repeated(1), Repeated(1), Repeated(1), Repeated(3), Repeated(1)]
    stages = zgraph.split_stages(model, 2, batch=rows(32), hardware=ARITHMETIC)
    assert traced == [model[0], model[1], model[3]]
    assert names(stages) == [["0", "1", "2"], ["3", "4"]]


# --- refusals -------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Doubled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("model", "stages", "batch", "message"),
    [
        (nn.Linear(4, 4), 1, rows(4), "a Linear cannot be cut, since its forward can be anything; pass an nn.Seq"),
        (Doubled(nn.Linear(4, 4)), 1, rows(4), "a Doubled cannot be cut"),
        ([nn.Linear(4, 4)] * 2, 3, rows(4), "2 layers cannot make 3 stages; use fewer stages"),
        ([nn.Linear(4, 4)], 0, rows(4), "stages=0; write a number from 1 on"),
        ([nn.Linear(4, 4)], True, rows(4), "stages=True; write a number"),
        ([torch.tanh], 1, rows(4), "layer 0 is a builtin_function_or_method, not an nn.Module"),
        ([nn.Linear(4, 4)], 1, (torch.zeros(4, 4),), "batch is a tuple; pass a function"),
        ([nn.Linear(4, 4)], 1, lambda: torch.zeros(4, 4), "batch returned a .*Tensor; return one tensor in a tuple"),
        ([nn.Linear(4, 4)], 1, lambda: (1, 2), r"batch returned \(int, int\); return one tensor"),
        ([nn.Linear(4, 4), Two()], 1, rows(4), "layer 1, a Two, does not return one tensor; wrap it"),
    ],
)
def test_unsplittable_model_is_refused(model: Any, stages: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"zgraph\.split_stages: {message}"):
        zgraph.split_stages(model, stages, batch=batch)


def test_layers_are_split_before_they_are_parallelized() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        with pytest.raises(ValueError, match="weight of layer 0 is a DTensor; split first, then parallelize and shard"):
            zgraph.split_stages(model, 1, batch=rows(4))
