"""One budget for a whole training step: kept to the byte, changing no bit, and refused where nothing fits into it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.train_gpt import GPT
from tests.support.compiled import with_fx
from tests.support.graphs import Keep, by_rank, fake_world
from tests.support.memory import gloo_buffers
from tests.support.memory.allocations import Count, counted, steady_rise
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.analysis.liveness import memory_curve, step_curve
from zgraph.compiler.fit_budget import LEAST, fit, smallest_feasible
from zgraph.passes import presets

STEPS = 3
PLENTY = 10**9
SCALARS = 64  # bytes of a loss, its scale, its gradient, which are not the graphs'

# --- on paper -------------------------------------------------------------------------------------------------------


def test_target_is_lowered_by_the_excess_of_graphs() -> None:
    asked: list[int] = []

    def peak_of(target: int) -> int:
        asked.append(target)
        return target + 30

    assert fit(peak_of, 100) == 70
    assert asked == [100, 70]


def test_stepwise_excess_is_left_by_steps() -> None:
    """90 and a little more hold 101; from 89 on it is 80."""
    assert fit(lambda target: 101 if target >= 97 else 80, 100) == 96


@pytest.mark.parametrize(("least", "answer"), [(100, LEAST), (101, None)])
def test_the_most_frugal_plan_is_the_last_resort(least: int, answer: int | None) -> None:
    assert fit(lambda target: 500 if target > LEAST else least, 100) == answer


def test_smallest_budget_is_searched_below_the_most_frugal_plan() -> None:
    """The plan for 1 byte holds 60, that for 40 to 59 bytes 50: a budget of 50 is kept, one of 49 is not."""

    def peak_of(target: int) -> int:
        return 60 if target < 40 else 50 if target < 60 else target + 5

    least = smallest_feasible(peak_of)
    assert least == 50
    assert fit(peak_of, least) is not None and fit(peak_of, least - 1) is None


def uneven() -> nn.Module:
    """31 rows, of which three ranks of four hold 8 and the last 7: only that one pads, beside the gathered whole."""
    return nn.Sequential(nn.Linear(64, 31, bias=False), nn.Linear(31, 4, bias=False))


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_ranks_with_uneven_shards_count_the_same_peak(bucket_bytes: int) -> None:
    agreed: list[int] = []
    own: list[int] = []
    passes = presets.default(bucket_bytes=bucket_bytes)
    for rank, found in enumerate(by_rank(uneven, passes, world=4, train=False)):
        with fake_world(4, rank):
            curve = memory_curve(found.graphs["inference"].graph)
            agreed.append(memory_curve(found.graphs["inference"].graph, agreed=True).peak_bytes)
        own.append(curve.peak_bytes)
    assert bucket_bytes > 1 or own[-1] > own[0]  # packed, the rows are gone before the gather's result is there
    assert agreed == agreed[:1] * 4 and agreed[0] >= max(own)


# --- whole steps ----------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Weights of 64 KiB, activations of 64 and 256 KiB, one of them random; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Tanh()),
            *(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def layers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Layers(), (torch.randn(256, 64),)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT(2, 64, 4, 64), (torch.randint(0, 256, (4, 64)), torch.randint(0, 256, (4, 64)))


@dataclass(frozen=True)
class Compiled:
    """What became of a budget.

    Attributes:
        gathered: parameters that travel in forward and in backward.
        predicted_bytes: peak of the final graphs.
        rise_bytes: what steps allocate at their highest point.
        differing: gradients that are not those of eager mode, bit for bit.
    """

    gathered: dict[str, int]
    predicted_bytes: int
    rise_bytes: int
    differing: list[str]


def compiled(build: Callable[[], Any], budget_bytes: int, *, sharded: bool) -> Compiled:
    torch.compiler.reset()
    torch.manual_seed(3)
    model, batch = build()
    if sharded:
        zgraph.shard(model)

    def step(called: Any) -> Tensor:
        torch.manual_seed(5)  # of the masks
        loss = called(*batch)
        loss.backward()
        return loss.detach()

    def results(loss: Tensor) -> dict[str, Tensor]:
        return {"loss": loss} | {name: whole(one.grad) for name, one in model.named_parameters()}

    expected = results(step(model))
    report, keep = zgraph.Report(), Keep()
    # There compute takes longer than the link, so that gathering again costs less than computing again.
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"), budget_bytes=budget_bytes)
    pipeline = zgraph.PassList([*presets.planned(), keep], target=target)
    called = with_fx(model, passes=pipeline, report=report)
    counts: list[Count] = []
    loss = torch.zeros(())
    for _ in range(1 + STEPS):
        model.zero_grad()
        if sharded:
            gloo_buffers.flush()
        with counted() as count:
            loss = step(called)
        counts.append(count)
    found = results(loss)
    users = keep.kept["ctx"].user_outputs
    curve = step_curve(keep.kept["forward"].graph, keep.kept["backward"].graph, user_outputs=users)
    gathered = {
        graph.direction: sum(len(sent.parameters) for sent in graph.transfers if sent.kind.startswith("all_gather"))
        for graph in report.graphs
    }
    differing = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    return Compiled(gathered, curve.peak_bytes, steady_rise(counts[1:]), differing)


def refusal(build: Callable[[], Any], budget_bytes: int, *, sharded: bool) -> str:
    with pytest.raises(ValueError) as error:
        compiled(build, budget_bytes, sharded=sharded)
    return str(error.value)


def least_of(text: str) -> int:
    found = re.search(r"smallest budget that it was found to fit into is (\d+) bytes, which are there at \w+: ", text)
    assert found is not None, text
    return int(found[1])


def test_a_refusal_names_the_smallest_budget_that_is_kept() -> None:
    """Without ranks every byte is the graphs' own: a dropped mask or a wrong chain would show in the bits."""
    text = refusal(layers, 1, sharded=False)
    least = least_of(text)
    assert "does not fit into budget_bytes=1." in text and "Raise budget_bytes to it" in text
    assert least_of(refusal(layers, least - 1, sharded=False)) == least
    plenty = compiled(layers, PLENTY, sharded=False).predicted_bytes
    peaks: list[int] = []
    for budget in (least, (least + plenty) // 2, plenty):
        found = compiled(layers, budget, sharded=False)
        assert found.predicted_bytes <= budget and not found.differing
        assert found.rise_bytes == pytest.approx(found.predicted_bytes, abs=SCALARS)
        peaks.append(found.predicted_bytes)
    assert peaks[0] == least < peaks[1] < peaks[2] == plenty


def sharded_steps() -> tuple[str, dict[int, Compiled]]:
    return refusal(layers, 1, sharded=True), {
        budget: compiled(gpt, budget, sharded=True) for budget in (PLENTY, 2_000_000)
    }


def test_ranks_keep_a_budget_together(ranks: Ranks) -> None:
    """Everything is kept where there is plenty: no gather in backward. 2 MB of 3.9 keep some."""
    (said, found), (also_said, _) = answers = ranks.run(sharded_steps)
    assert least_of(said) and said == also_said
    for _, results in answers:
        for budget, one in results.items():
            assert not one.differing and one.predicted_bytes <= budget
            assert one.rise_bytes == pytest.approx(one.predicted_bytes, abs=SCALARS)
    plenty, little = found.values()
    assert plenty.gathered == {"forward": 14, "backward": 0}
    assert little.gathered["forward"] == 14 and little.gathered["backward"] > 0


def test_inference_and_symbolic_sizes_have_budgets_too() -> None:
    """Sizes count by their hints, those of the batch that is compiled for."""
    torch.compiler.reset()
    model, batch = layers()

    def called(budget_bytes: int, **options: Any) -> Any:
        target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"), budget_bytes=budget_bytes)
        pipeline = zgraph.PassList(presets.planned(), target=target)
        return torch.compile(model, backend="zgraph", options={"lowering": "fx", "passes": pipeline}, **options)

    with torch.no_grad():
        with pytest.raises(ValueError) as error:
            called(1)(*batch)
        least = least_of(str(error.value))
        called(least)(*batch)
        torch.compiler.reset()
        with pytest.raises(ValueError, match=f"fit into is {least} bytes"):
            called(least - 1)(*batch)
    torch.compiler.reset()
    dynamic = called(PLENTY, dynamic=True)
    for rows in (16, 24):
        x = torch.randn(rows, 64)
        losses: list[Tensor] = []
        for step in (model, dynamic):
            torch.manual_seed(5)
            losses.append(step(x))
        assert torch.equal(*losses)
        losses[1].backward()
