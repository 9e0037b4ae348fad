"""The inductor lowering: what it computes, compiles once, keeps in memory, and finds in its cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.graphs import Keep, fake_world
from tests.support.memory.allocations import counted
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.analysis.liveness import step_curve
from zgraph.passes import presets

STEPS = 3


def with_inductor(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="zgraph", options={"lowering": "inductor", **options})


class Network(nn.Module):
    """Equal blocks, dropout, running statistics: what has to be drawn, written and shared."""

    def __init__(self, width: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x))
        for block in self.blocks:
            x = x + self.drop(torch.tanh(block(torch.sigmoid(x) * 2)))
        return self.down(x)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))


def trained(
    lower: Callable[..., Any], zero_stage: int, build: Callable[[], nn.Module] = Network, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some SGD steps, and everything that they have changed."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=zero_stage)
    called = lower(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + dist.get_rank())
    losses: list[float] = []
    for _ in range(STEPS):
        loss = called(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


def against_fx(zero_stage: int) -> dict[str, Any]:
    losses, state = trained(with_fx, zero_stage)
    report = zgraph.Report()
    by_layer = zgraph.PassList(zgraph.passes.presets.default(bucket_bytes=700))  # or equal blocks would be one island
    found_losses, found = trained(with_inductor, zero_stage, report=report, passes=by_layer)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found_losses, losses, strict=True)),
        "state": max(((found[name] - value).abs().max() / value.abs().max()).item() for name, value in state.items()),
        "islands": (report.islands, report.distinct_islands),
    }


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_it_equals_fx_up_to_the_order_of_sums(ranks: Ranks, zero_stage: int) -> None:
    """Dropout draws the same masks; batch norm's statistics are written once."""
    for found in ranks.run(against_fx, zero_stage):
        assert found["loss"] <= 1e-6 and found["state"] <= 1e-5
        islands, distinct = found["islands"]
        assert islands > distinct >= 2  # equal blocks share theirs


WIDE = 512  # a weight has 1 MiB, an activation half of one
REMAINDERS = 64 * 1024  # the loss and what belongs to it


def peaks_of(lower: Callable[..., Any], steps: int = 1) -> tuple[int, list[int]]:
    """The predicted peak of a step, and what some steps really reached."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zgraph.shard(Network(width=WIDE, layers=6))
    keep = Keep()
    called = lower(model, passes=zgraph.PassList([*presets.default(), keep]))
    x = torch.randn(256, 6)
    peaks: list[int] = []
    for _ in range(2 + steps):
        model.zero_grad()
        with counted() as count:
            called(x).square().mean().backward()
        peaks.append(count.rise_bytes)
    forward, backward, ctx = (keep.kept[key] for key in ("forward", "backward", "ctx"))
    curve = step_curve(forward.graph, backward.graph, user_outputs=ctx.user_outputs)
    return curve.peak_bytes, peaks[2:]


def test_the_peak_is_not_above_that_of_fx() -> None:
    """Byte by byte: every request is counted, and the collectives of this group have neither threads nor buffers.

    Real ranks hold what they send until it is waited for.
    """
    with fake_world(2):
        predicted, (fx_bytes,) = peaks_of(with_fx)
        predicted_inductor, (inductor_bytes,) = peaks_of(with_inductor)
    assert fx_bytes > 4 * WIDE * WIDE  # at least one gathered weight is seen
    assert inductor_bytes <= fx_bytes
    assert fx_bytes <= predicted + REMAINDERS and inductor_bytes <= predicted_inductor + REMAINDERS


def test_the_peak_on_real_ranks_is_what_was_planned(ranks: Ranks) -> None:
    """Exactly under fx. An island may hold side by side what its nodes hold one after the other: within 5 %."""
    for predicted, peaks in ranks.run(peaks_of, with_fx, 3):
        assert all(abs(peak - predicted) <= REMAINDERS for peak in peaks)
    for predicted, peaks in ranks.run(peaks_of, with_inductor, 3):
        assert all(0.95 * predicted <= peak <= 1.05 * predicted for peak in peaks)


def cached_run(folders: list[str]) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[dist.get_rank() % len(folders)]
    counters.clear()
    losses, _ = trained(with_inductor, 3, small)
    return {
        "losses": losses,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }


def test_second_process_hits_the_cache_and_a_rank_may_miss(tmp_path: Path) -> None:
    shared, fresh = str(tmp_path / "shared"), str(tmp_path / "fresh")
    with contextlib.closing(Ranks(2)) as ranks:
        cold = ranks.run(cached_run, [shared])
    with contextlib.closing(Ranks(2)) as ranks:  # other processes, and rank 1 has lost its cache
        warm, missing = ranks.run(cached_run, [shared, fresh])
    assert sum(found["misses"] for found in cold) > 0
    assert warm["misses"] == 0 and warm["hits"] > 0
    assert missing["hits"] == 0 and missing["misses"] > 0
    assert [warm["losses"], missing["losses"]] == [found["losses"] for found in cold]


def test_a_language_model_without_ranks_runs_under_inductor() -> None:
    """Nothing is sharded, so there is nothing between the compute; the result is eager's."""
    torch.manual_seed(0)
    model = models.Language(layers=1)
    tokens = torch.randint(0, 23, (2, 7))
    expected = model(tokens)
    torch.testing.assert_close(with_inductor(model)(tokens), expected, rtol=1e-5, atol=1e-6)


def test_another_batch_size_compiles_once_for_all_sizes() -> None:
    """What is handed to an island has sizes that are symbols from then on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
    report = zgraph.Report()
    called = with_inductor(model, report=report)
    for rows in (3, 4, 5, 6):
        x = torch.randn(rows, 6)
        outputs, gradients = zip(
            *[
                (output := call(x), torch.autograd.grad(output.square().sum(), model.parameters()))
                for call in (called, model)
            ],
            strict=True,
        )
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert report.recompiles == 1
