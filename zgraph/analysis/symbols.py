"""Symbols for the sizes in a graph: the sizes of its groups, and its own symbolic sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx

from zgraph.graph import dataflow, meta, nodes
from zgraph.graph.operator_arguments import layout_of
from zgraph.graph.sizes import size_hint, tensors_of
from zgraph.graph.traffic import transfers_of
from zgraph.runtime.groups import group_size, group_stride
from zgraph.torch_compat.fake_values import size_expression


@dataclass(frozen=True)
class Symbols:
    """Symbols for the sizes in a graph.

    Attributes:
        groups: symbol of each group's size, by group name.
        sizes: present value of each symbol, by symbol name.
        scale: factor by which the result of a node grows or shrinks with the size of a group; 1 at present.
        world_of: symbol of the number of ranks that a node sums over.
    """

    groups: dict[str, sympy.Symbol]
    sizes: dict[str, int]
    scale: dict[fx.Node, Any]
    world_of: dict[fx.Node, sympy.Symbol]

    @classmethod
    def of(cls, graph: fx.Graph) -> Symbols:
        found = cls({}, {}, {}, {})
        for node in graph.nodes:
            for value in tensors_of(node):
                for size in value.shape:
                    found.add_size(size)
            found.add_size(meta.value(node))
            if nodes.is_collective(node):
                found.add_group(nodes.group_of(node))
                found.add_start(node)
            elif nodes.is_marker(node):
                layout = layout_of(node)
                for each in (layout.replica_group, layout.gather_group, layout.reduce_group):
                    found.add_group(each)
        return found

    def add_size(self, size: object) -> None:
        expression = size_expression(size)
        if isinstance(expression, sympy.Symbol):
            self.sizes[str(expression)] = size_hint(size)

    def add_group(self, group_name: str) -> None:
        if group_name and group_name not in self.groups and group_size(group_name) > 1:
            stride = group_stride(group_name)
            name = "N" if stride == 1 else f"N{stride}"
            self.groups[group_name] = sympy.Symbol(name, positive=True, integer=True)
            self.sizes[name] = group_size(group_name)

    def size_of(self, group_name: str) -> Any:
        return self.groups.get(group_name, 1)

    def add_start(self, start: fx.Node) -> None:
        """Scale the copies before and after a collective with the size of its group."""
        symbol = self.groups.get(nodes.group_of(start))
        # An all_reduce carries everything on any number of ranks.
        if symbol is None or not meta.parameters(start) or nodes.is_all_reduce(start):
            return
        now = next(transfers_of(start)).payload_bytes
        full = shard = next(transfers_of(start, self.size_of)).payload_bytes / sympy.Integer(now)
        world = group_size(nodes.group_of(start))
        if nodes.is_gather(start):
            full = shard * symbol / world
            copies = dataflow.copy_in(start) or []
            for node in [*copies, *(source for copy in copies for source in copy.all_input_nodes)]:
                self.scale.setdefault(node, shard)
            for node in nodes.sent_by(start):
                self.scale.setdefault(node, shard)
            for wait in nodes.waits_of(start):
                self.scale.update(dict.fromkeys((wait, *nodes.results_of(wait)), full))
            return
        shard = full * world / symbol
        wait = nodes.wait_of(start)
        if wait is None:
            return
        if nodes.is_reduce_scatter(start):
            self._follow(wait, shard)
        else:
            self.scale[wait] = full
            for total in wait.users:
                if nodes.is_sum_ranks(total):
                    self.world_of[total] = symbol
                    self._follow(total, shard)

    def _follow(self, node: fx.Node, scale: Any) -> None:
        pending = [node]
        while pending:
            reached = pending.pop()
            self.scale[reached] = scale
            pending.extend(user for user in reached.users if nodes.is_communication(user) and not nodes.is_start(user))

    def concern(self, node: fx.Node) -> bool:
        """Whether the cost of a node depends on a symbol."""
        if nodes.is_collective(node) or nodes.is_marker(node):
            return True
        around = (node, *node.all_input_nodes)
        return any(
            near in self.scale
            or any(
                isinstance(size, torch.SymInt)
                for value in tensors_of(near)
                for size in cast("tuple[Any, ...]", value.shape)
            )
            for near in around
        )
