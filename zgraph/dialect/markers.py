"""The two marker operators, with eager kernels that are the reference for every pass.

`zgraph::unshard` turns a local shard into the unsharded parameter; `zgraph::reduce_grad` turns an unsharded gradient
into the averaged gradient of the local shard. Both are pure, and name neither a parameter nor a schedule: calls for
equal blocks differ only in the handle tensor. Passes replace markers in compiled graphs; markers that remain run the
kernels in this file. The result of every pass that is not lossy must equal the kernels' result bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.dialect.marker_policy import POLICY_SCHEMA, MarkerPolicy
from zgraph.dialect.sum_ranks import sum_ranks
from zgraph.dialect.window_ops import accumulate_grad, add_accumulated, all_gather_kept
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import chunk_rows, pad_rows
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.exchanges.collectives import all_gather, all_to_all
from zgraph.runtime.exchanges.identity import about
from zgraph.runtime.groups import group_size
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.autograd import second_derivatives_vanish
from zgraph.torch_compat.collectives import wait


@torch.library.custom_op(
    "zgraph::unshard",
    mutates_args=(),
    schema=f"(Tensor shard, Tensor handle, SymInt[] shape, {POLICY_SCHEMA}) -> Tensor",
)
def unshard(shard: Tensor, handle: Tensor, shape: Sequence[int], *arguments: Any) -> Tensor:
    """Gather the unsharded parameter from the ranks' shards.

    Args:
        shard: [rows, ...] this rank's rows of the parameter (all rows at stage 0).
        handle: [96] uint8, see runtime/handle.py.
        shape: shape of the unsharded parameter.
        arguments: see `MarkerPolicy`.

    Returns:
        [*shape] in the policy's dtype, never an alias of `shard`.

    Raises:
        CollectiveError: the gather failed; the message names the parameter.
    """
    policy = MarkerPolicy(*arguments)
    layout, group_name = policy.layout_of(shape), policy.group_name
    if not layout.is_gathered:
        return shard.to(policy.dtype, copy=True, memory_format=torch.contiguous_format)
    chunk = pad_rows(shard.to(policy.dtype), layout.chunk_rows)
    try:
        if layout.keeps_gathered(policy.window):
            unsharded = wait(all_gather_kept(chunk, handle, layout.world, policy.window, group_name))
        else:
            unsharded = all_gather(chunk, layout.world, group_name, about=about("all_gather", handle))
    except (torch.OutOfMemoryError, ZgraphError):
        raise
    except RuntimeError as error:
        raise collective_error("all_gather", [name_of(handle)], group_name, error) from error
    return unsharded[: shape[0]]


@unshard.register_fake
def _(shard: Tensor, handle: Tensor, shape: Sequence[int], *arguments: Any) -> Tensor:
    return shard.new_empty(shape, dtype=MarkerPolicy(*arguments).dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, handle, _, _, *others = inputs
    ctx.policy = (shard.dtype, *others)
    ctx.save_for_backward(handle)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    return reduce_grad(grad, handle, *ctx.policy), None, None, *[None] * len(ctx.policy)


unshard.register_autograd(_reduce, setup_context=_remember)


@torch.library.custom_op(
    "zgraph::reduce_grad", mutates_args=(), schema=f"(Tensor grad, Tensor handle, {POLICY_SCHEMA}) -> Tensor"
)
def reduce_grad(grad: Tensor, handle: Tensor, *arguments: Any) -> Tensor:
    """Average (or sum) a gradient over the ranks, in rank order, and return this rank's shard of the result.

    Args:
        grad: [*shape] gradient of the unsharded parameter.
        handle: [96] uint8, see runtime/handle.py.
        arguments: see `MarkerPolicy`.

    Returns:
        [rows, ...] if the parameter is sharded, [*shape] at stage 0, in the policy's dtype. Gradients are summed in
        fp32 in rank order, first over the group, then over the replicas, and divided once. If ranks then gather parts
        of the mean, each rank first rounds its part to `mean_dtype_of`, so that all ranks get equal bits. If the
        gradient waits for the end of the window, the result is that of `accumulate_grad`.

    Raises:
        CollectiveError: the exchange failed; the message names the parameter.
    """
    policy = MarkerPolicy(*arguments)
    dtype, wire_dtype, zero_stage = policy.dtype, policy.wire_dtype, policy.zero_stage
    layout = policy.layout_of(grad.shape)
    if layout.is_reduced and layout.gradients_wait(policy.window):
        if policy.window == OPEN:
            return accumulate_grad(grad, handle, dtype, zero_stage, layout.local_rows if layout.is_sharded else 0)
        grad = add_accumulated(grad, handle, dtype, zero_stage)
    group, world, divisor = layout.reduce_group, layout.world, layout.divisor(policy.reduction)
    travels = mean_dtype_of(grad.dtype, dtype, wire_dtype, policy.mean_dtype) if layout.gathers_mean else dtype
    wire = grad.to(wire_dtype_of(grad.dtype, wire_dtype)) if world > 1 else grad  # a single rank sends nothing
    pieces = _padded(wire if layout.is_sharded else wire.reshape(-1), world)
    try:
        if layout.num_replicas == 1:
            total = _exchange_and_sum(pieces, group, divisor, travels, handle)
        else:
            partial = _exchange_and_sum(pieces, group, 1, accumulate_dtype(pieces.dtype), handle)
            total = _all_reduce(partial, policy.replica_group, divisor, wire_dtype, travels, handle)
        if not layout.is_sharded:
            return _gather_pieces(total, group, grad.numel(), handle).to(dtype).view(grad.shape)
    except (torch.OutOfMemoryError, ZgraphError):
        raise
    except RuntimeError as error:
        raise collective_error("reduce_grad", [name_of(handle)], policy.group_name, error) from error
    return total[: layout.local_rows].to(dtype)


def _padded(pieces: Tensor, world: int) -> Tensor:
    """Append rows of zeros, so that the rows split into equal chunks for all ranks."""
    return pad_rows(pieces, world * chunk_rows(pieces.shape[0], world))


def _exchange_and_sum(pieces: Tensor, group_name: str, divisor: int, dtype: torch.dtype, handle: Tensor) -> Tensor:
    """Send piece r to rank r, sum the received pieces, and divide the sum: [world * n, ...] -> [n, ...]."""
    world = group_size(group_name)
    if world > 1:
        splits = [pieces.shape[0] // world] * world
        pieces = all_to_all(pieces, splits, group_name, about=about("reduction", handle))
    return sum_ranks(pieces, world, divisor, dtype)


def _gather_pieces(piece: Tensor, group_name: str, numel: int, handle: Tensor) -> Tensor:
    """Gather `piece` from every rank, and return the first `numel` elements: the rest is padding."""
    world = group_size(group_name)
    if world == 1:
        return piece[:numel]
    return all_gather(piece, world, group_name, about=about("reduction", handle))[:numel]


def _all_reduce(
    partial: Tensor,
    group_name: str,
    divisor: int,
    wire_dtype: torch.dtype | None,
    dtype: torch.dtype,
    handle: Tensor,
) -> Tensor:
    """Sum the partial sums of all replicas of this shard, in rank order, and divide once."""
    flat = partial.reshape(-1).to(wire_dtype_of(partial.dtype, wire_dtype))
    mean = _exchange_and_sum(_padded(flat, group_size(group_name)), group_name, divisor, dtype, handle)
    return _gather_pieces(mean, group_name, partial.numel(), handle).view(partial.shape)


@reduce_grad.register_fake
def _(grad: Tensor, handle: Tensor, *arguments: Any) -> Tensor:
    policy = MarkerPolicy(*arguments)
    return grad.new_empty(policy.layout_of(grad.shape).local_shape, dtype=policy.dtype)


def _refuse(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    (handle,) = ctx.saved_tensors
    raise _differentiated_twice(handle)


def _differentiated_twice(handle: Tensor) -> ZgraphError:
    return ZgraphError(
        f"zgraph: the gradient of {name_of(handle)} was differentiated a second time; zgraph reduces first derivatives "
        "only. Compute the second-order term on an unsharded copy, or leave out create_graph=True."
    )


def _remember_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if second_derivatives_vanish():  # autograd would never call _refuse
        raise _differentiated_twice(inputs[1])
    ctx.save_for_backward(inputs[1])


reduce_grad.register_autograd(_refuse, setup_context=_remember_handle)
