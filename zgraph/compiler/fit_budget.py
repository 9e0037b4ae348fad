"""Search for plans that fit a memory budget: each try lowers the passes' target by the excess of the last try."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import fx

from zgraph.analysis.liveness import MemoryCurve
from zgraph.compiler.frame_plan import FramePlan
from zgraph.errors import BudgetError
from zgraph.graph import meta
from zgraph.torch_compat.dynamo import raise_through_dynamo

TRIES = 4  # tries before the most frugal plan
STEP = 32  # from the second try on, a target is lowered by at least 1 / STEP of the budget
SEARCHES = 4  # maximum number of searches for a smaller feasible budget, which an error then names
LEAST = 1  # bytes to plan for in order to hold as little as possible


def plan_within_budget(plan_for: Callable[[int], FramePlan], budget_bytes: int, frame: str) -> FramePlan:
    """Plan the frame for fewer and fewer bytes, and return the first plan that stays within the budget.

    Args:
        plan_for: plans the frame for the given bytes. Equal bytes give equal plans.
        budget_bytes: bytes that must not be exceeded.
        frame: Dynamo's name of the frame, for the error.

    Raises:
        BudgetError: no plan fits; names a budget that suffices.
    """
    plans: dict[int, FramePlan] = {}  # by peak bytes

    @cache
    def peak_of(plan_bytes: int) -> int:
        plan = plan_for(plan_bytes)
        plans[plan.peak_bytes] = plan
        return plan.peak_bytes

    plan_bytes = fit(peak_of, budget_bytes)
    if plan_bytes is not None:
        return plans[peak_of(plan_bytes)]
    least = smallest_feasible(peak_of)
    where = explain(plans[max((peak for peak in plans if peak <= least), default=min(plans))].curve)
    raise_through_dynamo(
        f"zgraph: the step of frame {frame} does not fit into budget_bytes={budget_bytes}. The smallest budget that it "
        f"was found to fit into is {least} bytes, which are there {where}. Raise budget_bytes to it; or use smaller "
        "buckets (bucket_bytes), a smaller batch, zero_stage=3 or more ranks.",
        BudgetError,
    )


def fit(peak_of: Callable[[int], int], budget_bytes: int) -> int | None:
    """Return a target in bytes with which the final graphs stay within the budget; None if no target is found.

    The last call of `peak_of` is made with the returned target.

    Args:
        peak_of: returns the peak of the final graphs if passes plan for a target; equal targets give equal peaks.
        budget_bytes: bytes that must not be exceeded.
    """
    target = budget_bytes
    for number in range(TRIES):
        peak = peak_of(target)
        if peak <= budget_bytes:
            return target
        # A slight excess may persist for all nearby targets, because plans change in steps.
        target -= max(peak - budget_bytes, budget_bytes // STEP if number else 0)
        if target <= LEAST:
            break
    return LEAST if peak_of(LEAST) <= budget_bytes else None


def smallest_feasible(peak_of: Callable[[int], int]) -> int:
    """Search for a budget for which `fit` succeeds; return the smallest found in at most `SEARCHES` searches.

    Args:
        peak_of: as for `fit`.
    """
    peak_of = cache(peak_of)
    least = peak_of(LEAST)
    for _ in range(SEARCHES):
        target = fit(peak_of, least - 1)
        if target is None:
            break
        peak = peak_of(target)
        least = peak if fit(peak_of, peak) is not None else least - 1
    return least


def explain(curve: MemoryCurve) -> str:
    """Describe a curve's peak: the node at which it occurs, and the five largest allocations alive there."""
    if not curve.nodes:
        return "nothing is allocated"
    alive = [
        f"{entry.node.name}{_works_for(entry.node)} {entry.bytes}" for entry in curve.alive_at(curve.peak_position)[:5]
    ]
    return f"at {curve.nodes[curve.peak_position].name}: {', '.join(alive)}"


def _works_for(node: fx.Node) -> str:
    names = meta.parameters(node)
    return f" ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else ""
