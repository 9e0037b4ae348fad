"""The dialect: two marker operators, their eager kernels (the reference), and the sum that fixes the order of ranks.

`zgraph::unshard` turns a local shard into the whole parameter, `zgraph::reduce_grad` turns a whole gradient into the
averaged gradient of the local shard. They are pure, carry no policy and no identity constants: what differs between two
equal blocks is only the handle tensor. Passes replace them in compiled graphs; wherever no pass has been, their own
kernels do the work, and every pass that is not lossy must equal those bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.errors import CollectiveError, ZgraphError
from zgraph.handle import name_of
from zgraph.torch_compat import all_gather, resolve_group

MIB = 2**20


def chunk_rows(rows: int, world: int) -> int:
    """Rows of every rank's padded chunk when `rows` are split as `torch.chunk` and `Shard(0)` split them."""
    return -(-rows // world)


def local_rows(rows: int, world: int, rank: int) -> int:
    """Rows that `rank` really holds: the chunk, less at the end, zero behind it."""
    chunk = chunk_rows(rows, world)
    return max(0, min(chunk, rows - rank * chunk))


def accumulate_dtype(wire: torch.dtype) -> torch.dtype:
    """Sums over ranks run in fp32, or in fp64 when that is what travels."""
    return torch.float64 if wire == torch.float64 else torch.float32


def wire_dtype_of(grad: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype a gradient travels in: the one asked for, but never wider than it is.

    The sum is fp32 on arrival, so widening before the wire would send zeros and change no bit of the result.
    """
    if asked is None or asked.itemsize > grad.itemsize:
        return grad
    return asked


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows appended up to `rows`, contiguous."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# --- sum over ranks -------------------------------------------------------------------------------------------------


@torch.library.custom_op("zgraph::sum_ranks", mutates_args=())
def sum_ranks(received: Tensor, world: int, mean: bool, dtype: torch.dtype) -> Tensor:
    """Sum equal pieces in rank order and divide once: the order of summation that every lowering must reproduce.

    Args:
        received: [world * n, ...] pieces of rank 0, 1, ... one after the other.
        world: number of ranks N.
        mean: divide the sum by N.
        dtype: of the result.

    Returns:
        [n, ...] in `dtype`; summed in fp32 (fp64 for fp64 input), divided by N once.
    """
    pieces = received.unflatten(0, (world, -1))
    total = pieces[0].to(accumulate_dtype(received.dtype), copy=True)
    for rank in range(1, world):
        total += pieces[rank]
    if mean and world > 1:
        total /= world
    return total.to(dtype)


@sum_ranks.register_fake
def _(received: Tensor, world: int, mean: bool, dtype: torch.dtype) -> Tensor:
    return received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)


# --- unshard --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("zgraph::unshard", mutates_args=())
def unshard(
    shard: Tensor,
    handle: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    group_name: str,
) -> Tensor:
    """The whole parameter from its local shard.

    Args:
        shard: [rows, ...] this rank's rows (the whole parameter at stage 0).
        handle: [96] uint8, see handle.py.
        shape: of the whole parameter.
        dtype: of the result; the cast comes before the gather, so narrow types travel.
        wire_dtype: in which the gradient travels, see `wire_dtype_of`.
        zero_stage: 0 replicated, 3 sharded on dim 0.
        reduction: "mean" or "sum" over the ranks, for the gradient.
        group_name: of the process group.

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
    whole = chunk.new_empty((world * chunk.shape[0], *chunk.shape[1:]))
    try:
        all_gather(whole, chunk, group)
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
    zero_stage: int,
    reduction: str,
    group_name: str,
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, handle, _, _, ctx.wire_dtype, ctx.zero_stage, ctx.reduction, ctx.group_name = inputs
    ctx.shard_dtype = shard.dtype
    ctx.save_for_backward(handle)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    reduced = reduce_grad(grad, handle, ctx.shard_dtype, ctx.wire_dtype, ctx.zero_stage, ctx.reduction, ctx.group_name)
    return reduced, None, None, None, None, None, None, None


unshard.register_autograd(_reduce, setup_context=_remember)


# --- reduce_grad ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("zgraph::reduce_grad", mutates_args=())
def reduce_grad(
    grad: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    group_name: str,
) -> Tensor:
    """This rank's shard of the gradient, averaged (or summed) over the ranks in rank order.

    Args:
        grad: [*shape] gradient of the whole parameter.
        handle, wire_dtype, zero_stage, reduction, group_name: as in `unshard`.
        dtype: of the result, the parameter's own.

    Returns:
        [rows, ...] at stage 3, [*shape] at stage 0: fp32 sum in rank order, one exact 1/N, then `dtype`.

    Raises:
        CollectiveError: the exchange failed; names the parameter.
    """
    group = resolve_group(group_name)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    wire = grad.to(wire_dtype_of(grad.dtype, wire_dtype)) if world > 1 else grad  # alone, nothing travels
    mean = reduction == "mean"
    if zero_stage == 0:
        chunk = chunk_rows(wire.numel(), world)
        pieces = pad_rows(wire.reshape(-1), world * chunk)
    else:
        chunk = chunk_rows(wire.shape[0], world)
        pieces = pad_rows(wire, world * chunk)
    try:
        if world > 1:
            received = torch.empty_like(pieces)
            dist.all_to_all_single(received, pieces, group=group)
            pieces = received
        total = sum_ranks(pieces, world, mean, dtype)
        if zero_stage == 0:
            whole = total
            if world > 1:
                whole = total.new_empty(world * chunk)
                all_gather(whole, total, group)
            return whole[: grad.numel()].view(grad.shape)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise collective_error("reduce_grad", [name_of(handle)], group_name, error) from error
    return total[: local_rows(grad.shape[0], world, rank)]


@reduce_grad.register_fake
def _(
    grad: Tensor,
    handle: Tensor,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None,
    zero_stage: int,
    reduction: str,
    group_name: str,
) -> Tensor:
    if zero_stage == 0:
        return grad.new_empty(grad.shape, dtype=dtype)
    group = resolve_group(group_name)
    rows = local_rows(grad.shape[0], dist.get_world_size(group), dist.get_rank(group))
    return grad.new_empty((rows, *grad.shape[1:]), dtype=dtype)


def _refuse(ctx: Any, grad: Tensor) -> tuple[None, ...]:
    (handle,) = ctx.saved_tensors
    raise ZgraphError(
        f"zgraph: the gradient of {name_of(handle)} was differentiated a second time; zgraph reduces first derivatives "
        "only. Compute the second-order term on an unsharded copy, or leave out create_graph=True."
    )


def _remember_handle(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


reduce_grad.register_autograd(_refuse, setup_context=_remember_handle)


def collective_error(kind: str, parameters: Sequence[str], group_name: str, cause: BaseException) -> CollectiveError:
    """The error of a collective that did not come through, naming it and the parameters it was working for."""
    names = ", ".join(parameters[:4]) + (f" and {len(parameters) - 4} more" if len(parameters) > 4 else "")
    rank = dist.get_rank() if dist.is_initialized() else 0
    return CollectiveError(
        f"zgraph: {kind} of {names} failed on rank {rank} (group {group_name}): {str(cause).strip()}. "
        "A peer has died, is stuck, or runs another model; look at the first rank that printed an error."
    )


def payload_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor of that shape."""
    return math.prod(shape) * dtype.itemsize
