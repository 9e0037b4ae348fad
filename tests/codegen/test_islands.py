"""Islands hold compute only, leave the planned order alone, and are equal where blocks are."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, fx, nn

from tests.support.graphs import Drawing, deep, fake_world, inputs_for, mlp, traced
from zgraph.codegen.inductor import place_islands
from zgraph.codegen.islands import cut_out, find_islands, is_compute
from zgraph.compiler.graph_pass import Direction
from zgraph.graph import nodes
from zgraph.passes import presets

aten = torch.ops.aten
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
GRAPH_PASSES = [entry for entry in presets.default(bucket_bytes=300) if entry.phase == "graph"]  # a layer


class Blocks(nn.Module):
    """Equal blocks with pointwise work around a matmul, and buckets that end between them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(torch.sigmoid(x) * 2))
        return x


def fixed(graph: fx.Graph) -> list[str]:
    """What no compiler may move: names in order."""
    return [node.name for node in graph.nodes if node.op == "call_function" and not is_compute(node)]


def run_order(graph: fx.Graph, names: Iterable[str]) -> list[str]:
    """The same names in the order of the lines that the generated program assigns them in."""
    lines = [line.split("=")[0].split(":")[0].strip() for line in fx.GraphModule({}, graph).code.splitlines()]
    wanted = set(names)
    return [name for name in lines if name in wanted]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("build", [mlp, deep, Blocks])
def test_starts_and_waits_stay_in_the_planned_order(build: type[nn.Module], direction: Direction) -> None:
    with fake_world(2):
        gm = traced(build, GRAPH_PASSES).graphs[direction]
        planned = fixed(gm.graph)
        communication = [node.name for node in gm.graph.nodes if nodes.is_start(node) or nodes.is_wait(node)]
        assert communication and set(communication) <= set(planned)
        program = fx.GraphModule(gm, gm.graph)
        count = place_islands(program, lambda island: lambda args: None)
    found = run_order(program.graph, planned)
    assert found == planned
    assert [name for name in found if name in communication] == communication
    if build is Blocks:
        assert count > 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_an_interpreted_island_computes_what_its_nodes_did(direction: Direction) -> None:
    """Each island run by its own graph: the program's results are the graph's."""
    with fake_world(1):
        gm = traced(Blocks, GRAPH_PASSES, world=1).graphs[direction]
        inputs = inputs_for(gm, seed=1)
        expected = gm(*inputs)
        program = fx.GraphModule(gm, gm.graph)
        assert place_islands(program, lambda island: lambda args: island.gm(*args)) >= 1
        found = program(*inputs)
    pairs = [pair for pair in zip(found, expected, strict=True) if type(pair[1]) is Tensor]  # the last one is the mesh
    assert pairs and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_equal_blocks_have_equal_islands() -> None:
    with fake_world(2):
        gm = traced(Blocks, GRAPH_PASSES).graphs["forward"]
        codes = [cut_out(members).gm.code for members in find_islands(gm.graph)]
    assert len(codes) > len(set(codes))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copies_of_buckets_stay_outside_on_cpu(direction: Direction) -> None:
    """Their strides are those of the bucket: one bucket of another size would change every kernel they are part of."""
    with fake_world(2):
        gm = traced(Blocks, GRAPH_PASSES).graphs[direction]
        copies = [
            node
            for node in nodes.call_functions(gm.graph, nodes.is_communication)
            if node.target in (aten.clone.default, aten.cat.default)
        ]
        assert copies
        assert not any(nodes.is_communication(node) for members in find_islands(gm.graph) for node in members)


def test_random_and_mutating_operators_stay_outside() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4)
    mask = drawing.call(aten.bernoulli.p, x, 0.5)
    product = drawing.call(aten.mul.Tensor, mask, x)
    total = drawing.call(aten.add.Tensor, product, x)
    written = drawing.call(aten.copy_.default, x, total)
    assert [is_compute(node) for node in (mask, product, total, written)] == [False, True, True, False]


def test_unfusable_operators_are_left_alone() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4, 4)
    turned = drawing.call(aten.t.default, x)
    product = drawing.call(aten.mm.default, x, turned)
    drawing.done(drawing.call(aten.relu.default, product))
    assert find_islands(drawing.graph) == []


def test_results_of_one_call_stay_together() -> None:
    drawing = Drawing()
    x = drawing.input("x", 4, 4)
    found = drawing.call(aten.max.dim, x, 1)
    values = drawing.call(operator.getitem, found, 0)
    doubled = drawing.call(aten.mul.Tensor, values, 2)
    indices = drawing.call(operator.getitem, found, 1)
    drawing.done(drawing.call(aten.add.Tensor, doubled, 1), indices)
    [members] = find_islands(drawing.graph)
    assert members[:3] == [found, values, indices]
    island = cut_out(members)
    assert [node.name for node in island.outputs] == [indices.name, members[-1].name]
    assert island.inputs == (x,)
