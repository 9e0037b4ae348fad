"""Rank-local numbers by which a captured step changes weights, such as `p.grad.div_(mask.sum())`.

Without a graph, ranks compare such a number when an optimizer steps. In a graph the number is known only when the step
runs. The graph therefore returns the number, too, and the ranks compare it when the step ends.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from zgraph.graph import dataflow, meta, nodes
from zgraph.torch_compat.operators import OpOverload, is_tagged_random, written_arguments

aten = torch.ops.aten


def return_own_numbers(
    graph: fx.Graph, of_rank: Collection[fx.Node], kept: Collection[fx.Node], left: Collection[fx.Node]
) -> int:
    """Add to a graph's outputs all numbers that change shards and may differ between ranks.

    Args:
        graph: captured graph with markers; results of markers and of collectives are equal on all ranks.
        of_rank: inputs that differ between ranks, such as the batch.
        kept: inputs that are shards: parameters and the optimizer's state.
        left: outputs that are shards: gradients and new state.

    Returns:
        Number of added outputs. Numbers on other devices than the CPU are not added: reading them waits for the device.
    """
    shards, own = set(kept), set(of_rank)
    numbers: dict[fx.Node, None] = {}
    needed = dataflow.needed_for([*kept, *left], graph)
    for node in graph.nodes:
        inputs = [*node.all_input_nodes, *map(dataflow.below_views, node.all_input_nodes)]
        if isinstance(node.target, OpOverload) and is_tagged_random(node.target):
            own.add(node)  # even of shards: numbers common to all ranks are exchanged next
            continue
        if node.op == "placeholder" or not inputs:
            continue
        written = [dataflow.below_views(one) for one in written_arguments(node)]
        if nodes.is_reduce_grad(node):
            shards.add(node)
        elif nodes.is_marker(node) or nodes.is_collective(node) or nodes.is_wait(node):
            continue
        elif not shards.isdisjoint(inputs):
            shards.update((node, *written))
            if node in needed:
                numbers |= dict.fromkeys(one for one in node.all_input_nodes if one in own and _is_number(one))
        elif not own.isdisjoint(inputs):
            own.update((node, *written))
    (output,) = graph.find_nodes(op="output")
    copies: list[fx.Node] = []
    for number in numbers:
        with graph.inserting_after(number):  # later writes to the number do not matter
            copies.append(meta.create(graph, aten.clone.default, (number,), like=number))
    if copies:
        output.args = ((*output.args[0], *copies),)
    return len(copies)


def _is_number(node: fx.Node) -> bool:
    value = meta.value(node)
    return isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu"
