"""Compiled graphs take local shards; to everybody else parameters and gradients are DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph
from tests.compiled import with_fx
from tests.ranks import Ranks
from tests.replicated import whole
from zgraph import meta


class Watch(zgraph.GraphPass):
    """Notes the inputs of each graph."""

    name = "watch"

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        values = [meta.value(node) for node in gm.graph.find_nodes(op="placeholder")]
        ctx.note(self, ",".join(type(value).__name__ for value in values))
        return False


class Network(nn.Module):
    """Two layers, one bias of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def build() -> Network:
    torch.manual_seed(3)
    model = Network()
    zgraph.shard(model)
    return model


def seen_from_outside() -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 5)
    expected_model = build()
    expected_model(x).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in expected_model.named_parameters()}

    model, report = build(), zgraph.Report()
    called = with_fx(model, report=report, pipeline=zgraph.Pipeline([*zgraph.passes.presets.default(), Watch()]))
    hooked: list[type] = []
    model.down.weight.register_hook(lambda grad: hooked.append(type(grad)))
    called(x).square().mean().backward()
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    alone = torch.autograd.grad(called(x).square().mean(), [parameters[name] for name in trained])
    found = dict(zip(trained, alone, strict=True))
    return {
        "inputs": [note.split(": ")[1] for note in report.notes if note.startswith("watch on forward")],
        "hooked": [kind is DTensor for kind in hooked],
        "grad": all(_equal(parameter.grad, expected[name]) for name, parameter in parameters.items()),
        "autograd.grad": all(_equal(found[name], expected[name]) for name in trained),
        "frozen": parameters["up.bias"].grad,
    }


def _equal(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        isinstance(found, DTensor)
        and found.placements == expected.placements
        and torch.equal(whole(found), whole(expected))
    )


def test_gradients_are_dtensors_and_the_graph_has_none(two_ranks: Ranks) -> None:
    for found in two_ranks.run(seen_from_outside):
        assert found["inputs"] == [",".join(["FakeTensor"] * 9)]  # four parameters, their handles, and x
        assert found["hooked"] == [True, True]
        assert found["grad"] and found["autograd.grad"]
        assert found["frozen"] is None


def other_reads() -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    tensor = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])

    def double(value: DTensor) -> Tensor:
        doubled: Any = value * 2
        return doubled.to_local() + value.to_local()

    return double(tensor), with_fx(double)(tensor)


def test_a_dtensor_that_is_computed_with_stays_one(two_ranks: Ranks) -> None:
    for expected, found in two_ranks.run(other_reads):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
