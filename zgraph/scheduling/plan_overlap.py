"""The order of a graph that takes least time within limits, never worse than the one by rules."""

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
    """The order to run a graph in, and how it, the one before and the one by rules score."""

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
    """The best order found, or the one given where none is better.

    Args:
        order, costs, sharing, storages: of the graph as it is.
        limits: of what the order may hold. It may have in flight what `by_rules` has there.
        by_rules: an order that the plan must not be worse than; None: the one given.
        search: that knows the schedules of problems it has met; None: a new one.
    """
    base = order if by_rules is None else by_rules  # which may sink waits of the model's own collectives
    problem = problem_of(base, costs, sharing, storages, limits)
    present = scheduled(problem, order)
    known = present if by_rules is None else scheduled(problem, by_rules)
    search = search or Search()
    found = search.schedules(problem)
    least = min(schedule.peak_bytes for schedule in (*found, known))
    if limits.budget_bytes is not None and least > limits.budget_bytes:
        # Some moment needs more than the budget; all others may use as much.
        found += search.schedules(replace(problem, limits=replace(limits, budget_bytes=least)))
    allowed = replace(limits, in_flight_bytes=max(limits.in_flight_bytes, known.most_in_flight))
    best = choose([present, *found, known], known, allowed)
    return Plan(
        order=list(order) if best is present else best.nodes(),
        before=present.score(allowed),
        after=best.score(allowed),
        by_rules=None if by_rules is None else known.score(allowed),
    )
