"""Chooses, for each collective of a graph, the function in `zgraph.runtime.exchanges` that runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.graph import meta, nodes
from zgraph.runtime.exchanges import collectives
from zgraph.runtime.exchanges.identity import About, CalledFor
from zgraph.torch_compat.groups import resolve_group


def dispatcher_of(start: fx.Node, number: int, ranks_per_host: int = 1, called_for: CalledFor | None = None) -> Any:
    """Return the function that starts a node's collective; it takes the node's arguments.

    If no function in `zgraph.runtime.exchanges` replaces the node's operator, the operator itself is returned.

    Args:
        start: node that starts the collective.
        number: number of this node among the collectives of its graph.
        ranks_per_host: number of ranks on each host.
        called_for: provides the identity of each exchange in the current call; None: exchanges have no identity.
    """
    about = None if called_for is None else _about(start, called_for)
    if nodes.is_all_gather(start):
        if _is_hierarchical(start, ranks_per_host):
            return _dispatch_hierarchical_gather(number, ranks_per_host)
        return collectives.bind(collectives.start_all_gather, number, about=about)
    if nodes.is_grouped_gather(start):
        return collectives.bind(collectives.start_grouped_gather, number, about=about)
    if nodes.is_all_to_all(start):
        return collectives.bind(collectives.start_all_to_all, number, about=about)
    if meta.handles(start) and nodes.is_all_reduce(start):
        return collectives.bind(collectives.start_all_reduce, number, sends_bucket(start), about=about)
    if meta.handles(start) and nodes.is_reduce_scatter(start):
        return collectives.bind(collectives.start_reduce_scatter, number, about=about)
    return start.target


def sends_bucket(start: fx.Node) -> bool:
    """Return whether a collective's input is a concatenation of tensors that no other node reads."""
    sent = start.all_input_nodes[0]
    return sent.target is torch.ops.aten.cat.default and list(sent.users) == [start]


def _about(start: fx.Node, called_for: CalledFor) -> Callable[[], About | None]:
    kind = "all_gather" if nodes.is_gather(start) else "reduction"
    return partial(called_for.about, kind, meta.handles(start))


def _dispatch_hierarchical_gather(number: int, ranks_per_host: int) -> Callable[[Tensor, int, str], Tensor]:
    start = collectives.start_hierarchical_gather

    def start_hierarchical_gather(shard: Tensor, world: int, group_name: str) -> Tensor:
        return start(shard, world, group_name, number, ranks_per_host)

    return start_hierarchical_gather


def order_of_waits(graph: fx.Graph, ranks_per_host: int = 1) -> list[str]:
    """Describe the positions of all waits for hierarchical gathers, one line each; lines must be equal on all ranks.

    A hierarchical gather ends only when all ranks of a host wait for it. So two ranks deadlock if the first starts
    another collective after it has waited for the gather, and the second waits for that collective before the gather.
    """
    found: list[str] = []
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if nodes.is_collective(node):
            numbers[node] = len(numbers)
        elif (
            nodes.is_wait(node)
            and (start := nodes.start_of(node)) in numbers
            and _is_hierarchical(start, ranks_per_host)
        ):
            found.append(
                f"gather {numbers[start]} by hosts of {ranks_per_host} ranks is waited for after {len(numbers)} starts"
            )
    return found


def _is_hierarchical(start: fx.Node, ranks_per_host: int) -> bool:
    if ranks_per_host == 1 or not nodes.is_all_gather(start):
        return False
    group, device = resolve_group(nodes.group_of(start)), meta.tensor_value(start).device
    return collectives.uses_point_to_point(group, device) and collectives.is_hierarchical(group, ranks_per_host)
