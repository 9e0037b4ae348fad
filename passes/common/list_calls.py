"""Merges calls of operators on single tensors into one call over lists, such as `_foreach_mul_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.graph import meta
from zgraph.torch_compat.operators import OpOverload, over_lists

aten = torch.ops.aten
_UNARY = (aten.sqrt, aten.sqrt_, aten.neg, aten.neg_, aten.abs, aten.abs_, aten.reciprocal, aten.reciprocal_)
_BINARY = (aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_)
_TERNARY = (aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_)
_LERP = (aten.lerp, aten.lerp_)
# Overloads with an equivalent over lists, without rounding modes and `out`; with their number of operands.
_TENSORS: Mapping[object, int] = MappingProxyType(
    {
        **{packet.default: 1 for packet in _UNARY},
        **{overload: 2 for packet in _BINARY for overload in (packet.Tensor, packet.Scalar)},
        **{packet.default: 3 for packet in _TERNARY},
        **{packet.Scalar: 2 for packet in _LERP},
    }
)


@dataclass(frozen=True)
class ListCall:
    """An operator call on single tensors that can be merged with others into one call over lists.

    Attributes:
        target: operator of the call.
        tensors: tensor arguments; if one may be written to, it comes first.
        number: scalar argument that may differ between the merged calls; None: there is none.
        common: scalar argument that must be equal in the merged calls; None: there is none.
        options: keyword arguments, which must be equal in the merged calls.
    """

    target: OpOverload
    tensors: tuple[fx.Node, ...]
    number: Any = None
    common: Any = None
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, node: fx.Node) -> ListCall | None:
        """Return a node's call; None if no operator over lists gives the same result."""
        target, count = node.target, _TENSORS.get(node.target)
        if count is None or not isinstance(target, OpOverload):
            return None
        options = dict(node.kwargs)
        tensors = tuple(argument for argument in node.args if isinstance(argument, fx.Node) and _is_tensor(argument))
        numbers = [argument for argument in node.args if not _is_tensor(argument)]
        if tensors != node.args[: len(tensors)] or len(numbers) > 1:
            return None
        if count == 3 and len(tensors) == 3:
            return cls(target, tensors, numbers[0] if numbers else options.pop("value", 1), options=_items(options))
        number = numbers[0] if numbers else None
        if number is not None and target.overloadpacket is aten.mul_ and not _is_exact(tensors[0]):
            return None
        if target.overloadpacket in _LERP:
            return cls(target, tensors, common=number, options=_items(options)) if len(tensors) == 2 else None
        if number is not None and options:  # a number times alpha
            return None
        if len(tensors) + len(numbers) != count:
            return None
        return cls(target, tensors, number, options=_items(options))

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for calls that can be merged."""
        return self.target, len(self.tensors), self.number is None, self.common, self.options


def call_over_lists(calls: Sequence[ListCall]) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return operator, arguments and keyword arguments of the merged call that replaces calls with equal keys."""
    first = calls[0]
    lists = [list(members) for members in zip(*(call.tensors for call in calls), strict=True)]
    numbers = [call.number for call in calls]
    packet, options = first.target.overloadpacket, dict(first.options)
    if first.common is not None:
        return over_lists(packet, "Scalar"), (*lists, first.common), options
    if first.number is None:
        return over_lists(packet, "default" if len(lists) == 1 else "List"), (*lists,), options
    if all(type(number) is type(first.number) and number == first.number for number in numbers):
        return over_lists(packet, "Scalar"), (*lists, first.number), options
    return over_lists(packet, "ScalarList"), (*lists, numbers), options


def _items(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


def _is_tensor(argument: object) -> bool:
    return isinstance(argument, fx.Node) and isinstance(meta.value(argument), Tensor)


def _is_exact(node: fx.Node) -> bool:
    """Return whether `_foreach_mul_` by a number gives the bits of `mul_`: it rounds once more below fp32."""
    return meta.value(node).dtype.itemsize >= torch.float32.itemsize
