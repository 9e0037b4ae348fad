"""Choose the ZeRO-3 parameters that a pipeline stage keeps gathered during a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zgraph.sharding.scope import ShardedParam, scope_behind


def may_be_kept(params: Iterable[ShardedParam]) -> list[ShardedParam]:
    """Return the parameters at ZeRO stage 3, in the given order."""
    return [param for param in params if param.spec.layout.zero_stage == 3 and not param.spec.ignored]


def gathered_bytes(param: ShardedParam) -> int:
    """Return the size of a gathered parameter in bytes, including padding."""
    layout = param.spec.layout
    return layout.padded_rows * math.prod(layout.shape[1:]) * param.spec.gather_dtype.itemsize


def first_fit(sizes: Sequence[int], room_bytes: float) -> list[int]:
    """Return the indices of the parameters to keep: in the given order, each parameter that still fits.

    More room never keeps fewer bytes, but it may keep other parameters.

    Args:
        sizes: bytes of each parameter.
        room_bytes: bytes available for all kept parameters.
    """
    kept: list[int] = []
    for place, size in enumerate(sizes):
        if size <= room_bytes:
            kept.append(place)
            room_bytes -= size
    return kept


def keep_gathered(params: Iterable[ShardedParam], most_bytes: float) -> None:
    """Choose, before compilation, the parameters that stay gathered during a step; ranks with equal `params` agree.

    Args:
        params: parameters of one stage, in the module's order.
        most_bytes: limit for the total of the kept parameters; each in turn is kept if it still fits.
    """
    there = may_be_kept(params)
    kept = set(first_fit([gathered_bytes(param) for param in there], most_bytes))
    for place, param in enumerate(there):
        param.stays_gathered = place in kept
        if param.stays_gathered:
            scope = scope_behind(param.handle)
            assert scope is not None
            scope.has_windows = True
