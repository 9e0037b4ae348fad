"""What a report says of where parameters rest, of real compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zgraph
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks
from tests.support.resting import DISK, SHARDS, under


def rests(offload: zgraph.Offload | None, mode: str) -> dict[str, str]:
    """The last word of a report on each parameter, as its readers get it."""
    report = zgraph.Report()
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    zgraph.shard(model, offload=offload)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.ones(4, 6)
    if mode == "step":

        @zgraph.training_step(model, opt, options={"lowering": "fx", "report": report})
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        step(x)
    else:
        with_fx(model, report=report)(x).sum().backward()
    found: dict[str, str] = {}
    for frame in report.frames:
        columns: Any = frame.parameters
        for name, place in zip(columns.name, columns.rests, strict=True):
            found[name] = frame.strings[place]
    return found


@pytest.mark.parametrize(
    ("space", "mode"),
    [
        ("device", "compiled"),
        ("host", "step"),
        ("disk", "compiled"),  # told as the host is
        *long(("device", "step"), ("host", "compiled"), ("disk", "step")),
    ],
)
def test_a_report_says_where_parameters_rest(ranks: Ranks, tmp_path: Path, space: str, mode: str) -> None:
    offload = {"device": None, "host": SHARDS, "disk": under(tmp_path, DISK)}[space]
    names = [f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")]
    for found in ranks.run(rests, offload, mode):
        assert found == dict.fromkeys(names, space)
