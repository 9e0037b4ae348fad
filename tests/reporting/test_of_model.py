"""`zgraph.summary` and `zgraph.explain`: what a sharded model knows of its compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks


def summaries() -> dict[str, Any]:
    torch.compiler.reset()
    model = zgraph.shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    for function in (zgraph.summary, zgraph.explain):
        with pytest.raises(zgraph.ZgraphError, match=f"zgraph.{function.__name__}: nothing was compiled yet"):
            function(model)
    compiled = with_fx(model)
    compiled(torch.ones(2, 6)).sum().backward()
    twin = zgraph.shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    with_fx(twin)(torch.ones(2, 6)).sum().backward()  # runs the graphs of the first model
    with pytest.raises(zgraph.ZgraphError, match=r"reused the graphs of an equal model.*torch\.compiler\.reset"):
        zgraph.summary(twin)
    first = zgraph.summary(compiled)
    before = (len(first.graphs), first.recompiles)
    explained = str(zgraph.explain(compiled))
    with torch.no_grad():
        compiled(torch.ones(2, 6))
    given = zgraph.Report()
    torch.compiler.reset()
    with_fx(model, report=given)(torch.ones(2, 6)).sum().backward()
    return {
        "before": before,
        "after": (len(first.graphs), first.recompiles),
        "phases": sorted(first.seconds),
        "positive": all(seconds >= 0 for seconds in first.seconds.values()),
        "text": str(first),
        "explained": explained,
        "given": zgraph.summary(model) is given and len(given.graphs) == 2,
    }


def test_a_model_leads_to_its_report(ranks: Ranks) -> None:
    for found in ranks.run(summaries):
        assert found["before"] == (2, 0)
        assert found["after"] == (3, 1)  # evaluation is a graph of its own
        assert (
            found["phases"] == ["agreement", "cache", "lowering", "passes", "predicting", "tracing"]
            and found["positive"]
        )
        assert found["text"].startswith("zgraph compiled 3 graphs of 1 frame, 1 recompile, 3 buckets")
        assert "compiling took" in found["text"]
        assert found["given"]
        assert "zgraph.explain: 2 graphs of 1 frame\n" in found["explained"]
        assert "  gathered again in backward: 1 parameter: 2.weight" in found["explained"]
        assert "target=zgraph.Target(hardware=zgraph.calibrate())" in found["explained"]


def test_a_model_that_was_not_sharded_has_none() -> None:
    for function in (zgraph.summary, zgraph.explain):
        with pytest.raises(zgraph.ZgraphError, match=r'not sharded.*options=\{"report": report\}'):
            function(nn.Linear(2, 2))
