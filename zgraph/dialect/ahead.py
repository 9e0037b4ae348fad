"""Operators for parameters that a training step has gathered for the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.runtime.exchanges.collectives import start_all_gather
from zgraph.runtime.window_state import state_behind
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.groups import resolve_group


@torch.library.custom_op("zgraph::agree_ahead", mutates_args=())
def agree_ahead(sent: Sequence[Tensor], handles: Sequence[Tensor], group_name: str) -> Tensor:
    """Find out whether what was gathered ahead is, bit by bit, what a gather would yield now.

    Each rank compares its own part with what it would send; together that is all of it. So it does not matter who may
    have written to a parameter since, on which rank, and whether anybody could have seen it.

    Args:
        sent: [n, ...] what this rank would send of each bucket.
        handles: handle of the first parameter of each, whose state holds what was gathered.
        group_name: name of the group that gathers.

    Returns:
        [] uint8: 1 if all buckets are good on all ranks; else 0, and nothing is held any more.
    """
    group = resolve_group(group_name)
    rank = dist.get_rank(group)
    good = all(
        _holds(state_behind(handle).ahead, chunk, rank, group.size())
        for chunk, handle in zip(sent, handles, strict=True)
    )
    agreed = torch.full((), int(good), dtype=torch.uint8, device=sent[0].device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    if not agreed:
        for handle in handles:
            state_behind(handle).ahead = None
    return agreed


@agree_ahead.register_fake
def _(sent: Sequence[Tensor], handles: Sequence[Tensor], group_name: str) -> Tensor:
    return sent[0].new_empty((), dtype=torch.uint8)


@torch.library.custom_op("zgraph::take_ahead", mutates_args=())
def take_ahead(sent: Tensor, agreed: Tensor, handle: Tensor, world: int, group_name: str) -> Tensor:
    """Take what was gathered ahead; if the ranks have not agreed on it, gather now.

    Args:
        sent: [n, ...] as for `agree_ahead`.
        agreed: what that has returned, which orders the two.
        handle: handle of the bucket's first parameter.
        world: number of ranks N.
        group_name: name of the group that gathers.

    Returns:
        [N * n, ...], not held any more.
    """
    state = state_behind(handle)
    unsharded, state.ahead = state.ahead, None
    if unsharded is None:
        unsharded = wait(start_all_gather(sent, world, group_name))
    return unsharded.view(unsharded.shape)  # a new tensor: autograd writes to what an operator returns


@take_ahead.register_fake
def _(sent: Tensor, agreed: Tensor, handle: Tensor, world: int, group_name: str) -> Tensor:
    return sent.new_empty((world * sent.shape[0], *sent.shape[1:]))


@torch.library.custom_op("zgraph::keep_ahead", mutates_args=())
def keep_ahead(unsharded: Tensor, handle: Tensor) -> None:
    """Hold what was gathered ahead until the next step: [N * n, ...] of the bucket that begins with this parameter."""
    state_behind(handle).ahead = unsharded


@keep_ahead.register_fake
def _(unsharded: Tensor, handle: Tensor) -> None:
    return None


def _holds(unsharded: Tensor | None, chunk: Tensor, rank: int, world: int) -> bool:
    """Whether this rank's part is the chunk, as bits: -0.0 is another zero, and a NaN equals itself."""
    if unsharded is None or unsharded.dtype != chunk.dtype or unsharded.numel() != world * chunk.numel():
        return False
    own = unsharded.view(world, -1)[rank].contiguous()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[chunk.dtype.itemsize]
    return torch.equal(own.view(words), chunk.contiguous().view(-1).view(words))
