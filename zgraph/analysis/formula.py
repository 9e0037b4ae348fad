"""Costs of a graph as formulas in the number of ranks and in the graph's own symbolic sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import sympy
from torch import fx

from zgraph.analysis.cost import CostModel, Totals
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.symbols import Symbols
from zgraph.graph.lanes import Lane
from zgraph.graph.sizes import DATA_DEPENDENT_SIZE


@dataclass(frozen=True)
class Formula:
    """`Totals` as expressions: the cost of the same plan on other numbers of ranks, and for other batches.

    Symbols are "N", the size of a group of neighbouring ranks; "N8", the size of a group whose members are 8 ranks
    apart; and the graph's own symbolic sizes. The number of collectives is that of the present graph. Bytes of
    collectives include padding for any number of ranks; times of copies include only copies in the present graph.
    Shards are those of rank 0, which are never shorter than another's.

    Attributes:
        sent_bytes, lane_us: see `Totals`.
        sizes: present values of the symbols, by name.
    """

    sent_bytes: sympy.Expr
    lane_us: Mapping[Lane, sympy.Expr]
    sizes: Mapping[str, int]

    def at(self, **sizes: int) -> Totals:
        """The totals for the given values; other symbols keep their present values.

        Raises:
            ValueError: a name is not a symbol of the formula, or a value is not a positive number.
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
        """Bytes and link times, without padding, which would obscure the structure; `at` includes it."""
        lines = [f"sent bytes: {_without_padding(self.sent_bytes)}"]
        lines += [f"{lane} us: {_without_padding(us)}" for lane, us in self.lane_us.items()]
        return "\n".join(lines)


def formula(graph: fx.Graph, hardware: Hardware) -> Formula:
    """Cost of a graph as expressions; at the present sizes they equal `costs_of`."""
    symbols = Symbols.of(graph)
    exact = CostModel(hardware)
    symbolic = CostModel(hardware, symbols)
    sent = Counter[Any]()
    constant = dict[Lane, float]()
    counted = Counter[tuple[Lane, Any]]()
    for node in graph.nodes:
        cost = symbolic.cost(node) if symbols.concern(node) else exact.cost(node)
        if cost.lane is None:
            continue
        if cost.lane.is_group:
            sent[cost.moved_bytes] += 1
        us = cast(Any, cost.us)
        if isinstance(us, sympy.Expr):
            counted[cost.lane, us] += 1
        else:
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
