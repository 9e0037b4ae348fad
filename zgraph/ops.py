"""The dialect: two marker operators with their eager kernels (the reference), and the operators they are made of.

`zgraph::unshard` turns a local shard into the whole parameter, `zgraph::reduce_grad` turns a whole gradient into the
averaged gradient of the local shard. They are pure, carry no policy and no identity constants: what differs between two
equal blocks is only the handle tensor. Passes replace them in compiled graphs; wherever no pass has been, their own
kernels do the work, and every pass that is not lossy must equal those bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zgraph.collectives import start_all_gather, start_all_to_all
from zgraph.errors import CollectiveError, ZgraphError
from zgraph.handle import name_of
from zgraph.runtime.window import ALONE, OPEN, state_behind
from zgraph.torch_compat import (
    backend_of,
    find_group,
    make_beside,
    resolve_group,
    second_derivatives_vanish,
    wait,
)

MIB = 2**20
OF_REDUCTIONS = ".reductions"  # behind the name of a group: that of the group on which it reduces
OF_GATHERS = ".gathers"  # likewise, where it is the gathers that have one of their own


def chunk_rows(rows: int, world: int) -> int:
    """Rows of every rank's padded chunk when `rows` are split as `torch.chunk` and `Shard(0)` split them."""
    return -(-rows // world)


def local_rows(rows: int, world: int, rank: int) -> int:
    """Rows that `rank` really holds: the chunk, less at the end, zero behind it."""
    chunk = chunk_rows(rows, world)
    return max(0, min(chunk, rows - rank * chunk))


def group_size(group_name: str) -> int:
    """Ranks of a group; the group "" is this rank alone."""
    return dist.get_world_size(resolve_group(group_name)) if group_name else 1


def reduction_group(group_name: str) -> str:
    """The group on which gradients are reduced over the ranks of a group on which parameters are gathered.

    Collectives of one group run one after the other: a gather behind a reduction would wait for it. `zgraph.shard`
    makes the other one, once for each group. Its name says whose it is, so nobody has to remember it.
    """
    if group_name.endswith(OF_GATHERS):
        return group_name.removesuffix(OF_GATHERS)
    beside = group_name + OF_REDUCTIONS
    return beside if find_group(beside) is not None else group_name


def separate_reductions(group: ProcessGroup, device: torch.device | None = None) -> str:
    """The group on which to gather, when reductions run on another; called by all members.

    The one that is missing is made: for reductions; on NCCL for gathers, on a stream of high priority, for compute
    waits for them. There both are connected before anything else is sent over either. Left to its first use, the second
    communicator would be set up while gathers are outstanding on the first (torch 2.11 - 2.13: split off the default
    group's, where that is bound to a device), and ranks may wait for one another.

    Args:
        group: of these ranks.
        device: of this rank, on which the group works.

    Returns:
        Its name; the group's own where it is to reduce elsewhere, or has one rank.
    """
    if dist.get_world_size(group) == 1:
        return group.group_name
    device = device or torch.device("cpu")
    if backend_of(group, device) != "nccl":
        if find_group(group.group_name + OF_REDUCTIONS) is None:
            make_beside(group, group.group_name + OF_REDUCTIONS)
        return group.group_name
    name = group.group_name + OF_GATHERS
    if find_group(name) is None:
        for each in (group, make_beside(group, name, high_priority=True)):
            connect(each, device)
    return name


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Let a group's ranks find one another now: a sum of one number, to whose end each rank waits."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def make_node_groups(group_name: str, ranks_per_node: int) -> tuple[str, str]:
    """The groups of each node's ranks of a group, and of ranks of equal place in their nodes; called by all members.

    Returns:
        Names of the two that this rank is in.
    """
    group = resolve_group(group_name)
    node, place = divmod(dist.get_rank(group), ranks_per_node)
    members = list(range(dist.get_world_size(group)))
    inside = f"{group_name}.node{node}_of_{ranks_per_node}"
    across = f"{group_name}.place{place}_of_{ranks_per_node}"
    for name, chosen in (
        (inside, members[node * ranks_per_node : (node + 1) * ranks_per_node]),
        (across, members[place::ranks_per_node]),
    ):
        if find_group(name) is None:
            made = make_beside(group, name, chosen)
            device = group.bound_device_id
            if device is not None and len(chosen) > 1:
                connect(made, device)
    return inside, across


@dataclass(frozen=True)
class Chunk:
    """What each rank holds of a tensor that is split over one group, or over one after the other, padding included.

    Attributes:
        rows, row_numel: of the whole tensor. The first group splits rows, which are single elements of a replicated
            gradient; each further one splits the elements of what is left.
        group_names: of the groups, outermost split first.
        unit: so many elements travel, filled up, as so many of the wire's dtype; (128, 66) where bytes are sent.
        filled_to: what travels is filled up to a multiple of so many.
    """

    rows: int
    row_numel: int
    group_names: tuple[str, ...]
    unit: tuple[int, int] = (1, 1)
    filled_to: int = 1

    def numel(self, size_of: Callable[[str], Any] = group_size) -> Any:
        """Elements of one rank, as they travel; an expression where `size_of` gives symbols for the sizes of groups."""
        first, *others = self.group_names
        numel = chunk_rows(self.rows, size_of(first)) * self.row_numel
        for group_name in others:
            numel = chunk_rows(numel, size_of(group_name))
        return chunk_rows(chunk_rows(numel, self.unit[0]) * self.unit[1], self.filled_to) * self.filled_to


def group_backend(group_name: str, device: torch.device) -> str:
    """What moves a group's tensors of a device: "gloo", "nccl", ...; "" of the group "", which sends nothing."""
    return backend_of(resolve_group(group_name), device) if group_name else ""


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


def mean_dtype_of(
    grad: torch.dtype, dtype: torch.dtype, wire_dtype: torch.dtype | None, asked: torch.dtype | None
) -> torch.dtype:
    """The dtype in which ranks gather a mean of which each has made a part.

    The one asked for, else the one in which gradients are asked to travel, else the gradient's own; never wider than
    the result, since widening changes no bit.

    Args:
        grad: of the whole gradient, before it travels.
        dtype: of the result.
        wire_dtype, asked: options of `zgraph.shard`.
    """
    found = asked or wire_dtype or grad
    return found if found.itemsize < dtype.itemsize else dtype


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows appended up to `rows`, contiguous."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


# --- sum over ranks -------------------------------------------------------------------------------------------------


def divisor_beside(total: Tensor, divisor: int) -> Tensor:
    """The number of ranks as a tensor by which a sum is divided as IEEE says, on every device.

    On CUDA torch multiplies by the reciprocal of a number, and Inductor by that of a constant: another result for 3, 5,
    6, 7 ... ranks.
    """
    return torch.full((), divisor, dtype=total.dtype, device=total.device)


def sum_pieces(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """What `zgraph::sum_ranks` computes, by torch's own operators: one rank's piece after the other."""
    wide = accumulate_dtype(received.dtype)
    first, *others = received.unflatten(0, (world, -1))
    total = first + others.pop(0) if others and received.dtype == wide else first.to(wide, copy=True)
    for piece in others:
        total += piece
    if divisor > 1:
        total /= divisor_beside(total, divisor)
    return total.to(dtype)


@torch.library.custom_op("zgraph::sum_ranks", mutates_args=())
def sum_ranks(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Sum equal pieces in rank order and divide once: the order of summation that every lowering must reproduce.

    The one place that divides what ranks have sent as numbers, also where a backend has summed it: then a world of 1.

    Args:
        received: [world * n, ...] pieces of rank 0, 1, ... one after the other.
        world: number of ranks N.
        divisor: of the sum: how many ranks a mean is over; 1 where it is none, or where a further sum follows.
        dtype: of the result.

    Returns:
        [n, ...] in `dtype`; summed in fp32 (fp64 for fp64 input), divided once.
    """
    return sum_pieces(received, world, divisor, dtype)


@sum_ranks.register_fake
def _(received: Tensor, world: int, divisor: int, dtype: torch.dtype) -> Tensor:
    return received.new_empty((received.shape[0] // world, *received.shape[1:]), dtype=dtype)


# --- windows --------------------------------------------------------------------------------------------------------


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


# --- unshard --------------------------------------------------------------------------------------------------------


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


# --- reduce_grad ----------------------------------------------------------------------------------------------------


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
    copies = group_size(replicas)
    if world * copies > 1 and gradients_wait(zero_stage, window):
        if window == OPEN:
            rows = 0 if zero_stage == 0 else local_rows(grad.shape[0], world, rank)
            return accumulate_grad(grad, handle, dtype, zero_stage, rows)
        grad = add_accumulated(grad, handle, dtype, zero_stage)
    divisor = world * copies if reduction == "mean" else 1
    is_gathered = copies > 1 or (zero_stage == 0 and world > 1)
    travels = mean_dtype_of(grad.dtype, dtype, wire_dtype, mean_dtype) if is_gathered else dtype
    wire = grad.to(wire_dtype_of(grad.dtype, wire_dtype)) if world > 1 else grad  # alone, nothing travels
    if zero_stage == 0:
        chunk = chunk_rows(wire.numel(), world)
        pieces = pad_rows(wire.reshape(-1), world * chunk)
    else:
        chunk = chunk_rows(wire.shape[0], world)
        pieces = pad_rows(wire, world * chunk)
    try:
        if copies == 1:
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
