"""Small random training steps before the partition: layers with gathered weights, and a cost for each node."""

from __future__ import annotations

import random

import torch
from torch import fx

from tests.support.graphs import Drawing
from zgraph.analysis.cost import FREE, NodeCost
from zgraph.graph import dataflow, meta, nodes, traits
from zgraph.scheduling.lifetimes.partitioned_model import PartitionedModel
from zgraph.scheduling.timeline import Sharing
from zgraph.tiers.lanes import COMPUTE, Lane
from zgraph.torch_compat.aot import min_cut_partition

aten = torch.ops.aten
unshard, reduce_grad = torch.ops.zgraph.unshard.default, torch.ops.zgraph.reduce_grad.default
POLICY = (torch.float32, None, None, 3, "mean", "alone", "", "0")


def draw_training(seed: int, *, layers: int) -> tuple[fx.GraphModule, dict[str, NodeCost]]:
    """A joint graph and its costs in whole microseconds; to be drawn in a fake world of two.

    x -> mm (tanh) -> mm (tanh) -> ... -> y        tangent -> (tanh_backward) -> mm, mm -> ... -> gradients
    """
    chance = random.Random(seed)
    drawing = Drawing()
    rows, widths = chance.choice([4, 16, 64]), [chance.choice([4, 8, 16, 32]) for _ in range(layers + 1)]
    value = drawing.input("primals_1", rows, widths[0])
    shards = [drawing.input(f"primals_{2 * i + 2}", widths[i] // 2, widths[i + 1]) for i in range(layers)]
    handles = [drawing.input(f"primals_{2 * i + 3}", 96, dtype=torch.uint8) for i in range(layers)]
    grad = drawing.input("tangents_1", rows, widths[-1])
    wholes: list[fx.Node] = []
    read: list[fx.Node] = []
    bent: list[fx.Node | None] = []
    for i, (shard, handle) in enumerate(zip(shards, handles, strict=True)):
        shape = [widths[i], widths[i + 1]]
        wholes.append(drawing.call(unshard, shard, handle, shape, *POLICY, works_for=f"w{i}"))
        read.append(value)
        value = drawing.call(aten.mm.default, value, wholes[-1])
        bent.append(drawing.call(aten.tanh.default, value) if chance.random() < 0.7 else None)
        value = bent[-1] or value
    grads: list[fx.Node] = []
    for i in reversed(range(layers)):
        if (result := bent[i]) is not None:
            grad = drawing.call(aten.tanh_backward.default, grad, result)
        own = drawing.call(aten.mm.default, drawing.call(aten.t.default, read[i]), grad)
        grads.append(drawing.call(reduce_grad, own, handles[i], *POLICY))
        if i:
            grad = drawing.call(aten.mm.default, grad, drawing.call(aten.t.default, wholes[i]))
    gm = drawing.done(value, *grads)
    return gm, {node.name: _cost(node, chance) for node in gm.graph.nodes}


def model_of(gm: fx.GraphModule, costs: dict[str, NodeCost]) -> PartitionedModel:
    """As `ChooseLifetimes` sees it; the graph is tagged and made ready by the partitioner."""
    for node in nodes.call_functions(gm.graph, nodes.is_unshard):
        for part in dataflow.reshaped_values(node):
            meta.tag_recompute(part)
    forward, backward = min_cut_partition(gm, (), num_fwd_outputs=1)
    return PartitionedModel(
        gm.graph, forward.graph, backward.graph, user_outputs=1, cost_of=lambda n: costs[n.name], sharing=Sharing()
    )


def _cost(node: fx.Node, chance: random.Random) -> NodeCost:
    if nodes.is_marker(node):
        return NodeCost(Lane.of_group("0"), float(chance.randint(1, 20)))
    if node.op != "call_function" or traits.is_reshaping(node):
        return FREE
    return NodeCost(COMPUTE, float(chance.randint(2, 20) if node.target is aten.mm.default else chance.randint(1, 3)))
