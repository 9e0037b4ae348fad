"""Losses over the targets of all ranks of a context axis, which may have different numbers of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zgraph.sharding.context.attention import exchange


def mean_cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    group_name: str,
    size: int,
) -> Tensor:
    """Compute this rank's part of `torch.nn.functional.cross_entropy`, whose mean over the axis is the whole mean.

    A plain mean would weigh the tokens of a rank with few targets more than those of other ranks: the last token of a
    sequence has no target, and padding has none.

    Args:
        scores, target, weight, ignore_index, label_smoothing: as for torch's function; targets are class indices.
        group_name, size: process group of the context axis, and number N of its ranks.

    Returns:
        0-d: the sum of this rank's losses, divided by 1/N of the number of targets of all ranks.
    """
    total = F.cross_entropy(
        scores, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    is_target = target != ignore_index
    count = is_target.sum() if weight is None else (weight[target.where(is_target, 0)] * is_target).sum()
    of_all = exchange(count.detach().expand(size), group_name).sum()
    return total / (of_all / size).to(total.dtype)


def sum_cross_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, size: int
) -> Tensor:
    """Compute this rank's part of a summed `cross_entropy`, whose mean over the axis is the sum over all ranks.

    Args:
        scores, target, weight, ignore_index, label_smoothing: as for `mean_cross_entropy`.
        size: number N of ranks of the axis.

    Returns:
        0-d: N times the sum of this rank's losses.
    """
    return size * F.cross_entropy(
        scores, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
