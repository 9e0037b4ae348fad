"""The operator `zgraph::depend`, which makes one value depend on others, for example on unused gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("zgraph::depend", mutates_args=())
def depend(value: Tensor, on: Sequence[Tensor]) -> Tensor:
    """Return a copy of `value` that is available only after all tensors in `on` are available.

    A gather that a value depends on is not removed as dead code by Dynamo, AOTAutograd or passes. In a graph the result
    counts as a view of `value`, and lowering replaces it by `value` (`drop_dependences` in codegen/lower_fx.py). This
    eager kernel copies, because torch does not allow operators to return their input.

    Args:
        value: any tensor.
        on: tensors that must be available first; their values are not read.

    Returns:
        A copy of `value`.
    """
    return value.clone()


@depend.register_fake
def _(value: Tensor, on: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(value)
