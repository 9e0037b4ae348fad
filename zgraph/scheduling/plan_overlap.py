"""Find the fastest order of a graph within memory limits that is never worse than the order made by fixed rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zgraph.analysis.cost import NodeCost
from zgraph.analysis.storages import Storage
from zgraph.scheduling.builder import Score, choose, problem_of, scheduled
from zgraph.scheduling.plan_schedule import Search
from zgraph.scheduling.problem import Limits
from zgraph.scheduling.timeline import Sharing


@dataclass(frozen=True)
class Plan:
    """The planned order of a graph, with scores.

    Attributes:
        order: nodes in the planned order.
        before: score of the previous order.
        after: score of the planned order.
        by_rules: score of the order made by fixed rules; None: there is no such order.
    """

    order: list[fx.Node]
    before: Score
    after: Score
    by_rules: Score | None = None


def plan_overlap(
    order: Sequence[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    sharing: Sharing,
    storages: Sequence[Storage],
    limits: Limits,
    by_rules: Sequence[fx.Node] | None = None,
    search: Search | None = None,
) -> Plan:
    """Return the best order found; this is the present order if none is better.

    Args:
        order: nodes of the graph in their present order.
        costs: cost of each call.
        sharing: how lanes slow each other down.
        storages: storages of the graph.
        limits: memory limits of the plan. The bytes in flight of `by_rules` are always allowed.
        by_rules: an order that the plan must not be worse than; None: `order`.
        search: search that caches the schedules of earlier problems; None: a new search.
    """
    base = order if by_rules is None else by_rules  # which may sink waits of the model's own collectives
    problem = problem_of(base, costs, sharing, storages, limits)
    present = scheduled(problem, order)
    known = present if by_rules is None else scheduled(problem, by_rules)
    search = search or Search()
    found = search.schedules(problem)
    least = min(schedule.peak_bytes for schedule in (*found, known))
    if limits.budget_bytes is not None and least > limits.budget_bytes:
        # Some moment needs more than the budget; all others may use that much too.
        found += search.schedules(replace(problem, limits=replace(limits, budget_bytes=least)))
    allowed = replace(limits, in_flight_bytes=max(limits.in_flight_bytes, known.most_in_flight))
    best = choose([present, *found, known], known, allowed)
    return Plan(
        order=list(order) if best is present else best.nodes(),
        before=present.score(allowed),
        after=best.score(allowed),
        by_rules=None if by_rules is None else known.score(allowed),
    )
