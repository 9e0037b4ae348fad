"""Compile until the final graphs fit the budget: what passes plan for is tightened by what they were wrong by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zgraph.analysis.liveness import MemoryCurve
from zgraph.graph import meta, nodes
from zgraph.runtime.chunks import payload_bytes
from zgraph.runtime.groups import group_size

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


def smallest_feasible(peak_of: Callable[[int], int], known: dict[int, int]) -> int:
    """A budget that `fit` keeps, and so small that it does not keep one of a byte less, as far as was searched.

    Args:
        peak_of: as for `fit`.
        known: what it has returned so far, by argument; more is added.
    """

    def remembered(target: int) -> int:
        if target not in known:
            known[target] = peak_of(target)
        return known[target]

    least = remembered(LEAST)
    for _ in range(SEARCHES):
        target = fit(remembered, least - 1)
        if target is None:
            break
        peak = remembered(target)
        least = peak if fit(remembered, peak) is not None else least - 1
    return least


def agreed_peak(curve: MemoryCurve) -> int:
    """The peak as all ranks count it, the highest of any.

    Ranks hold different numbers of a parameter's rows, and pad them or not on their way into a gather.
    """
    during = list(curve.bytes_during)
    place_of = {node: place for place, node in enumerate(curve.nodes)}
    ranges = {entry.node: entry for entry in curve.ranges if not entry.held}
    for start in curve.nodes:
        copies = nodes.copy_in(start) if nodes.is_gather(start) else None
        wait = nodes.wait_of(start)
        if (
            copies is None
            or wait is None
            or nodes.is_quantized_gather(start)  # which reads the rows where they are
            or all(_is_even(chunk.rows, chunk.group_names) for chunk in meta.chunks(start))
        ):
            continue
        packed = next((node for node in copies if node.target is torch.ops.aten.cat.default), None)
        for node in copies:
            if node in ranges and not nodes.is_packing(node):
                for place in range(ranges[node].first, ranges[node].last + 1):
                    during[place] -= ranges[node].bytes
        if packed is not None:
            first = last = place_of[packed]
        else:
            first, last = place_of[start], max(map(place_of.__getitem__, nodes.waits_of(start)))
        sent = [node for node in nodes.sent_by(start) if node is packed or not nodes.is_packing(node)]
        chunk_bytes = sum(payload_bytes(chunk.shape, chunk.dtype) for chunk in map(meta.tensor_value, sent))
        for place in range(first, last + 1):
            during[place] += chunk_bytes
    return max(during, default=0)


def _is_even(rows: int, group_names: tuple[str, ...]) -> bool:
    return rows % group_size(group_names[0]) == 0


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
