"""The peak of a whole training step: counted, beside the predicted one and that of three calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zgraph
from tests.support.graphs import Keep, fake_world
from tests.support.memory.step_peaks import peaks_of
from tests.support.ranks import Ranks, worlds
from zgraph.graph import nodes
from zgraph.passes import HoistStarts, SinkWaits, SplitUpdates, UpdateAsReduced, presets
from zgraph.passes.common.updates import Updates

LAYERS = 28
BUCKET = 64 * 1024  # one layer's weight, so that hardly more than gradients is held


@worlds(2)
@pytest.mark.parametrize("zero_stage", [3, 0])
def test_the_peak_of_a_step_is_the_predicted_one(ranks: Ranks, zero_stage: int) -> None:
    for found in ranks.run(peaks_of, zero_stage, presets.default(bucket_bytes=BUCKET)):
        assert found.measured == pytest.approx(found.predicted, rel=0.05)
        # At stage 0 gradients are as large as parameters, and most are freed before the last ones are there.
        assert (found.measured < found.gradients) == (zero_stage == 0)


@worlds(2)
def test_compiled_steps_peak_is_close_to_the_prediction(ranks: Ranks) -> None:
    for found in ranks.run(peaks_of, 3, presets.default(bucket_bytes=BUCKET), "inductor"):
        assert found.measured == pytest.approx(found.predicted, rel=0.05)


@worlds(2)
def test_gradients_die_early_where_each_update_follows_its_reduction(ranks: Ranks) -> None:
    """One collective of each kind at a time, so that gradients are most of what a step holds."""
    bucketed = presets.default(bucket_bytes=BUCKET)[:-4]
    late = [*bucketed, SinkWaits(reductions_in_flight=1), HoistStarts(prefetch=1)]
    early = ranks.run(peaks_of, 3, [*late, UpdateAsReduced()], "fx", LAYERS)
    for ours, theirs in zip(early, ranks.run(peaks_of, 3, late, "fx", LAYERS), strict=True):
        assert ours.measured == pytest.approx(ours.predicted, rel=0.05)
        assert theirs.measured - ours.measured >= 0.8 * ours.gradients
        assert ours.three_calls - ours.measured >= 0.8 * ours.gradients


@worlds(1)
def test_gradients_of_a_single_rank_die_early_too(ranks: Ranks) -> None:
    """Nothing is reduced: updates follow every two megabytes of gradients, of which there are fourteen."""
    (found,) = ranks.run(peaks_of, 3, presets.default(), "fx", 12, 544)
    assert found.measured == pytest.approx(found.predicted, rel=0.05)
    assert found.measured < 0.5 * found.gradients < found.three_calls


def test_a_lone_gpu_updates_in_few_calls() -> None:
    """A fused update of 2 MiB would leave most of its processors idle."""
    with fake_world(1):
        keep = Keep()
        model = zgraph.shard(nn.Sequential(*(nn.Linear(544, 544, bias=False) for _ in range(6))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        passes = presets.default()
        split = next(place for place, one in enumerate(passes) if isinstance(one, SplitUpdates))
        pipeline = zgraph.PassList([*passes[:split], keep])

        @zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})
        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(torch.randn(4, 544))
    order = list(keep.kept["step"].graph.nodes)
    on_cpu = set(Updates.of(order).homes().values())
    for node in order:
        if isinstance(value := node.meta.get("val"), Tensor):
            with FakeTensorMode():
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    assert (len(on_cpu), len(set(Updates.of(order).homes().values()))) == (3, 1)


def test_new_state_is_made_where_its_update_runs() -> None:
    """In a first step that makes its state, too, gradients die early: moments are made update by update."""
    with fake_world(2):
        keep, layers = Keep(), [nn.Linear(64, 64, bias=False) for _ in range(6)]
        model = zgraph.shard(nn.Sequential(*layers), offload=zgraph.Offload(optimizer="host"))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        pipeline = zgraph.PassList([*presets.default(bucket_bytes=1), keep])

        @zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})
        def step(x: Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(torch.randn(4, 64))
    order = list(keep.kept["step"].graph.nodes)
    reductions = [place for place, node in enumerate(order) if nodes.is_exchange(node)]
    made = [place for place, node in enumerate(order) if node.target is torch.ops.aten.zeros_like.default]
    assert len(reductions) == len(layers) and len(made) == 2 * len(layers)
    in_flight = 3  # whose updates wait for reductions that have been started
    assert sum(place < reductions[-1] for place in made) == 2 * (len(layers) - in_flight)
