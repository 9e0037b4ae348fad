"""Which gathered parameters of stage 3 a stage of a pipeline keeps from a step's first forward to its last backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zgraph.sharding.scope import ShardedParam, scope_behind


def may_be_kept(params: Iterable[ShardedParam]) -> list[ShardedParam]:
    """Those at stage 3, in their order: stages 1 and 2 keep theirs anyway, and stage 0 gathers nothing."""
    return [param for param in params if param.spec.layout.zero_stage == 3 and not param.spec.ignored]


def gathered_bytes(param: ShardedParam) -> int:
    """Bytes of a parameter, gathered, with its padding."""
    layout = param.spec.layout
    return layout.padded_rows * math.prod(layout.shape[1:]) * param.spec.gather_dtype.itemsize


def first_fit(sizes: Sequence[int], room_bytes: float) -> list[int]:
    """Positions of what is kept: in order, each that still has room.

    More room keeps as many bytes or more, though not always the same ones.

    Args:
        sizes: of each.
        room_bytes: for all together.
    """
    kept: list[int] = []
    for place, size in enumerate(sizes):
        if size <= room_bytes:
            kept.append(place)
            room_bytes -= size
    return kept


def keep_gathered(params: Iterable[ShardedParam], most_bytes: float) -> None:
    """Choose what stays gathered over a step, before anything is compiled; the same on all ranks that share it.

    Args:
        params: of one stage, in the module's order.
        most_bytes: for all together; each in turn is kept if there is room for it.
    """
    there = may_be_kept(params)
    kept = set(first_fit([gathered_bytes(param) for param in there], most_bytes))
    for place, param in enumerate(there):
        param.stays_gathered = place in kept
        if param.stays_gathered:
            scope = scope_behind(param.handle)
            assert scope is not None
            scope.has_windows = True
