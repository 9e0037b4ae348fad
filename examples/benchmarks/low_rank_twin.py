"""Reference for low-rank reductions: the mean of one matrix from the gradients of all ranks, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zgraph.codegen.kernels.orthonormal import LEAST, sum_in_blocks


def low_rank_mean(
    grads: Sequence[Tensor], errors: Sequence[Tensor], right: Tensor, divisor: int
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Reduce one matrix over N ranks by low-rank factors (PowerSGD).

    Args:
        grads: [rows, columns] gradient of each rank.
        errors: [rows, columns] fp32 error-feedback state of each rank.
        right: [rank, columns] fp32 right factor at the start of the step.
        divisor: N for a mean, 1 for a sum.

    Returns:
        the mean [rows, columns] fp32; the new errors; the right factor for the next step.
    """
    deltas = [error + grad for grad, error in zip(grads, errors, strict=True)]
    basis = orthonormal_rows(in_rank_order([torch.mm(right, delta.t()) for delta in deltas], divisor))
    own = [torch.mm(basis, delta) for delta in deltas]
    after = [torch.addmm(delta, basis.t(), factor, alpha=-1) for delta, factor in zip(deltas, own, strict=True)]
    shared = in_rank_order(own, divisor)
    mean = torch.mm(basis.t(), shared)
    # A gradient that is not finite does not change the error; a row of zeros does not change the right factor.
    after = [new if factor.isfinite().all() else old for new, factor, old in zip(after, own, errors, strict=True)]
    largest = shared.abs().amax(1, keepdim=True)
    usable = largest.isfinite() & (largest > 0)
    return mean, after, torch.where(usable, shared / largest, right)


def in_rank_order(values: Sequence[Tensor], divisor: int) -> Tensor:
    """Sum the values of all ranks in rank order, and divide the sum by `divisor`."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / divisor


def orthonormal_rows(rows: Tensor) -> Tensor:
    """Return an orthonormal copy of one matrix [count, length], with the results of `orthonormal.orthonormalize`."""
    found: list[Tensor] = []
    for row in rows:
        largest = row.abs().max()
        row = row / torch.where(largest == 0, 1.0, largest)
        length = sum_in_blocks(row * row).sqrt()
        for _ in range(2 if found else 0):
            before = torch.stack(found)
            row = row - (before * sum_in_blocks(before * row)[:, None]).sum(0)
        left = sum_in_blocks(row * row).sqrt()
        found.append(torch.where(left <= LEAST * length, 0.0, row / left))
    return torch.stack(found)
