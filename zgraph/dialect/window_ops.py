"""The operators of accumulation windows: parameters stay gathered, gradients wait to be reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.runtime.collectives import start_all_gather
from zgraph.runtime.window_state import ALONE, OPEN, state_behind


def keeps_gathered(zero_stage: int, window: str) -> bool:
    """Whether gathered parameters outlive the call, for the other forwards of the window."""
    return zero_stage in (1, 2) and window != ALONE


def gradients_wait(zero_stage: int, window: str) -> bool:
    """Whether gradients are summed on each rank until the closing backward."""
    return zero_stage in (0, 1) and window != ALONE


@torch.library.custom_op("zgraph::all_gather_kept", mutates_args=())
def all_gather_kept(chunk: Tensor, handle: Tensor, world: int, window: str, group_name: str) -> Tensor:
    """Start gathering a parameter, unless the window has gathered it already; needs a wait like any start.

    Args:
        chunk: [n, ...] this rank's padded rows.
        handle: of the parameter, whose state keeps the result.
        world: number of ranks N.
        window: "open" leaves the result with the state, "closing" takes it away.
        group_name: of the group.

    Returns:
        [N * n, ...], shared by all forwards of the window.
    """
    kept = state_behind(handle).kept
    whole = kept.get(chunk.dtype)
    if whole is None:
        whole = start_all_gather(chunk, world, group_name)
    if window == OPEN:
        kept[chunk.dtype] = whole
    else:
        kept.clear()
    return whole.view(whole.shape)  # a tensor of its own: autograd writes on what an operator returns


@all_gather_kept.register_fake
def _(chunk: Tensor, handle: Tensor, world: int, window: str, group_name: str) -> Tensor:
    return chunk.new_empty((world * chunk.shape[0], *chunk.shape[1:]))


@torch.library.custom_op("zgraph::accumulate_grad", mutates_args=())
def accumulate_grad(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int, rows: int) -> Tensor:
    """Let a whole gradient wait for the closing backward.

    Args:
        grad: [*shape] of this rank alone.
        handle: of the parameter, whose state keeps the sum.
        dtype: of the sum, the parameter's own.
        zero_stage: 0 or 1.
        rows: of this rank's shard.

    Returns:
        What goes into `.grad` meanwhile: `grad` itself at stage 0, zeros [rows, ...] at stage 1.
    """
    return state_behind(handle).add(grad, dtype, zero_stage)


@accumulate_grad.register_fake
def _(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int, rows: int) -> Tensor:
    return grad.new_empty(grad.shape if zero_stage == 0 else (rows, *grad.shape[1:]), dtype=dtype)


@torch.library.custom_op("zgraph::add_accumulated", mutates_args=())
def add_accumulated(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
    """The last gradient of a window and all that have waited, summed: [*shape] in `dtype`."""
    return state_behind(handle).take(grad, dtype, zero_stage)


@add_accumulated.register_fake
def _(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)
