"""Nodes of a whole training step know module and line, as those of graphs by Dynamo do."""

from __future__ import annotations

import networkx as nx
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.ranks import Ranks, worlds


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Outer(nn.Module):
    """One block whose forward runs once, and one that backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        plain, repeated = self.blocks
        return checkpoint(repeated, plain(x), use_reentrant=False).square().mean()  # type: ignore[union-attr]


def origins() -> dict[str, set[tuple[str, str]]]:
    """(module, function of the line) of the nodes that call each operator, in the compiled step."""
    model = zgraph.shard(Outer(), zero_stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = zgraph.Report(keep_graphs=True)

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "report": report})
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(torch.ones(3, 4))
    network = report.graphs[-1].network
    assert isinstance(network, nx.DiGraph)
    found: dict[str, set[tuple[str, str]]] = {}
    for _, node in network.nodes(data=True):
        origin = node.get("module", ""), node.get("source", "").rpartition(" in ")[2]
        found.setdefault(node["target"], set()).add(origin)
    return found


@worlds(2)
def test_backward_has_the_modules_of_its_forward(ranks: Ranks) -> None:
    for found in ranks.run(origins):
        both = {("blocks.0", "forward"), ("blocks.1", "forward")}
        assert found["aten.tanh"] == both
        assert found["aten.tanh_backward"] == both
        assert found["aten.pow.Tensor_Scalar"] >= {("", "forward")}
        layers = {(f"blocks.{block}.{layer}", "forward") for block in (0, 1) for layer in ("up", "down")}
        assert found["aten.addmm"] == layers
        assert found["aten.mm"] == layers
        assert ("", "step") in set().union(*found.values()), "updates are called from the step itself"
