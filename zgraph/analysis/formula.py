"""What a graph costs as formulas: in the number of ranks, and in the graph's own symbolic sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx

from zgraph.analysis.cost import DATA_DEPENDENT_SIZE, CostModel, Totals, group_stride, size_hint, tensors_of
from zgraph.analysis.hardware import Hardware
from zgraph.graph import meta, nodes
from zgraph.graph.traffic import transfers_of
from zgraph.runtime.groups import group_size, reduction_group
from zgraph.torch_compat.fake_values import size_expression


@dataclass(frozen=True)
class Formula:
    """`Totals` as expressions: what the same plan costs on other numbers of ranks, and for other batches.

    Symbols are "N", the ranks of a group of neighbours; "N8", those of a group whose members are 8 ranks apart; and the
    graph's own symbolic sizes. The number of collectives is that of the graph at hand. Bytes of collectives count the
    padding on every number of ranks; times of copies do where the graph at hand has the copies.
    The parts are those of rank 0, whose shards are never shorter than another's.

    Attributes:
        sent_bytes, lane_us: see `Totals`.
        sizes: present values of the symbols, by name.
    """

    sent_bytes: sympy.Expr
    lane_us: Mapping[str, sympy.Expr]
    sizes: Mapping[str, int]

    def at(self, **sizes: int) -> Totals:
        """The totals for these values; symbols that are not named keep the present ones.

        Raises:
            ValueError: a name is none of the symbols, or a value is no positive number.
        """
        for name, value in sizes.items():
            if name != "N" and name not in self.sizes:  # a graph without collectives costs the same on any number
                known = ", ".join(self.sizes) or "none"
                raise ValueError(f"zgraph.analysis.cost: the formula has no symbol {name!r}; its symbols are: {known}.")
            if value < 1:
                raise ValueError(f"zgraph.analysis.cost: {name}={value}; write a positive number.")
        values = {**self.sizes, **sizes}

        def evaluate(expression: sympy.Expr) -> Any:
            return expression.subs({symbol: values[str(symbol)] for symbol in expression.free_symbols})

        return Totals(int(evaluate(self.sent_bytes)), {lane: float(evaluate(us)) for lane, us in self.lane_us.items()})

    def __str__(self) -> str:
        """Bytes and link times without padding, which hides the structure; `at` counts it."""
        lines = [f"sent bytes: {_without_padding(self.sent_bytes)}"]
        lines += [f"{lane} us: {_without_padding(us)}" for lane, us in self.lane_us.items()]
        return "\n".join(lines)


def formula(graph: fx.Graph, hardware: Hardware) -> Formula:
    """What a graph costs, as expressions; at the present sizes they equal `costs_of`."""
    symbols = Symbols.of(graph)
    exact = CostModel(hardware)
    symbolic = CostModel(hardware, symbols)
    sent = Counter[Any]()
    constant = dict[str, float]()
    counted = Counter[tuple[str, Any]]()
    for node in graph.nodes:
        cost = symbolic.cost(node) if symbols.concern(node) else exact.cost(node)
        if cost.lane.startswith("group:"):
            sent[cost.moved_bytes] += 1
        us = cast(Any, cost.us)
        if isinstance(us, sympy.Expr):
            counted[cost.lane, us] += 1
        elif cost.lane:
            constant[cost.lane] = constant.get(cost.lane, 0.0) + us
    terms = {lane: [sympy.Float(us)] for lane, us in constant.items()}
    for (lane, us), count in counted.items():
        terms.setdefault(lane, []).append(count * us)
    lane_us = {lane: sympy.Add(*found) for lane, found in terms.items()}
    sent_bytes = sympy.Add(*(count * moved for moved, count in sent.items()))
    free = {str(symbol) for expression in (sent_bytes, *lane_us.values()) for symbol in expression.free_symbols}
    return Formula(sent_bytes, lane_us, {name: symbols.sizes.get(name, DATA_DEPENDENT_SIZE) for name in sorted(free)})


def _without_padding(expression: sympy.Expr) -> Any:
    smooth: Any = expression.replace(sympy.floor, lambda inner: inner).replace(sympy.ceiling, lambda inner: inner)
    return smooth.expand()


@dataclass(frozen=True)
class Symbols:
    """Which sizes of a graph are symbols.

    Attributes:
        groups: symbol of a group's size, by its name.
        sizes: present value of each symbol, by its name.
        scale: of nodes whose result grows or shrinks with a group: by how much, 1 at present.
        world_of: symbol behind the number of ranks that a node sums over.
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
            if nodes.is_start(node):
                found.add_group(nodes.group_of(node))
                found.add_start(node)
            elif nodes.is_marker(node):
                replicas, group_name = cast("tuple[str, str]", node.args[-2:])
                for each in (replicas, group_name, reduction_group(group_name)):
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
        """Follow what a collective carries into the copies before and behind it."""
        symbol = self.groups.get(nodes.group_of(start))
        if (
            symbol is None or not meta.parameters(start) or nodes.is_all_reduce(start)
        ):  # all of it on any number of ranks
            return
        now = next(transfers_of(start)).payload_bytes
        whole = shard = next(transfers_of(start, self.size_of)).payload_bytes / sympy.Integer(now)
        world = group_size(nodes.group_of(start))
        if nodes.is_gather(start):
            whole = shard * symbol / world
            copies = nodes.copy_in(start) or []
            for node in [*copies, *(source for copy in copies for source in copy.all_input_nodes)]:
                self.scale.setdefault(node, shard)
            for node in nodes.sent_by(start):
                self.scale.setdefault(node, shard)
            for wait in nodes.waits_of(start):
                self.scale.update(dict.fromkeys((wait, *nodes.results_of(wait)), whole))
            return
        shard = whole * world / symbol
        wait = nodes.wait_of(start)
        if wait is None:
            return
        if nodes.is_reduce_scatter(start):
            self._follow(wait, shard)
        else:
            self.scale[wait] = whole
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
        if nodes.is_start(node) or nodes.is_marker(node):
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
