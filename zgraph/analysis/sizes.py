"""Sizes of a graph's values: its tensors, and numbers for what is symbolic."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, fx

from zgraph.graph import meta
from zgraph.torch_compat.fake_values import hint_of

# What Inductor takes for a size that only data decides.
DATA_DEPENDENT_SIZE = 8192


def size_hint(size: object) -> int:
    """A size as a number, by its hint where it is symbolic."""
    hint = hint_of(size)
    return DATA_DEPENDENT_SIZE if hint is None else hint


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node yields."""
    return _tensors_in(meta.value(node))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in cast("tuple[Any, ...]", value) for tensor in _tensors_in(item)]
    return []
