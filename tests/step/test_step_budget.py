"""One budget for a whole training step in one graph: kept to the byte, and changing no bit."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support import micro_batches
from tests.support.budget import long
from tests.support.graphs import Keep, fake_world
from tests.support.memory import gloo_buffers
from tests.support.memory.allocations import Count, counted, steady_rise
from tests.support.ranks import Ranks, worlds
from tests.support.step_scripts import Frugal
from tests.support.whole_steps import Case, assert_same, train
from zgraph.analysis.cost import NodeCost
from zgraph.analysis.liveness import memory_curve
from zgraph.compiler.graph_pass import PassContext
from zgraph.graph import edits, nodes
from zgraph.passes import ChooseLifetimes, DedupeGathers, presets
from zgraph.passes.common.gathers_per_part import repeat_gathers
from zgraph.passes.common.repeat_in_backward import repeat_in_backward
from zgraph.scheduling.lifetimes.whole_step_model import WholeStepModel
from zgraph.scheduling.timeline import Sharing
from zgraph.step.capture.capture import capture
from zgraph.step.capture.lifted import Lifted
from zgraph.tiers.lanes import COMPUTE

STEPS = 3
PLENTY = 10**9
SCALARS = 64  # bytes of a loss and a learning rate, which are not the graph's


class Layers(nn.Module):
    """Weights of 64 KiB, activations of 64 and 256 KiB, one random, one written to in place, one read by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64), nn.Tanh()),
            *(nn.Linear(64, 256), nn.ReLU(inplace=True), nn.BatchNorm1d(256), nn.Linear(256, 64, bias=False)),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(len(x)).flip(0)
        return self.layers(x[rows]).square().mean()


def statistics_under_a_budget() -> dict[str, float]:
    """Largest differences from the plain lines, after two steps that recompute whatever they can."""
    case = micro_batches.Case(build=micro_batches.Normed, k=1)
    loops = [micro_batches.Loop(case, 3, no_sync=False) for _ in range(2)]
    passes = [Frugal() if isinstance(one, ChooseLifetimes) else one for one in presets.planned(bucket_bytes=4096)]
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
    options = {"lowering": "fx", "passes": zgraph.PassList(passes, target=target)}
    step: Any = zgraph.training_step(loops[0].model, loops[0].opt, options=options)(loops[0].step)
    for number in range(2):
        step([micro_batches.tokens(number, 0)])
        loops[1].step([micro_batches.tokens(number, 0)])
    ours, theirs = (loop.left() for loop in loops)
    pairs = {name: (value, theirs[name]) for name, value in ours.items()}
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items() if not torch.equal(a, b)}


@worlds(2)
def test_recomputation_updates_no_statistics(ranks: Ranks) -> None:
    """The schema of batch norm does not say that it writes its running statistics."""
    assert ranks.run(statistics_under_a_budget) == [{}, {}]


# --- on paper -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(3, 1), (3, 2), (2, 2)], ids=["stage 3", "stage 3, twice", "stage 2, twice"])
def captured(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A step before its gathers are repeated."""
    zero_stage, times = request.param
    with fake_world(2):
        model = zgraph.shard(Layers(), zero_stage=zero_stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            for part in x.chunk(times):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(part)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        found = capture(step, Lifted.of(model, [optimizer]), (torch.zeros(16 * times, 64),), {})
        DedupeGathers().run(found.gm, PassContext(direction="step"))
        yield found.gm


def model_of(gm: Any) -> WholeStepModel:
    return WholeStepModel(gm.graph, cost_of=lambda node: NodeCost(COMPUTE, 1.0), sharing=Sharing())


def test_predicted_step_equals_the_rewritten_graph(captured: Any) -> None:
    """Whatever is dropped: the same calls, and during each of them the same bytes."""
    chance = random.Random(3)
    for share in (0.0, 0.3, 0.7, 1.0):
        gm = edits.copy_of(captured)
        model = model_of(gm)
        estimate = model.estimate({})
        for value in chance.sample(model.values, round(share * len(model.values))):
            if model.chain(value, estimate) is not None:
                estimate = model.estimate({**estimate.dropped, value: None})
        assert share == 0 or estimate.recomputed
        kept = {value.gather for value in model.values if value not in estimate.dropped and value.gather is not None}
        repeat_in_backward(gm.graph, zip(estimate.recomputed, estimate.anchors, strict=True))
        repeat_gathers(gm.graph, kept)
        gm.graph.lint()
        curve = memory_curve(gm.graph, agreed=True)
        calls = [place for place, node in enumerate(curve.nodes) if node.op == "call_function"]
        assert list(estimate.bytes_during) == [curve.bytes_during[place] for place in calls]


def test_unrepeatable_values_are_kept(captured: Any) -> None:
    """The mask and what it is applied to, batch norm with its statistics, and what is overwritten before backward."""
    model = model_of(captured)
    estimate = model.estimate({})
    chains = [chain for value in model.values if (chain := model.chain(value, estimate)) is not None]
    again = {str(node.target) for chain in chains for node in chain}
    assert {"aten.tanh.default", "aten.addmm.default"} <= again
    assert not again & {"aten.native_dropout.default", "aten.native_batch_norm.default", "aten.relu_.default"}
    written = [node for node in nodes.call_functions(captured.graph, lambda node: "relu_" in str(node.target))]
    assert written and not {node for chain in chains for node in chain} & {
        source for node in written for source in (node, *node.all_input_nodes)
    }


# --- on ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What became of a budget.

    Attributes:
        predicted_bytes: peak of the final graph.
        rise_bytes: what steps allocate at their highest point.
        losses: of the steps.
    """

    predicted_bytes: int
    rise_bytes: int
    losses: list[float]


def ran(budget_bytes: int | None) -> Ran:
    """Some steps under a budget, or the plain loop without one."""
    torch.manual_seed(3)
    model = zgraph.shard(Layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    keep = Keep()
    called: Any = step
    if budget_bytes is not None:
        target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"), budget_bytes=budget_bytes)
        pipeline = zgraph.PassList([*presets.planned(), keep], target=target)
        called = zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})(step)
    torch.manual_seed(5)
    counts: list[Count] = []
    losses: list[float] = []
    for _ in range(1 + STEPS):
        x = torch.randn(256, 64)
        gloo_buffers.flush()
        with counted() as count:
            loss = called(x)
        counts.append(count)
        losses.append(loss.item())
    curve = memory_curve(keep.kept["step"].graph) if keep.kept else None
    return Ran(0 if curve is None else curve.peak_bytes, steady_rise(counts[1:]), losses)


