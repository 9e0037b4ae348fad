"""Times small enough to add up by hand: of a node, and of a machine with two ranks on each host."""

from __future__ import annotations

import math

import torch
from torch import fx

from zgraph.analysis.cost import FREE, CostModel, NodeCost
from zgraph.analysis.hardware import Hardware, Link
from zgraph.graph import meta, nodes
from zgraph.tiers.lanes import COMPUTE, Lane

aten = torch.ops.aten


def costs_of(graph: fx.Graph, hardware: Hardware) -> dict[fx.Node, NodeCost]:
    model = CostModel(hardware)
    return {node: model.cost(node) for node in graph.nodes}


# Two ranks per host; 100 bytes/us and 1 us within a host, 10 bytes/us and 5 us between hosts.
TWO_PER_HOST = Hardware(
    name="two per host",
    flops_per_us={torch.float32: 1000.0, torch.bfloat16: 4000.0},
    memory_bytes_per_us=50.0,
    launch_us=2.0,
    memory_bytes=1 << 20,
    intra_host=Link(latency_us=1.0, bytes_per_us=100.0),
    inter_host=Link(latency_us=5.0, bytes_per_us=10.0),
    ranks_per_host=2,
    host_to_device=Link(latency_us=3.0, bytes_per_us=20.0),
    device_to_host=Link(latency_us=4.0, bytes_per_us=25.0),
    disk=Link(latency_us=7.0, bytes_per_us=5.0),
)


def cost_of(node: fx.Node) -> NodeCost:
    """5 us a collective, 7 us a matmul, 1 us a sum over ranks, nothing else."""
    if nodes.is_start(node):
        return NodeCost(Lane.of_group("0"), 5.0)
    if node.target in (aten.mm.default, aten.addmm.default):
        return NodeCost(COMPUTE, 7.0)
    return NodeCost(COMPUTE, 1.0) if nodes.is_sum_ranks(node) else FREE


def cost_by_size(node: fx.Node) -> NodeCost:
    """Every element that a node reads or yields takes some time: of own rows not the same on all ranks."""
    values = [meta.value(one) for one in (node, *node.all_input_nodes)]
    numel = sum(math.prod(value.shape) for value in values if isinstance(value, torch.Tensor))
    if nodes.is_start(node):
        return NodeCost(Lane.of_group("0"), 1.0 + 0.3 * numel)
    if nodes.is_wait(node) or node.target in (aten.view.default, aten.t.default, aten.slice.Tensor):
        return FREE
    return NodeCost(COMPUTE, 0.1 + 0.2 * numel)
