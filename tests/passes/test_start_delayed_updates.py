"""StartDelayedUpdates: updates of gradients of the call before, as early as nobody reads what they overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import zgraph
from tests.support.graphs import fake_world
from tests.support.hash_seeds import printed_under_two_hash_seeds
from zgraph.compiler.graph_pass import PassContext
from zgraph.graph import edits, meta, nodes
from zgraph.graph.text import graph_text
from zgraph.passes import StartDelayedUpdates, presets

LAYERS = 3
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


class Kept(zgraph.GraphPass):
    """Keeps a copy of each step's graph."""

    graphs: list[fx.GraphModule]
    name = "kept"

    def __init__(self, graphs: list[fx.GraphModule]) -> None:
        object.__setattr__(self, "graphs", graphs)

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        self.graphs.append(edits.copy_of(gm))
        return False


def steady(stage: int, *, fused: bool = True, after: int | None = 0, last: int = 2) -> fx.GraphModule:
    """The graph of three layers that later calls run.

    Args:
        after: calls whose updates are not delayed.
        last: how many of the last passes, which are StartDelayedUpdates and StreamStates, are to run.
    """
    torch.manual_seed(0)
    at_rest = zgraph.Offload(optimizer="host", delayed_update_after=after)
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))
    model = zgraph.shard(layers, zero_stage=stage, offload=at_rest)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
    found: list[fx.GraphModule] = []
    *rules, stream = presets.default(bucket_bytes=1)
    ends: list[zgraph.GraphPass] = [StartDelayedUpdates(), stream]
    passes = [*rules, *ends[:last], Kept(found), *ends[last:]]

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    options: dict[str, Any] = {"lowering": "fx", "pipeline": zgraph.Pipeline(passes)}
    whole: Any = zgraph.training_step(model, optimizer, options=options)(step)
    for _ in range(3):
        whole(torch.ones(2, 4))
    return found[-1]


def products(order: list[fx.Node]) -> int:
    return sum(node.target in (aten.mm.default, aten.addmm.default) for node in order)


def hidden(gm: fx.GraphModule) -> list[int]:
    """For each update that runs beside compute how many products stand between its start and its wait."""
    order = list(gm.graph.nodes)
    starts = [node for node in order if meta.beside(node) is not None and not nodes.is_update_wait(node)]
    waits = {meta.beside(node): node for node in order if nodes.is_update_wait(node)}
    return [products(order[order.index(one) : order.index(waits[meta.beside(one)])]) for one in starts]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_run_beside_compute(stage: int) -> None:
    print(stage, hidden(steady(stage, last=1)), hidden(steady(stage)))
