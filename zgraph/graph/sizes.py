"""Sizes of a graph's values as numbers, also for symbolic sizes."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor, fx

from zgraph.graph import meta
from zgraph.torch_compat.fake_values import hint_of

# Value that Inductor assumes for a size that depends on data.
DATA_DEPENDENT_SIZE = 8192


def size_hint(size: object) -> int:
    """Return a size as a number: a symbolic size has its value during tracing, or else `DATA_DEPENDENT_SIZE`."""
    hint = hint_of(size)
    return DATA_DEPENDENT_SIZE if hint is None else hint


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors in a node's value."""
    return _tensors_in(meta.value(node))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, with `size_hint` for symbolic sizes."""
    return math.prod(size_hint(size) for size in tensor.shape) * tensor.dtype.itemsize


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in cast("tuple[Any, ...]", value) for tensor in _tensors_in(item)]
    return []
