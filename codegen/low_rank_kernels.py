"""The kernels of `zgraph::low_rank_left` and related operators; libraries compute the products, batch by batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.codegen.kernels.orthonormal import orthonormalize
from zgraph.compression.low_rank import FactorLayout, LowRank, state_of_matrix
from zgraph.dialect.low_rank import layout_of
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import closes_window

_DEVICES = ("cpu", "cuda")
_ALIGNMENT_BYTES = 64  # alignment of torch's allocations on a CPU
# Minimum number of rows at which a row's bits do not depend on the number of rows: MKL has another kernel for fewer.
ROUNDED_ALIKE = 4
SLOT = "first_hop"  # name of the error-feedback state of the whole gradient, the same as for codes


@torch.library.impl("zgraph::low_rank_left", _DEVICES)
def low_rank_left(
    grads: Sequence[Tensor], handles: Sequence[Tensor], rows: Sequence[int], columns: Sequence[int], rank: int
) -> list[Tensor]:
    layout = layout_of(rows, columns, rank)
    kept = _feedbacks(handles, layout, grads[0].device)
    for handle, feedback in zip(handles, kept, strict=True):
        if not feedback.reductions:
            feedback.tensors["right"].copy_(first_right(name_of(handle), feedback.tensors["right"]))
        scaled = state_behind(handle).feedbacks.loss_scale is not None
        feedback.begin(reset_interval=0, keep_before=scaled)
    left = grads[0].new_empty(layout.left_numel, dtype=torch.float32)
    deltas: list[Tensor] = []
    for batch, out in zip(layout.batches(), layout.left(left), strict=True):
        delta = left.new_empty((len(batch.members), batch.rows, batch.columns))
        for place, member in enumerate(batch.members):
            grad = grads[member].reshape(batch.rows, batch.columns)
            torch.add(kept[member].tensors["error"], grad, out=delta[place])
        right = torch.stack([kept[member].tensors["right"] for member in batch.members])
        _multiply(right, delta.transpose(1, 2), out)
        deltas.append(delta)
    return [left, *deltas]


@torch.library.impl("zgraph::low_rank_right", _DEVICES)
def low_rank_right(
    left: Tensor,
    deltas: Sequence[Tensor],
    handles: Sequence[Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
) -> list[Tensor]:
    layout = layout_of(rows, columns, rank)
    kept = _feedbacks(handles, layout, left.device)
    basis = left.clone()
    right = left.new_empty(layout.right_numel)
    parts = zip(layout.batches(), deltas, layout.left(basis), layout.right(right), strict=True)
    for batch, delta, directions, out in parts:
        orthonormalize(directions)
        _multiply(directions, delta, out)
        _subtract_product(delta, directions.transpose(1, 2), out)
        # NaN if any rank's gradient was not finite; then all ranks keep their previous error.
        finite = out.isfinite().all(2).all(1)
        for place, member in enumerate(batch.members):
            tensors = kept[member].tensors
            if left.device.type == "cpu":
                if finite[place]:
                    tensors["error"] = delta[place]
            else:  # no branch, because reading the flag would wait for the device
                tensors["error"] = torch.where(finite[place], delta[place], tensors["error"])
    return [basis, right]


@torch.library.impl("zgraph::low_rank_means", _DEVICES)
def low_rank_means(
    basis: Tensor,
    right: Tensor,
    handles: Sequence[Tensor],
    rows: Sequence[int],
    columns: Sequence[int],
    rank: int,
    first_rows: Sequence[int],
    kept_rows: Sequence[int],
    dtype: torch.dtype,
    window: str,
) -> list[Tensor]:
    layout = layout_of(rows, columns, rank)
    kept = _feedbacks(handles, layout, basis.device)
    means: list[Tensor] = [basis] * len(handles)
    for batch, directions, factor in zip(layout.batches(), layout.left(basis), layout.right(right), strict=True):
        for place, member in enumerate(batch.members):
            mean = basis.new_empty((kept_rows[member], batch.columns))
            first, last = first_rows[member], min(first_rows[member] + kept_rows[member], batch.rows)
            count = max(0, last - first)
            _multiply_rows(directions[place], factor[place], first, mean[:count])
            mean[count:] = 0.0
            means[member] = mean.to(dtype)
        before = torch.stack([kept[member].tensors["right"] for member in batch.members])
        for member, found in zip(batch.members, next_right(factor, before).unbind(), strict=True):
            kept[member].tensors["right"] = found
    for handle, feedback in zip(handles, kept, strict=True):
        feedback.end(closing=closes_window(handle, window))
    return means


def _multiply_rows(directions: Tensor, factor: Tensor, first: int, out: Tensor) -> None:
    """Compute `count` rows of directions.t() @ factor, with the same bits as in the whole product.

    Args:
        directions: [rank, rows].
        factor: [rank, columns].
        first: first row to compute.
        out: [count, columns], overwritten.
    """
    count, rows = out.shape[0], directions.shape[1]
    if count >= min(ROUNDED_ALIKE, rows):
        torch.mm(directions[:, first : first + count].t(), factor, out=out)
    elif count:
        begin = max(0, min(first, rows - ROUNDED_ALIKE))
        around = torch.mm(directions[:, begin : begin + ROUNDED_ALIKE].t(), factor)
        out.copy_(around[first - begin :][:count])


def first_right(name: str, like: Tensor) -> Tensor:
    """Return a random right factor to start with, seeded by the parameter's name: equal on all ranks.

    Args:
        name: name of the parameter.
        like: tensor with the factor's shape and dtype.
    """
    seed = zlib.crc32(f"{name} {list(like.shape)}".encode())
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


def next_right(right: Tensor, before: Tensor) -> Tensor:
    """Return the right factor for the next step: `right`, each row scaled to a largest magnitude of 1.

    A row that is zero or not finite is replaced by the row of `before`, the factor of the previous step.

    Args:
        right, before: [..., rank, columns].
    """
    largest = right.abs().amax(-1, keepdim=True)
    usable = largest.isfinite() & (largest > 0)
    return torch.where(usable, right / largest, before)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiply batches of matrices; on a CPU pair by pair, so that a product does not depend on the rest of the batch.

    On a CPU, operands are copied unless they begin at a multiple of 16 bytes: MKL multiplies unaligned thin matrices in
    another order (seen on an AMD EPYC).
    """
    if out.device.type == "cpu":
        for one, other, product in zip(left, right, out, strict=True):
            product.copy_(torch.mm(_aligned(one), _aligned(other)))
    else:
        torch.bmm(left, right, out=out)


def _aligned(operand: Tensor) -> Tensor:
    """Return the operand, copied unless it is aligned like newly allocated memory."""
    return operand if operand.data_ptr() % _ALIGNMENT_BYTES == 0 else operand.clone()


def _subtract_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.device.type == "cpu":
        for one, other, each in zip(left, right, total, strict=True):
            each.addmm_(one, other, alpha=-1)
    else:
        total.baddbmm_(left, right, alpha=-1)


def _feedbacks(handles: Sequence[Tensor], layout: FactorLayout, device: torch.device) -> list[Feedback]:
    method = LowRank(rank=layout.rank).kept_as
    return [
        state_behind(handle).feedbacks.of(
            *(SLOT, method, rows * columns, 1, state_of_matrix(rows, columns, layout.rank), device, name_of(handle))
        )
        for handle, rows, columns in zip(handles, layout.rows, layout.columns, strict=True)
    ]
