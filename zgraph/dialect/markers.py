"""The dialect: two marker operators with their eager kernels (the reference), and the operators they are made of.

`zgraph::unshard` turns a local shard into the whole parameter, `zgraph::reduce_grad` turns a whole gradient into the
averaged gradient of the local shard. They are pure, carry no policy and no identity constants: what differs between two
equal blocks is only the handle tensor. Passes replace them in compiled graphs; wherever no pass has been, their own
kernels do the work, and every pass that is not lossy must equal those bitwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.dialect.sum_ranks import sum_ranks
from zgraph.dialect.window_ops import accumulate_grad, add_accumulated, all_gather_kept, gradients_wait, keeps_gathered
from zgraph.dialect.wire_dtypes import accumulate_dtype, mean_dtype_of, wire_dtype_of
from zgraph.errors import ZgraphError
from zgraph.runtime.chunks import chunk_rows, local_rows, pad_rows
from zgraph.runtime.collective_error import collective_error
from zgraph.runtime.collectives import start_all_gather, start_all_to_all
from zgraph.runtime.groups import group_size, reduction_group
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import OPEN
from zgraph.torch_compat.autograd import second_derivatives_vanish
from zgraph.torch_compat.collectives import wait
from zgraph.torch_compat.groups import resolve_group


@torch.library.custom_op("zgraph::unshard", mutates_args=())
def unshard(
    shard: Tensor,
    handle: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    mean_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    window: str,
    replicas: str,
    group_name: str,
) -> Tensor:
    """The whole parameter from its local shard.

    Args:
        shard: [rows, ...] this rank's rows (the whole parameter at stage 0).
        handle: [96] uint8, see handle.py.
        shape: of the whole parameter.
        dtype: of the result; the cast comes before the gather, so narrow types travel.
        wire_dtype: in which the gradient travels, see `wire_dtype_of`.
        mean_dtype: in which its mean is gathered where ranks make a part each, see `mean_dtype_of`.
        zero_stage: 0 replicated, else sharded on dim 0.
        reduction: "mean" or "sum" over the ranks, for the gradient.
        window: where this forward stands in its window, see runtime/window.py.
        replicas: name of the group across which the shards are replicated (hybrid sharding); "" for none.
        group_name: of the group over which the parameter is sharded.

    Returns:
        [*shape] in `dtype`, never an alias of `shard`.

    Raises:
        CollectiveError: the gather failed; names the parameter.
    """
    if zero_stage == 0:
        return shard.to(dtype, copy=True, memory_format=torch.contiguous_format)
    group = resolve_group(group_name)
    world = dist.get_world_size(group)
    if world == 1:
        return shard.to(dtype, copy=True, memory_format=torch.contiguous_format)
    chunk = pad_rows(shard.to(dtype), chunk_rows(shape[0], world))
    try:
        if keeps_gathered(zero_stage, window):
            whole = wait(all_gather_kept(chunk, handle, world, window, group_name))
        else:
            whole = wait(start_all_gather(chunk, world, group_name))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise collective_error("all_gather", [name_of(handle)], group_name, error) from error
    return whole[: shape[0]]


@unshard.register_fake
def _(
    shard: Tensor,
    handle: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    mean_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    window: str,
    replicas: str,
    group_name: str,
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, handle, _, _, *ctx.policy = inputs
    ctx.shard_dtype = shard.dtype
    ctx.save_for_backward(handle)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    return reduce_grad(grad, handle, ctx.shard_dtype, *ctx.policy), *([None] * 10)


unshard.register_autograd(_reduce, setup_context=_remember)


@torch.library.custom_op("zgraph::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    mean_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    window: str,
    replicas: str,
    group_name: str,
) -> Tensor:
    """This rank's shard of the gradient, averaged (or summed) over the ranks in rank order.

    Args:
        grad: [*shape] gradient of the whole parameter.
        handle, wire_dtype, mean_dtype, zero_stage, reduction, window, replicas, group_name: as in `unshard`.
        dtype: of the result, the parameter's own.

    Returns:
        [rows, ...] where the parameter is sharded, [*shape] at stage 0: fp32 sum in rank order over the group, then
        over its replicas, divided once. Where ranks then gather the parts of the mean, each rank has rounded its part
        to what `mean_dtype_of` says, so that all have equal bits. Then `dtype`. Where gradients wait for the end of the
        window, what stands in for them in `.grad`.

    Raises:
        CollectiveError: the exchange failed; names the parameter.
    """
    group = resolve_group(reduction_group(group_name))
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    num_replicas = group_size(replicas)
    if world * num_replicas > 1 and gradients_wait(zero_stage, window):
        if window == OPEN:
            rows = 0 if zero_stage == 0 else local_rows(grad.shape[0], world, rank)
            return accumulate_grad(grad, handle, dtype, zero_stage, rows)
        grad = add_accumulated(grad, handle, dtype, zero_stage)
    divisor = world * num_replicas if reduction == "mean" else 1
    is_gathered = num_replicas > 1 or (zero_stage == 0 and world > 1)
    travels = mean_dtype_of(grad.dtype, dtype, wire_dtype, mean_dtype) if is_gathered else dtype
    wire = grad.to(wire_dtype_of(grad.dtype, wire_dtype)) if world > 1 else grad  # alone, nothing travels
    if zero_stage == 0:
        chunk = chunk_rows(wire.numel(), world)
        pieces = pad_rows(wire.reshape(-1), world * chunk)
    else:
        chunk = chunk_rows(wire.shape[0], world)
        pieces = pad_rows(wire, world * chunk)
    try:
        if num_replicas == 1:
            total = _exchange_and_sum(pieces, group, divisor, travels)
        else:
            partial = _exchange_and_sum(pieces, group, 1, accumulate_dtype(pieces.dtype))
            total = _all_reduce(partial, resolve_group(replicas), divisor, wire_dtype, travels)
        if zero_stage == 0:
            return _gather_pieces(total, group, grad.numel()).to(dtype).view(grad.shape)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise collective_error("reduce_grad", [name_of(handle)], group_name, error) from error
    return total[: local_rows(grad.shape[0], world, rank)].to(dtype)


def _exchange_and_sum(pieces: Tensor, group: ProcessGroup, divisor: int, dtype: torch.dtype) -> Tensor:
    """[N * n, ...] of every rank -> the sum of this rank's [n, ...] pieces."""
    world = dist.get_world_size(group)
    if world > 1:
        splits = [pieces.shape[0] // world] * world
        pieces = wait(start_all_to_all(pieces, splits, splits, group.group_name))
    return sum_ranks(pieces, world, divisor, dtype)


def _gather_pieces(piece: Tensor, group: ProcessGroup, numel: int) -> Tensor:
    """[n] of every rank -> [numel], the first of them all."""
    world = dist.get_world_size(group)
    if world == 1:
        return piece[:numel]
    return wait(start_all_gather(piece, world, group.group_name))[:numel]


def _all_reduce(
    partial: Tensor, group: ProcessGroup, divisor: int, wire_dtype: torch.dtype | None, dtype: torch.dtype
) -> Tensor:
    """The sum of a partial sum over the replicas of this shard, in rank order."""
    world = dist.get_world_size(group)
    flat = partial.reshape(-1).to(wire_dtype_of(partial.dtype, wire_dtype))
    pieces = pad_rows(flat, world * chunk_rows(flat.numel(), world))
    mean = _exchange_and_sum(pieces, group, divisor, dtype)
    return _gather_pieces(mean, group, partial.numel()).view(partial.shape)


@reduce_grad.register_fake
def _(
    grad: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    mean_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    window: str,
    replicas: str,
    group_name: str,
) -> Tensor:
    if zero_stage == 0:
        return grad.new_empty(grad.shape, dtype=dtype)
    group = resolve_group(group_name)
    rows = local_rows(grad.shape[0], dist.get_world_size(group), dist.get_rank(group))
    return grad.new_empty((rows, *grad.shape[1:]), dtype=dtype)


def _refuse(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    (handle,) = ctx.saved_tensors
    raise _differentiated_twice(handle)


def _differentiated_twice(handle: Tensor) -> ZgraphError:
    return ZgraphError(
        f"zgraph: the gradient of {name_of(handle)} was differentiated a second time; zgraph reduces first derivatives "
        "only. Compute the second-order term on an unsharded copy, or leave out create_graph=True."
    )


def _remember_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    if second_derivatives_vanish():  # nothing would call _refuse
        raise _differentiated_twice(inputs[1])
    ctx.save_for_backward(inputs[1])


reduce_grad.register_autograd(_refuse, setup_context=_remember_handle)
