"""The operator that makes one value wait for others: what a unit has gathered, whether anybody reads it or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.library.custom_op("zgraph::depend", mutates_args=())
def depend(value: Tensor, on: Sequence[Tensor]) -> Tensor:
    """Return a value that is there only after others are.

    A gather that nobody reads is dead code to Dynamo, AOTAutograd and passes; one that a value depends on is not. In a
    graph it counts as a view of `value`, and lowering replaces it by `value` itself (`drop_dependences` in
    codegen/lower_fx.py). The copy made here is what torch demands of an operator that runs as it is.

    Args:
        value: any tensor.
        on: any tensors, which are not read.

    Returns:
        A copy of `value`.
    """
    return value.clone()


@depend.register_fake
def _(value: Tensor, on: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(value)
