"""Compiled graphs take local shards; to everybody else parameters and gradients are DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.graph import meta


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


class Checkpointed(nn.Module):
    """A network that is computed again in backward, and one that is so inside a region which is so itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = Network(), nn.Linear(3, 5), Network()
        self.checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        return self.region(self.outer, self.region(self.up, x))

    def outer(self, x: Tensor) -> Tensor:
        return self.region(self.down, torch.tanh(self.middle(x)))

    def region(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(function, x, use_reentrant=False)) if self.checkpointed else function(x)


def build(kind: type[nn.Module]) -> Any:
    torch.manual_seed(3)
    model = kind()
    zgraph.shard(model)
    return model


def seen_from_outside(kind: type[nn.Module], parts: tuple[str, ...]) -> dict[str, Any]:
    """Gradients of one compiled frame, or of one for each of the parts, which eager code calls."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 5)
    expected_model = build(kind)
    expected_model.checkpointed = False
    expected_model(x).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in expected_model.named_parameters()}

    model, report = build(kind), zgraph.Report()
    options = {"report": report, "passes": zgraph.PassList([*zgraph.passes.presets.default(), Watch()])}
    called = model if parts else with_fx(model, **options)
    for part in parts:
        getattr(model, part).compile(backend="zgraph", options={"lowering": "fx", **options})
    parameters = dict(model.named_parameters())
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    hooked: list[type] = []
    parameters[trained[0]].register_hook(lambda grad: hooked.append(type(grad)))
    called(x).square().mean().backward()
    alone = torch.autograd.grad(called(x).square().mean(), [parameters[name] for name in trained])
    found = dict(zip(trained, alone, strict=True))
    return {
        "inputs": [note.split(": ")[1] for note in report.notes if note.startswith("watch on forward")],
        "hooked": [issubclass(kind, DTensor) for kind in hooked],
        "grad": all(_equal(parameter.grad, expected[name]) for name, parameter in parameters.items()),
        "autograd.grad": all(_equal(found[name], expected[name]) for name in trained),
        "frozen": [parameter.grad for parameter in parameters.values() if not parameter.requires_grad],
    }


def _equal(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    return (
        isinstance(found, DTensor)
        and found.placements == expected.placements
        and torch.equal(whole(found), whole(expected))
    )


# Of each frame: parameters, their handles, and x. A frame that checkpointing repeats is compiled once more for that.
@pytest.mark.parametrize(
    ("kind", "parts", "inputs", "frozen"),
    [
        pytest.param(Network, (), [4 + 4 + 1], 1, id="plain"),
        pytest.param(Checkpointed, (), [10 + 10 + 1], 2, id="regions inside a frame"),
        pytest.param(Checkpointed, ("up", "down"), [9] * 4, 2, id="frames inside regions"),
    ],
)
def test_gradients_are_dtensors_and_the_graph_has_none(
    ranks: Ranks, kind: type[nn.Module], parts: tuple[str, ...], inputs: list[int], frozen: int
) -> None:
    for found in ranks.run(seen_from_outside, kind, parts):
        assert found["inputs"] == [",".join(["FakeTensor"] * count) for count in inputs]
        assert found["hooked"] == [True, True]
        assert found["grad"] and found["autograd.grad"]
        assert found["frozen"] == [None] * frozen


def read_twice(value: DTensor) -> Tensor:
    doubled: Any = value * 2
    return doubled.to_local() + value.to_local()


def read_twice_in_a_region(value: DTensor) -> Tensor:
    return cast(Tensor, checkpoint(read_twice, value, use_reentrant=False))


def read_outside_a_region(value: DTensor) -> Tensor:
    doubled: Any = value * 2
    return doubled.to_local() + cast(Tensor, checkpoint(DTensor.to_local, value, use_reentrant=False))


def other_reads(function: Callable[[DTensor], Tensor]) -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    tensor = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
    return function(tensor), with_fx(function)(tensor)


@pytest.mark.parametrize("function", [read_twice, read_twice_in_a_region, read_outside_a_region])
def test_a_dtensor_that_is_computed_with_stays_one(ranks: Ranks, function: Callable[[DTensor], Tensor]) -> None:
    for expected, found in ranks.run(other_reads, function):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
