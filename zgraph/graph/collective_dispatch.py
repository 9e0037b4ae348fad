"""What runs in place of the functional collectives of a graph: which of `zgraph.runtime.collectives` starts each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from zgraph.graph import meta, nodes
from zgraph.runtime import collectives
from zgraph.torch_compat.groups import resolve_group


def starter_of(start: fx.Node, number: int, ranks_per_host: int = 1) -> Any:
    """A function of the node's arguments, or the operator itself where the backend is to run it.

    Args:
        start: of a collective.
        number: among the starts of its graph.
        ranks_per_host: of the machine, the same on all ranks.
    """
    if nodes.is_all_gather(start):
        if _by_node(start, ranks_per_host):
            return _by_node_starter(number, ranks_per_host)
        return collectives.bind(collectives.start_all_gather, number)
    if nodes.is_grouped_gather(start):
        return collectives.bind(collectives.start_grouped_gather, number)
    if nodes.is_all_to_all(start):
        return collectives.bind(collectives.start_all_to_all, number)
    return start.target


def _by_node_starter(number: int, ranks_per_host: int) -> Callable[[Tensor, int, str], Tensor]:
    start = collectives.start_gather_by_host

    def start_gather_by_host(shard: Tensor, world: int, group_name: str) -> Tensor:
        return start(shard, world, group_name, number, ranks_per_host)

    return start_gather_by_host


def order_of_waits(graph: fx.Graph, ranks_per_host: int = 1) -> list[str]:
    """What all ranks have to agree on beside the order of starts: a line for each wait of a gather by node.

    Such a gather ends when its peers wait for it. A rank that waits for it before it starts an exchange, and another
    that waits for that exchange first, would wait forever.
    """
    found: list[str] = []
    numbers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if nodes.is_start(node):
            numbers[node] = len(numbers)
        elif nodes.is_wait(node) and (start := nodes.start_of(node)) in numbers and _by_node(start, ranks_per_host):
            found.append(
                f"gather {numbers[start]} by hosts of {ranks_per_host} ranks is waited for after {len(numbers)} starts"
            )
    return found


def _by_node(start: fx.Node, ranks_per_host: int) -> bool:
    if ranks_per_host == 1 or not nodes.is_all_gather(start):
        return False
    group, device = resolve_group(nodes.group_of(start)), meta.tensor_value(start).device
    return collectives.uses_messages(group, device) and collectives.goes_by_host(group, ranks_per_host)
