"""The operator that makes one value depend on others, such as on all gathers of a unit of layers, even unused ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("zgraph::depend", mutates_args=())
def depend(value: Tensor, on: Sequence[Tensor]) -> Tensor:
    """Return a copy of `value` that becomes available only after all tensors in `on` are available.

    Dynamo, AOTAutograd and passes remove an unused gather as dead code, but not a gather that a value depends on. In a
    graph the result counts as a view of `value`, and lowering replaces the result by `value` (`drop_dependences` in
    codegen/lower_fx.py). This kernel copies, because torch does not allow operators to return their input.

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
