"""What runs in place of the functional collectives of a graph: which of `zgraph.collectives` starts each."""

from __future__ import annotations

from typing import Any

from torch import fx

from zgraph import collectives, meta, nodes
from zgraph.torch_compat import resolve_group


def starter_of(start: fx.Node, ranks_per_node: int = 1) -> tuple[Any, tuple[Any, ...]]:
    """A function, or the operator itself where the backend is to run it, and its arguments.

    Args:
        start: of a collective.
        ranks_per_node: of the machine, the same on all ranks.
    """
    if nodes.is_all_gather(start):
        if ranks_per_node > 1 and _by_node(start, ranks_per_node):
            return collectives.start_gather_by_node, (*start.args, ranks_per_node)
        return collectives.start_all_gather, start.args
    if nodes.is_grouped_gather(start):
        return collectives.start_grouped_gather, start.args
    return collectives.start_all_to_all if nodes.is_all_to_all(start) else start.target, start.args


def _by_node(start: fx.Node, ranks_per_node: int) -> bool:
    group, device = resolve_group(nodes.group_of(start)), meta.tensor_value(start).device
    return collectives.uses_messages(group, device) and collectives.goes_by_node(group, ranks_per_node)
