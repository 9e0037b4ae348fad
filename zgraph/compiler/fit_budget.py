"""Compile until the final graphs fit the budget: what passes plan for is tightened by what they were wrong by."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import fx

from zgraph.analysis.liveness import MemoryCurve
from zgraph.graph import meta

TRIES = 4  # before the most frugal plan
STEP = 32  # the part of a budget by which a target is lowered at least, from the second try on
SEARCHES = 4  # for a smaller budget than the most frugal plan needs, before an error names it
LEAST = 1  # to plan for so many bytes is to hold as little as possible


def fit(peak_of: Callable[[int], int], budget_bytes: int) -> int | None:
    """What to plan for so that no more than the budget is held; None where nothing that was tried does.

    The last call of `peak_of` is the one for what is returned.

    Args:
        peak_of: the peak of the final graphs when passes plan for so many bytes; equal for equal arguments.
        budget_bytes: to keep.
    """
    target = budget_bytes
    for number in range(TRIES):
        peak = peak_of(target)
        if peak <= budget_bytes:
            return target
        # What is a little too much may be so again for all targets nearby: plans come in steps.
        target -= max(peak - budget_bytes, budget_bytes // STEP if number else 0)
        if target <= LEAST:
            break
    return LEAST if peak_of(LEAST) <= budget_bytes else None


def smallest_feasible(peak_of: Callable[[int], int]) -> int:
    """A budget that `fit` keeps, and so small that it does not keep one of a byte less, as far as was searched.

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


def explain(curve: MemoryCurve, count: int = 5) -> str:
    """Where the peak is, and the largest of what is alive there, with the parameters it works for."""
    if not curve.nodes:
        return "nothing is allocated"
    alive = [
        f"{entry.node.name}{_works_for(entry.node)} {entry.bytes}"
        for entry in curve.alive_at(curve.peak_position)[:count]
    ]
    return f"at {curve.nodes[curve.peak_position].name}: {', '.join(alive)}"


def _works_for(node: fx.Node) -> str:
    names = meta.parameters(node)
    return f" ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})" if names else ""
