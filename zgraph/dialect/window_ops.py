"""Operators for accumulation windows: keep gathered parameters, and accumulate unreduced gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.runtime.exchanges.collectives import start_all_gather
from zgraph.runtime.exchanges.identity import about
from zgraph.runtime.exchanges.watch import announcing
from zgraph.runtime.window_state import OPEN, state_behind


@torch.library.custom_op("zgraph::all_gather_kept", mutates_args=())
def all_gather_kept(chunk: Tensor, handle: Tensor, world: int, window: str, group_name: str) -> Tensor:
    """Start gathering a parameter, or return the copy that was gathered earlier in this window.

    Args:
        chunk: [n, ...] this rank's padded rows.
        handle: handle of the parameter; its state keeps the copy.
        world: number of ranks.
        window: "open" keeps the copy for later forwards, "closing" is the last use.
        group_name: name of the process group.

    Returns:
        [world * n, ...], usable after a wait; all forwards of the window share this memory.
    """
    state = state_behind(handle)
    unsharded = state.gathered(chunk.dtype)
    if unsharded is None:
        unsharded = start_all_gather(chunk, world, group_name, about=about("all_gather", handle))
    if window == OPEN:
        state.keep(unsharded)
    else:
        state.release()
    return unsharded.view(unsharded.shape)  # a new tensor: autograd modifies the tensor that an operator returns


@all_gather_kept.register_fake
def _(chunk: Tensor, handle: Tensor, world: int, window: str, group_name: str) -> Tensor:
    return chunk.new_empty((world * chunk.shape[0], *chunk.shape[1:]))


@torch.library.custom_op("zgraph::accumulate_grad", mutates_args=())
def accumulate_grad(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int, rows: int) -> Tensor:
    """Keep an unsharded gradient until the window's closing backward.

    Args:
        grad: [*shape], gradient of this rank only.
        handle: handle of the parameter; at stage 1 its state keeps the sum of gradients.
        dtype: dtype of the sum: the parameter's dtype.
        zero_stage: 0 or 1.
        rows: number of rows of this rank's shard; 0 at stage 0.

    Returns:
        Tensor that autograd adds to `.grad`: a copy of `grad` at stage 0, zeros [rows, ...] at stage 1.
    """
    with announcing([handle]):
        return state_behind(handle).add(grad, dtype, zero_stage)


@accumulate_grad.register_fake
def _(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int, rows: int) -> Tensor:
    return grad.new_empty(grad.shape if zero_stage == 0 else (rows, *grad.shape[1:]), dtype=dtype)


@torch.library.custom_op("zgraph::add_accumulated", mutates_args=())
def add_accumulated(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
    """Return the sum of a window's last gradient and all waiting gradients: [*shape] in `dtype`."""
    with announcing([handle]):
        return state_behind(handle).take(grad, dtype, zero_stage)


@add_accumulated.register_fake
def _(grad: Tensor, handle: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


@torch.library.custom_op("zgraph::wait_in_grad", mutates_args=())
def wait_in_grad(handles: Sequence[Tensor]) -> None:
    """Prepare `.grad` of parameters at stage 0 to accumulate gradients until the closing backward.

    A graph calls this before autograd adds the graph's gradients to `.grad`. (For a single gradient that has to be
    copied, `accumulate_grad` also prepares `.grad`.)
    """
    with announcing(handles):
        for handle in handles:
            state_behind(handle).wait_in_grad()


@wait_in_grad.register_fake
def _(handles: Sequence[Tensor]) -> None:
    return None
