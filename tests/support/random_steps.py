"""Small random training steps: gathers, compute and reductions drawn by a seed, each node with a cost of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import fx

from tests.support.graphs import Drawing
from zgraph.analysis.cost import FREE, NodeCost
from zgraph.graph import nodes, traits
from zgraph.tiers.lanes import COMPUTE, Lane

aten = torch.ops.aten


@dataclass(frozen=True)
class Step:
    """A graph, and what its nodes cost in whole microseconds."""

    gm: fx.GraphModule
    costs: dict[fx.Node, NodeCost]

    @property
    def order(self) -> list[fx.Node]:
        return list(self.gm.graph.nodes)


def draw_step(seed: int, *, layers: int) -> Step:
    """A chain of layers, each of which may gather a weight and reduce a gradient; to be drawn in a fake world of two.

    shard -> (copy) -> all_gather -> wait -> (copy) -> addmm        addmm -> mm -> all_to_all -> wait -> sum -> output
    """
    chance = random.Random(seed)
    drawing = Drawing()
    value, wide = drawing.input("x", 8, 8), drawing.input("wide", 32, 8)
    shards = [drawing.input(f"shard_{layer}", chance.randint(1, 16), 8) for layer in range(layers)]
    returned: list[fx.Node] = []
    for layer, shard in enumerate(shards):
        if chance.random() < 0.75:
            copied_in, copied_out = chance.random() < 0.3, chance.random() < 0.3
            sent = drawing.call(aten.clone.default, shard, works_for=f"w{layer}") if copied_in else shard
            whole = drawing.wait(drawing.start_gather(sent, f"w{layer}"))
            if copied_out:
                whole = drawing.call(aten.clone.default, whole, works_for=f"w{layer}")
            value = drawing.call(aten.addmm.default, value, drawing.call(aten.t.default, whole), whole)
        else:
            value = drawing.call(aten.mm.default, value, value)
        if chance.random() < 0.6:
            rows = drawing.call(aten.slice.Tensor, wide, 0, 0, 2 * chance.randint(1, 16))
            grad = drawing.call(aten.mm.default, rows, value)
            received = drawing.wait(drawing.start_exchange(grad, f"g{layer}"))
            sum_ranks = torch.ops.zgraph.sum_ranks.default
            returned.append(drawing.call(sum_ranks, received, 2, 2, torch.float32, works_for=f"g{layer}"))
    gm = drawing.done(value, *returned)
    longest = chance.choice([4, 10, 25])  # a collective, where compute takes up to 10 us
    reductions = chance.choice([Lane.of_group("0"), Lane.of_group("1")])
    costs = {node: _cost(node, chance, longest, reductions) for node in nodes.call_functions(gm.graph, lambda _: True)}
    return Step(gm, costs)


def _cost(node: fx.Node, chance: random.Random, longest: int, reductions: Lane) -> NodeCost:
    if nodes.is_start(node):
        return NodeCost(Lane.of_group("0") if nodes.is_gather(node) else reductions, float(chance.randint(1, longest)))
    if nodes.is_communication(node) and not nodes.is_wait(node):
        return NodeCost(COMPUTE, float(chance.randint(0, 2)))
    if nodes.is_wait(node) or traits.is_reshaping(node):
        return FREE
    return NodeCost(COMPUTE, float(chance.randint(1, 10)))
