"""Finds the fastest order of a graph within memory limits, never worse than the order made by rules."""

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
    """The order in which to run a graph. Scores: of the previous order, of this order, and of the order by rules."""

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
    """Return the best order found, or the given order if none is better.

    Args:
        order, costs, sharing, storages: present state of the graph.
        limits: memory limits of the order. The bytes in flight of `by_rules` are always allowed.
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
