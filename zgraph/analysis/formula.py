"""What a graph costs as formulas: in the number of ranks, and in the graph's own symbolic sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import sympy
from torch import fx

from zgraph.analysis.cost import CostModel, Totals
from zgraph.analysis.hardware import Hardware
from zgraph.analysis.sizes import DATA_DEPENDENT_SIZE
from zgraph.analysis.symbols import Symbols


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
