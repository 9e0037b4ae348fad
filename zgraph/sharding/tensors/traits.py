"""Facts about operators that decide how they are called with sharded tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zgraph.torch_compat.operators import OpOverload, assigns_data, communicates, is_mutable, is_tagged_random

aten = torch.ops.aten
# Operators that raise, or give another result, on ranks whose shard has no elements.
_OF_NOTHING = frozenset(
    {aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin, aten.median, aten.nanmedian}
)
_NORMS = frozenset({aten.linalg_vector_norm, aten._foreach_norm})  # likewise for infinite order
# Position of the dim argument of operators that take a part along it; DTensor gathers if that dim is sharded.
_DIMENSIONS = MappingProxyType(
    {aten.select.int: 1, aten.slice.Tensor: 1, aten.split.Tensor: 2, aten.split_with_sizes.default: 2}
)


class Traits(NamedTuple):
    """Facts about one operator."""

    writes: bool
    is_random: bool
    reshapes: bool  # in place: `t_`, `squeeze_`
    assigns: bool  # `.data`
    dimension: int | None
    communicates: bool
    number: int  # the same in each process


@cache
def traits_of(func: OpOverload) -> Traits:
    """Return the facts about an operator."""
    reshapes = torch.Tag.inplace_view in func.tags
    number, dimension = zlib.crc32(str(func).encode()), _DIMENSIONS.get(func)
    facts = is_mutable(func), is_tagged_random(func), reshapes, assigns_data(func), dimension, communicates(func)
    return Traits(*facts, number)


def needs_elements(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an operator must not be called on ranks whose shard has no elements."""
    packet = func.overloadpacket
    return packet in _OF_NOTHING or (
        packet in _NORMS and any(isinstance(arg, float) and math.isinf(arg) for arg in args)
    )
