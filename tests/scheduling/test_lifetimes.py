"""What a frame does with each parameter, from its final graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.graphs import Drawing, Leaky, aten, fake_world, mlp, traced
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.pass_list import PassList
from zgraph.passes import presets
from zgraph.reporting.lifetimes import Lifetime, lifetimes_of

LOWERED = tuple(PassList(presets.default()).of("graph"))
NAMES = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")


@pytest.mark.parametrize("passes", [(), LOWERED[:2], LOWERED], ids=["markers", "single", "buckets"])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_stage_shows_however_far_the_graphs_are_lowered(passes: Sequence[GraphPass], zero_stage: int) -> None:
    """Backward reads the weights of all layers but the first, and no bias."""
    with fake_world(2):
        found = traced(mlp, passes, zero_stage=zero_stage)
        graphs = {direction: gm.graph for direction, gm in found.graphs.items()}
        lifetimes = lifetimes_of(graphs, NAMES, found.ctx.user_outputs)
    alone, read = {
        0: (Lifetime.REPLICATED, Lifetime.REPLICATED),
        2: (Lifetime.FORWARD, Lifetime.SAVED),
        3: (Lifetime.FORWARD, Lifetime.REGATHERED),
    }[zero_stage]
    assert list(lifetimes.items()) == [(name, read if name in NAMES[2::2] else alone) for name in NAMES]


def test_inference_and_what_the_user_is_given() -> None:
    with fake_world(2):
        graphs = {"inference": traced(mlp, LOWERED, train=False).graphs["inference"].graph}
        assert set(lifetimes_of(graphs, NAMES).values()) == {Lifetime.INFERENCE}
        found = traced(Leaky, LOWERED)
        graphs = {direction: gm.graph for direction, gm in found.graphs.items()}
        # The first weight is an output of the user's: returned, not saved. Backward reads the second.
        expected = {"first.weight": Lifetime.FORWARD, "second.weight": Lifetime.REGATHERED}
        assert lifetimes_of(graphs, expected, found.ctx.user_outputs) == expected


def test_gathered_mean_is_not_a_parameter_and_windows_keep_gathers() -> None:
    """forward: all_gather_kept(a); backward: all_gather(relu(g)) for b, all_gather(c)"""
    with fake_world(2):
        forward, backward = Drawing(), Drawing()
        shard, handle = forward.input("shard", 4), forward.input("handle", 96, dtype=torch.uint8)
        args = (shard, handle, 2, "closing", "0")
        start = forward.call(torch.ops.zgraph.all_gather_kept.default, *args, works_for="a")
        first = forward.done(forward.wait(start)).graph
        grad, other = backward.input("g", 4), backward.input("shard_c", 4)
        mean = backward.wait(backward.start_gather(backward.call(aten.relu.default, grad), "b"))
        whole = backward.wait(backward.start_gather(other, "c"))
        second = backward.done(mean, backward.call(aten.neg.default, whole)).graph
        assert lifetimes_of({"forward": first, "backward": second}, "abc", 0) == {
            "a": Lifetime.WINDOW,
            "b": Lifetime.REPLICATED,
            "c": Lifetime.BACKWARD,
        }