def least_of(text: str) -> int:
    found = re.search(r"smallest budget that it was found to fit into is (\d+) bytes, which are there at \w+: ", text)
    assert found is not None, text
    return int(found[1])


def budgets() -> dict[int | None, Ran]:
    with pytest.raises(ValueError, match=r"does not fit into budget_bytes=1\.") as error:
        ran(1)
    least = least_of(str(error.value))
    plenty = ran(PLENTY)
    middle = (least + plenty.predicted_bytes) // 2
    return {None: ran(None), PLENTY: plenty, middle: ran(middle), least: ran(least)}


@worlds(2)
def test_step_memory_is_within_budget_and_as_predicted(ranks: Ranks) -> None:
    for found in ranks.run(budgets):
        plain = found.pop(None)
        for budget, one in found.items():
            assert one.predicted_bytes <= budget and one.losses == plain.losses
            assert one.rise_bytes == pytest.approx(one.predicted_bytes, abs=SCALARS)
        peaks = [one.predicted_bytes for one in found.values()]
        assert peaks[0] > peaks[1] > peaks[2] and peaks[2] < 0.8 * peaks[0]


CASES = {
    "stage 3": Case(clip="torch", schedule=True, dropout=0.5),
    "stage 0, accumulated": Case(stage=0, optimizer="sgd", accumulation=2, no_sync=True, precision="autocast"),
    "stage 1, accumulated": Case(stage=1, optimizer="adam", accumulation=3, no_sync=True, dropout=0.5),
    "stage 2, bf16": Case(stage=2, optimizer="adamw_foreach", accumulation=2, precision="bf16", clip="zgraph"),
    "stage 3, accumulated": Case(accumulation=2, precision="autocast", optimizer="sgd_foreach", dropout=0.5),
    "loco": Case(loco=True, optimizer="adagrad", accumulation=2, clip="zgraph"),
    "checkpointed": Case(checkpointed=True, optimizer="sgd"),
}
# The others meet a budget in test_offload_state.py, in pairs.
SOME = ("stage 3", "stage 1, accumulated", "checkpointed")
ROWS = [*SOME, *long(*(name for name in CASES if name not in SOME))]


def frugal(case: Case) -> tuple[str, ...]:
    """Let backward make again whatever it can, and compare with the plain loop; what the passes had to say."""
    found, expected = train(replace(case, frugal=True), whole_step=True), train(case, whole_step=False)
    if case.lowering == "fx":
        assert_same(found, expected)
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    return found.notes


def recomputed(answers: list[tuple[str, ...]]) -> list[int]:
    """How many activations each graph makes again, on all ranks."""
    notes, others = answers
    assert notes == others
    return [int(found[1]) for note in notes if (found := re.search(r"recomputes (\d+) activations", note))]


@worlds(2)
@pytest.mark.parametrize("name", ROWS)
def test_recomputation_changes_no_bit(ranks: Ranks, name: str) -> None:
    again = recomputed(ranks.run(frugal, CASES[name]))
    assert again and all(again) != CASES[name].checkpointed  # all of the model, which leaves nothing


@worlds(2)
def test_a_step_compiled_by_inductor_makes_again_the_same(ranks: Ranks) -> None:
    """Its kernels round in another order."""
    again = recomputed(ranks.run(frugal, Case(lowering="inductor", optimizer="sgd", clip="zgraph")))
    assert again and all(again)
