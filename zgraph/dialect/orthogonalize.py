"""Operators that orthogonalize matrices, the update of Muon, by `newton_schulz` of torch.

    rows = orthogonalize(update, ...)              marker: every rank gathers the matrix and orthogonalizes it

`OrthogonalizeOnOwners` replaces markers by exchanges with one rank for each matrix, its owner. Buffers are those of
`OwnedMatrices`.

    sent = send_to_owners([update, ...], ...)      then an all_to_all: the owners receive all rows
    parts = orthogonalize_owned(received, ...)     then an all_to_all: ranks receive their rows of results
    part = orthogonalize_whole([update, ...], ...) if every rank has whole matrices (stage 0); then an all_gather

Newton-Schulz computes in bf16, so rows travel as bf16 both ways and lose nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.runtime.chunks import chunk_rows, local_rows, pad_rows
from zgraph.runtime.exchanges.collectives import all_gather
from zgraph.runtime.groups import group_rank, group_size
from zgraph.runtime.owned_matrices import ORTHOGONAL_DTYPE, OwnedMatrices
from zgraph.torch_compat.modules import newton_schulz

OPTIONS = "float[] coefficients, int steps, float eps"  # as in torch.optim.Muon


@torch.library.custom_op(
    "zgraph::orthogonalize",
    mutates_args=(),
    schema=f"(Tensor update, int rows, bool is_sharded, str group_name, {OPTIONS}) -> Tensor",
)
def orthogonalize(
    update: Tensor,
    rows: int,
    is_sharded: bool,
    group_name: str,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
) -> Tensor:
    """Orthogonalize a matrix whose rows are split over ranks, with the bits of a single rank.

    Args:
        update: [local rows, columns] this rank's rows, or the whole matrix.
        rows: number of rows of the matrix.
        is_sharded: whether the rows are split over the ranks, as by `Shard(0)`.
        group_name: name of the process group of these ranks; "" for this rank by itself.
        coefficients, steps, eps: options of `torch.optim.Muon`.

    Returns:
        [local rows, columns] bf16: this rank's rows of the result.
    """
    world = group_size(group_name)
    if not is_sharded or world == 1:
        return newton_schulz(update.to(ORTHOGONAL_DTYPE, copy=True), coefficients, steps, eps).contiguous()
    chunk = chunk_rows(rows, world)
    whole = all_gather(pad_rows(update.to(ORTHOGONAL_DTYPE), chunk), world, group_name)[:rows]
    begin = min(group_rank(group_name) * chunk, rows)
    return newton_schulz(whole, coefficients, steps, eps)[begin : begin + update.shape[0]].clone(
        memory_format=torch.contiguous_format
    )


@orthogonalize.register_fake
def _(update: Tensor, *_: object) -> Tensor:
    return update.new_empty(update.shape, dtype=ORTHOGONAL_DTYPE)


@torch.library.custom_op("zgraph::send_to_owners", mutates_args=())
def send_to_owners(updates: Sequence[Tensor], rows: Sequence[int], owners: Sequence[int], world: int) -> Tensor:
    """Pack this rank's rows of several matrices for the owners of the matrices.

    Args:
        updates: [local rows, columns] for each matrix.
        rows, owners, world: see `OwnedMatrices`.

    Returns:
        [world * part] bf16; padding is zero.
    """
    layout = OwnedMatrices.of(rows, [one.shape[1] for one in updates], owners, world)
    sent = updates[0].new_zeros(world * layout.part_numel, dtype=ORTHOGONAL_DTYPE)
    for number, update in enumerate(updates):
        begin = layout.own_begin(number)
        sent[begin : begin + update.numel()].view(update.shape).copy_(update)
    return sent


@send_to_owners.register_fake
def _(updates: Sequence[Tensor], rows: Sequence[int], owners: Sequence[int], world: int) -> Tensor:
    layout = OwnedMatrices.of(rows, [one.shape[1] for one in updates], owners, world)
    return updates[0].new_empty(world * layout.part_numel, dtype=ORTHOGONAL_DTYPE)


@torch.library.custom_op(
    "zgraph::orthogonalize_owned",
    mutates_args=(),
    schema=f"(Tensor received, int[] rows, int[] columns, int[] owners, str group_name, {OPTIONS}) -> Tensor",
)
def orthogonalize_owned(
    received: Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    owners: Sequence[int],
    group_name: str,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
) -> Tensor:
    """Orthogonalize the matrices that this rank owns.

    Args:
        received: [world * part] bf16; part r has rank r's rows, see `OwnedMatrices`.
        rows, columns, owners: shape and owner of each matrix.
        group_name: name of the process group.
        coefficients, steps, eps: options of `torch.optim.Muon`.

    Returns:
        [world * part] bf16; part r has rank r's rows of the results.
    """
    world, rank = group_size(group_name), group_rank(group_name)
    layout = OwnedMatrices.of(rows, columns, owners, world)
    parts = torch.zeros_like(received)
    for number in layout.owned_by(rank):
        chunk, width = layout.chunk_rows(number), columns[number]
        whole = received.new_empty(world * chunk, width)
        whole.view(world, -1).copy_(layout.chunks_in(received, number))
        result = newton_schulz(whole[: rows[number]], coefficients, steps, eps)
        into = layout.chunks_in(parts, number)
        for peer in range(world):
            count, begin = local_rows(rows[number], world, peer), min(peer * chunk, rows[number])
            into[peer, : count * width].view(count, width).copy_(result[begin : begin + count])
    return parts


@orthogonalize_owned.register_fake
def _(received: Tensor, *_: object) -> Tensor:
    return torch.empty_like(received)


@torch.library.custom_op(
    "zgraph::orthogonalize_whole",
    mutates_args=(),
    schema=f"(Tensor[] updates, int[] owners, str group_name, {OPTIONS}) -> Tensor",
)
def orthogonalize_whole(
    updates: Sequence[Tensor],
    owners: Sequence[int],
    group_name: str,
    coefficients: Sequence[float],
    steps: int,
    eps: float,
) -> Tensor:
    """Orthogonalize those of several matrices, whole on every rank, that this rank owns.

    Args:
        updates: [rows, columns] for each matrix.
        owners: owner of each matrix.
        group_name: name of the process group.
        coefficients, steps, eps: options of `torch.optim.Muon`.

    Returns:
        [part] bf16: the results, see `OwnedMatrices`.
    """
    layout = _layout_of_whole(updates, owners, group_size(group_name))
    part = updates[0].new_zeros(layout.part_numel, dtype=ORTHOGONAL_DTYPE)
    for number in layout.owned_by(group_rank(group_name)):
        result = newton_schulz(updates[number].to(ORTHOGONAL_DTYPE, copy=True), coefficients, steps, eps)
        begin = layout.offsets[number]
        part[begin : begin + result.numel()].view(result.shape).copy_(result)
    return part


@orthogonalize_whole.register_fake
def _(updates: Sequence[Tensor], owners: Sequence[int], group_name: str, *_: object) -> Tensor:
    layout = _layout_of_whole(updates, owners, group_size(group_name))
    return updates[0].new_empty(layout.part_numel, dtype=ORTHOGONAL_DTYPE)


def _layout_of_whole(updates: Sequence[Tensor], owners: Sequence[int], world: int) -> OwnedMatrices:
    rows, columns = zip(*(one.shape for one in updates), strict=True)
    return OwnedMatrices.of(rows, columns, owners, world, is_sharded=False)
