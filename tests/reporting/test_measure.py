"""`zgraph.measure` on real ranks: bytes judged by the predicted peak, results equal to unmeasured ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks

WIDTH, ROWS, LAYERS = 256, 512, 10
BUCKET_BYTES = 2**19  # holds a layer, and not quite two


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)])


def measured(zero_stage: int, who: tuple[int, ...]) -> dict[str, Any]:
    """Three steps, of which these ranks measure the last two; what one rank found."""
    model = zgraph.shard(build(), zero_stage=zero_stage)
    passes = zgraph.passes.presets.planned(bucket_bytes=BUCKET_BYTES)
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"))
    compiled = with_fx(model, passes=zgraph.PassList(passes, target=target))
    x = torch.randn(ROWS, WIDTH)
    grads: list[list[torch.Tensor]] = []

    def step() -> None:
        compiled(x).square().mean().backward()
        grads.append([parameter.grad.to_local().clone() for parameter in model.parameters()])  # pyright: ignore
        model.zero_grad()

    step()
    if dist.get_rank() in who:
        with zgraph.measure(model):
            step()
            step()
    else:
        step()
        step()
    step()
    explanation = zgraph.explain(compiled)
    by_direction = {direction: found for (_, direction), found in explanation.measured.items()}
    return {
        "equal": all(torch.equal(a, b) for later in grads[1:] for a, b in zip(grads[0], later, strict=True)),
        "calls": {direction: found.calls for direction, found in by_direction.items()},
        "peaks": {direction: found.peak_bytes for direction, found in by_direction.items()},
        "blocked": {direction: list(found.blocked_us) for direction, found in by_direction.items()},
        "sums": all(sum(found.blocked_us.values()) <= found.us for found in by_direction.values()),
        "predicted": {graph.direction: graph.peak.bytes for graph in explanation.graphs if graph.peak is not None},
        "collectives": {graph.direction: [each.name for each in graph.collectives] for graph in explanation.graphs},
        "text": str(explanation),
        "over": zgraph.summary(model).profiler is None,
    }


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_peaks_are_the_predicted_ones_and_results_the_same(ranks: Ranks, zero_stage: int) -> None:
    """Each of gloo's two threads may stage, and keep, the buffer of a collective: at another moment than predicted."""
    for found in ranks.run(measured, zero_stage, (0, 1)):
        assert found["equal"] and found["over"] and found["sums"]
        assert found["calls"] == {"forward": 1, "backward": 1}  # the profiled one does not count
        for direction, peak in found["peaks"].items():
            predicted = found["predicted"][direction]
            assert 0.99 * predicted < peak < 1.01 * predicted + 2 * 2 * BUCKET_BYTES
            assert sorted(found["blocked"][direction]) == sorted(found["collectives"][direction])
        text = found["text"]
        assert len(re.findall(r"measured \d+ us \([\d.]+ of predicted\), of which \d+ us blocked in waits", text)) == 2
        assert len(re.findall(r"measured peak [\d.]+ MiB \([\d.]+ of predicted\)", text)) == 2
        assert text.count("measured: blocked for ") == sum(map(len, found["blocked"].values()))


def test_a_rank_may_measure_alone(ranks: Ranks) -> None:
    first, second = ranks.run(measured, 3, (0,))
    assert first["equal"] and second["equal"]
    assert first["calls"] == {"forward": 1, "backward": 1} and second["calls"] == {}
    assert "measured" in first["text"] and "measured" not in second["text"]


def refusals() -> list[str]:
    found: list[str] = []

    def refused(model: nn.Module) -> None:
        with pytest.raises(zgraph.ZgraphError) as caught, zgraph.measure(model):
            pass
        found.append(str(caught.value))

    model = build()
    refused(model)
    refused(zgraph.shard(model))
    compiled = with_fx(model)
    compiled(torch.ones(2, WIDTH)).sum().backward()
    refused(model)
    with zgraph.measure(compiled):
        refused(model)
        compiled(torch.ones(2, WIDTH))
    with pytest.raises(KeyError), zgraph.measure(model):
        raise KeyError  # the user's own error passes, and ends the measurement
    assert zgraph.summary(model).profiler is None
    return found


def test_refusals_say_what_to_do(ranks: Ranks) -> None:
    for plain, early, empty, nested in ranks.run(refusals):
        assert plain.startswith("zgraph.measure: the model was not sharded")
        assert early.startswith('zgraph.measure: nothing was compiled yet; compile with backend="zgraph"')
        assert "none of the model's compiled graphs ran; put whole training steps into the `with`" in empty
        assert "being measured already; leave out the inner `with`" in nested
