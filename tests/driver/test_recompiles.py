"""Recompiles: bounded, counted, and explained in the summary."""

from __future__ import annotations

import contextlib
import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks, fresh_ranks
from zgraph.reporting.tables import counted
from zgraph.sharding.scope import state_of

OTHER_LENGTHS = (4, 5, 7, 8, 9, 11, 13, 15, 16, 17)


def build() -> nn.Module:
    """[batch, length] -> [batch, length, 3]"""
    return nn.Sequential(nn.Embedding(7, 4), nn.Dropout(0.1), nn.Linear(4, 3))


def step(call: Any, length: int, *, closes: bool = True) -> None:
    with contextlib.nullcontext() if closes else zgraph.no_sync(call):
        call(torch.ones(2, length, dtype=torch.int64)).sum().backward()
    if closes:
        call.zero_grad()


def evaluate(call: Any, length: int) -> None:
    call.eval()
    with torch.no_grad():
        call(torch.ones(2, length, dtype=torch.int64))
    call.train()


def count_recompiles(zero_stage: int, windows_first: bool) -> tuple[dict[str, int], str]:
    """What `summary(model).recompiles` says after each event, and the printed summary."""
    call = with_fx(zgraph.shard(build(), zero_stage=zero_stage))
    counts: dict[str, int] = {}

    def note(event: str) -> None:
        counts[event] = zgraph.summary(call).recompiles

    def windows(length: int) -> None:
        for closes in (False, False, True):
            step(call, length, closes=closes)

    step(call, 6)
    if windows_first:
        windows(6)
        note("windows at the first length")
    step(call, 10)
    note("second length")
    step(call, 12)
    note("third length")
    windows(12)
    note("windows")
    windows(14)
    note("windows of another length")
    evaluate(call, 14)
    note("evaluation")
    for length in OTHER_LENGTHS:
        step(call, length)
        windows(length)
        evaluate(call, length)
    note("ten more lengths, everywhere")
    return counts, str(zgraph.summary(call))


REASONS = (
    r"  frame 0/1 compiled again: .*size mismatch at index 1\. expected 6, actual 10",
    r"  frame 0/2 compiled again: .*scope\.accumulating == False",
    r"  frame 0/3 compiled again: .*scope\.(accumulating == True|opened == False)",
    r"  frame 0/4 compiled again: GLOBAL_STATE changed: grad_mode",
)


@pytest.mark.parametrize(
    ("zero_stage", "windows_first", "expected", "reasons"),
    [
        # The second length makes it dynamic; then one under no_sync, one that closes, one without gradients.
        (1, False, [1, 1, 3, 3, 4, 4], REASONS),
        # Both lengths, the fixed one and the dynamic, in the three places of a window.
        (1, True, [2, 3, 3, 5, 5, 6, 6], ()),
        (3, False, [1, 1, 1, 1, 2, 2], (REASONS[0],)),  # no_sync changes nothing
    ],
)
def test_recompiles_are_bounded_and_the_summary_says_why(
    ranks: Ranks, zero_stage: int, windows_first: bool, expected: list[int], reasons: tuple[str, ...]
) -> None:
    for counts, text in ranks.run(count_recompiles, zero_stage, windows_first):
        assert list(counts.values()) == expected, counts
        first, *lines = text.splitlines()
        assert f" of 1 frame, {counted(expected[-1], 'recompile')}, " in first
        for line, reason in zip(lines, reasons, strict=False):
            assert re.fullmatch(reason, line), line


class Interrupted(nn.Module):
    """Four layers of so many classes, each compiled alone."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        kinds = [type(f"Layer{number}", (nn.Linear,), {}) for number in range(classes)]
        self.layers = nn.ModuleList(kinds[number % classes](2, 2) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def interrupted(classes: int) -> tuple[int, int]:
    """(graphs, recompiles)"""
    model = zgraph.shard(Interrupted(classes))
    with torch._dynamo.config.patch(recompile_limit=2):
        with_fx(model)(torch.ones(2, 2, requires_grad=True)).sum().backward()
    report = zgraph.summary(model)
    return len(report.graphs), report.recompiles


@pytest.mark.parametrize(("classes", "graphs"), [(4, 8), (1, 2)])
def test_only_equal_units_share_a_frame(ranks: Ranks, classes: int, graphs: int) -> None:
    """Dynamo gives up on a function at its limit of recompiles, and all units run one function."""
    assert ranks.run(interrupted, classes) == [(graphs, 0)] * 2


def frames_of(sharded: bool) -> tuple[int, int]:
    """How many frames Dynamo compiles for a model with graph breaks, and how many of its modules gather."""
    torch.compiler.reset()
    counters.clear()
    model = models.Broken()
    if sharded:
        zgraph.shard(model)
    called = with_fx(model)
    for _ in range(3):
        called(torch.randn(4, 6)).sum().backward()
    return counters["frames"]["total"], sum(state_of(part) is not None for part in model.modules())


def test_across_graph_breaks_only_unit_forwards_become_frames() -> None:
    """What zgraph calls on the way, `DTensor.to_local` included, runs as it is."""
    with fresh_ranks(1) as ranks:
        [(plain, _)], [(sharded, units)] = ranks.run(frames_of, False), ranks.run(frames_of, True)
    assert plain > 1 and sharded <= plain + units


class Sliced(nn.Module):
    """Builds a module in its forward, as Hugging Face's models do: `self.layers[: n]` is a ModuleList of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x


def beside_other_models() -> int:
    """Recompiles of a model while others are sharded, wrapped and gone."""
    call = with_fx(zgraph.shard(Sliced()))
    for _ in range(3):
        other = torch.compile(zgraph.shard(nn.Linear(2, 2)))
        call(torch.ones(1, 2)).sum().backward()
        del other
        gc.collect()
        call(torch.ones(1, 2)).sum().backward()
    return zgraph.summary(call).recompiles


def test_models_that_come_and_go_recompile_no_other(ranks: Ranks) -> None:
    assert ranks.run(beside_other_models) == [0] * ranks.world
