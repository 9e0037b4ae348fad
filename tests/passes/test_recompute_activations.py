"""Backward of a whole step computes again what is pointwise and reads nothing new, as torch's partitioner has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zgraph
from tests.support import models
from tests.support.graphs import fake_world, traced
from zgraph.analysis.liveness import memory_curve
from zgraph.compiler.graph_pass import PassContext
from zgraph.graph import dataflow, meta, nodes
from zgraph.passes import DedupeGathers, RecomputeActivations
from zgraph.passes.common.gathers_per_part import repeat_gathers
from zgraph.step.capture.capture import capture
from zgraph.step.capture.lifted import Lifted
from zgraph.torch_compat.fake_values import fake_storage_key

PASS = RecomputeActivations(least_bytes=0)
STEP = PassContext(direction="step")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def step_of(model: nn.Module, zero_stage: int = 3) -> fx.GraphModule:
    """Forward and backward of a model as a step, before the pass."""
    model = zgraph.shard(model, zero_stage=zero_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    gm = capture(step, Lifted.of(model, [optimizer]), (torch.zeros(6, 8),), {}).gm
    DedupeGathers().run(gm, STEP)
    return gm


def again(gm: fx.GraphModule) -> list[str]:
    """What the pass lets backward compute again, by the operators' names."""
    before = [node for node in gm.graph.nodes]
    changed = PASS.run(gm, STEP)
    gm.graph.lint()
    assert changed == (before != [node for node in gm.graph.nodes])
    assert not PASS.run(gm, STEP)
    part = dataflow.parts_of(gm.graph)
    found = [node for node in gm.graph.nodes if node not in before and part[node] % 2]
    return [str(node.target).split(".")[1] for node in found if not nodes.is_unshard(node)]


class Of(nn.Module):
    """A function between two layers, both of which backward needs the input of."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))


def gated(x: Tensor) -> Tensor:
    return F.silu(x) * torch.cos(x)


def test_factors_of_a_product_are_computed_again() -> None:
    """silu(x), cos(x) and x are kept for backward; x is enough."""
    assert sorted(again(step_of(Of(gated)))) == ["cos", "silu"]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(F.gelu, id="read by a matrix product"),
        pytest.param(lambda x: F.dropout(x, 0.5) * 2, id="random"),
        pytest.param(lambda x: F.silu(x).mul_(torch.cos(x)), id="overwritten"),
        pytest.param(lambda x: x * x.amax(-1, keepdim=True), id="reduced"),
        pytest.param(lambda x: (x @ x.t()) @ x, id="a product"),
    ],
)
def test_expensive_activations_are_kept(function: Any) -> None:
    assert not set(again(step_of(Of(function)))) & {"gelu", "native_dropout", "silu", "amax", "mm"}


def test_a_long_sequence_is_computed_in_pieces() -> None:
    """Else all of it would be alive when backward begins."""

    def long(x: Tensor) -> Tensor:
        for _ in range(40):
            x = torch.tanh(x)
        return x

    # Kept are the first, which a product makes, the 18th, the 35th, and the last, which a product reads.
    assert again(step_of(Of(long))) == ["tanh"] * 36


def test_small_activations_are_kept() -> None:
    gm = step_of(Of(gated))
    assert not RecomputeActivations().run(gm, STEP)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), models.Gated())


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_as_much_is_kept_for_backward_as_by_the_partitioner(zero_stage: int) -> None:
    found = traced(layers, zero_stage=zero_stage)
    saved = nodes.returned_by(found.graphs["forward"].graph)[found.ctx.user_outputs :]
    storages = {
        fake_storage_key(value): value.untyped_storage().nbytes()
        for node in saved
        if isinstance(node, fx.Node) and node.op == "call_function" and isinstance(value := meta.value(node), Tensor)
    }
    gm = step_of(layers(), zero_stage)
    assert again(gm)
    repeat_gathers(gm.graph)
    curve = memory_curve(gm.graph)
    part = dataflow.parts_of(gm.graph)
    last = max(place for place, node in enumerate(curve.nodes) if part.get(node) == 0)
    seed = 4  # the gradient of the loss
    assert curve.bytes_after[last] == sum(storages.values()) + seed


def test_forward_and_backward_apart_are_left_to_the_partitioner() -> None:
    assert not PASS.run(traced(layers).captured, PassContext(direction="joint"))
