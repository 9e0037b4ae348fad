"""The arguments that both marker operators take after their tensors, and the part of the schemas that lists them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_type_hints

import torch

from zgraph.runtime.shard_layout import ShardLayout


@dataclass(frozen=True)
class MarkerPolicy:
    """How a parameter is gathered and its gradient reduced, in the order of the markers' arguments.

    Attributes:
        dtype: dtype of the marker's result. For `unshard`, shards are cast to this dtype before they are sent; for
            `reduce_grad`, it is the parameter's dtype.
        wire_dtype: dtype in which the gradient is sent, see `wire_dtype_of`.
        mean_dtype: dtype in which the mean gradient is gathered if each rank computes a part, see `mean_dtype_of`.
        zero_stage: 0 replicated, else sharded on dim 0.
        reduction: reduction of the gradient over the ranks: "mean", "sum", or the divisor of the sum.
        window: position of this forward in its window, see runtime/window_state.py.
        replica_group, group_name: process groups; with shape and `zero_stage`, they define the `ShardLayout`.
    """

    dtype: torch.dtype
    wire_dtype: torch.dtype | None
    mean_dtype: torch.dtype | None
    zero_stage: int
    reduction: str
    window: str
    replica_group: str
    group_name: str

    def layout_of(self, shape: Iterable[int]) -> ShardLayout:
        """The layout of a parameter of this shape."""
        return ShardLayout(tuple(shape), self.zero_stage, self.replica_group, self.group_name)


def _schema() -> str:
    types = {torch.dtype: "ScalarType", torch.dtype | None: "ScalarType?", int: "SymInt", str: "str"}
    return ", ".join(f"{types[kind]} {name}" for name, kind in get_type_hints(MarkerPolicy).items())


POLICY_SCHEMA = _schema()
