"""Peaks of a training step that holds mostly gradients: as one graph, predicted and counted, and as three calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zgraph
from tests.support.memory import gloo_buffers
from tests.support.memory.allocations import Count, counted, steady_rise

WIDTH, ROWS = 128, 4
STEPS = 3


@dataclass(frozen=True)
class Peaks:
    """Bytes above what a rank holds between steps.

    Attributes:
        predicted: of the graph.
        measured: of the graph, when it runs.
        three_calls: of the same loop with a compiled forward and backward, and the optimizer behind them.
        gradients: of the trained shards.
    """

    predicted: int
    measured: int
    three_calls: int
    gradients: int


def peaks_of(
    zero_stage: int,
    passes: Sequence[zgraph.GraphPass],
    lowering: str = "fx",
    layers: int = 12,
    width: int = WIDTH,
) -> Peaks:
    """Peaks under these passes; called on all ranks."""
    report = zgraph.Report()
    options: dict[str, Any] = {"lowering": lowering, "passes": zgraph.PassList(passes), "report": report}
    model, optimizer = _trained(zero_stage, layers, width)
    shards: list[Any] = list(model.parameters())
    gradients = sum(4 * shard.to_local().numel() for shard in shards)
    whole: Any = zgraph.training_step(model, optimizer, options=options)(_step(model, model, optimizer))
    measured = _rise(whole, width)
    peak = report.graphs[-1].peak
    assert peak is not None
    model, optimizer = _trained(zero_stage, layers, width)
    options = {"lowering": lowering, "passes": zgraph.PassList(passes)}
    called = torch.compile(model, backend="zgraph", options=options)
    return Peaks(peak.bytes, measured, _rise(_step(called, model, optimizer), width), gradients)


def _trained(zero_stage: int, layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.compiler.reset()
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
    model = zgraph.shard(nn.Sequential(*parts), zero_stage=zero_stage)
    optimizer = zgraph.step_on_shards(torch.optim.AdamW(model.parameters(), fused=True))
    return model, optimizer


def _step(called: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _rise(step: Any, width: int) -> int:
    """The highest point of a step after the first."""
    step(torch.zeros(ROWS, width))
    counts: list[Count] = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, width)
        gloo_buffers.flush()
        with counted() as count:
            step(x)
        counts.append(count)
    return steady_rise(counts)
