"""Arguments of zgraph's operators, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.compression.low_rank import FactorLayout
from zgraph.dialect.marker_policy import MarkerPolicy
from zgraph.graph import meta
from zgraph.graph.nodes import is_low_rank_left, is_quantize, is_quantize_shards, is_unshard, sent_by
from zgraph.runtime.groups import group_size
from zgraph.runtime.owned_matrices import OwnedMatrices
from zgraph.runtime.shard_layout import ShardLayout


@dataclass(frozen=True)
class MarkerArgs(MarkerPolicy):
    """Arguments that unshard and reduce_grad have in common; `shape` is the shape of the unsharded parameter."""

    handle: fx.Node
    shape: tuple[int, ...]

    @property
    def layout(self) -> ShardLayout:
        return self.layout_of(self.shape)


@dataclass(frozen=True)
class UnshardArgs(MarkerArgs):
    """Arguments of a `zgraph::unshard` node by name."""

    shard: fx.Node

    @classmethod
    def of(cls, node: fx.Node) -> UnshardArgs:
        shard, handle, shape, *policy = cast("tuple[Any, ...]", node.args)
        return cls(*policy, handle=handle, shape=tuple(shape), shard=shard)


@dataclass(frozen=True)
class ReduceArgs(MarkerArgs):
    """Arguments of a `zgraph::reduce_grad` node by name."""

    grad: fx.Node

    @classmethod
    def of(cls, node: fx.Node) -> ReduceArgs:
        grad, handle, *policy = cast("tuple[Any, ...]", node.args)
        return cls(*policy, handle=handle, shape=tuple(meta.tensor_value(grad).shape), grad=grad)

    def flat(self) -> tuple[object, ...]:
        """Return the arguments in the order of the operator `zgraph::reduce_grad`; the inverse of `of`."""
        return self.grad, self.handle, *(getattr(self, entry.name) for entry in fields(MarkerPolicy))


@dataclass(frozen=True)
class QuantizeArgs:
    """Arguments of a `zgraph::quantize_grads` node, by name."""

    grads: list[fx.Node]
    handles: list[fx.Node]
    errors: list[fx.Node]
    method: str
    slot: str
    numels: list[int]
    world: int
    stretches: int
    rank: int
    salt: int
    window: str

    @classmethod
    def of(cls, node: fx.Node) -> QuantizeArgs:
        grads, handles, errors, method, slot, numels, *rest = cast("tuple[Any, ...]", node.args)
        return cls(list(grads), list(handles), list(errors), method, slot, list(numels), *rest)


@dataclass(frozen=True)
class DequantizeArgs:
    """Arguments of a `zgraph::dequantize_sum` node, by name."""

    received: fx.Node
    draw: fx.Node
    method: str
    numels: list[int]
    world: int
    stretches: int
    salt: int
    divisor: int
    dtype: torch.dtype

    @classmethod
    def of(cls, node: fx.Node) -> DequantizeArgs:
        received, draw, method, numels, *rest = cast("tuple[Any, ...]", node.args)
        return cls(received, draw, method, list(numels), *rest)


@dataclass(frozen=True)
class LowRankArgs:
    """Arguments that the three operators of a low-rank reduction have in common, by name."""

    handles: list[fx.Node]
    rows: list[int]
    columns: list[int]
    rank: int

    @classmethod
    def of(cls, node: fx.Node) -> LowRankArgs:
        first = 1 if is_low_rank_left(node) else 2
        handles, rows, columns, rank = cast("tuple[Any, ...]", node.args[first : first + 4])
        return cls(list(handles), list(rows), list(columns), rank)

    @property
    def layout(self) -> FactorLayout:
        return FactorLayout(tuple(self.rows), tuple(self.columns), self.rank)

    @property
    def numel(self) -> int:
        """Number of elements of all matrices together."""
        return sum(rows * columns for rows, columns in zip(self.rows, self.columns, strict=True))


@dataclass(frozen=True)
class OrthogonalizeArgs:
    """Arguments of a `zgraph::orthogonalize` node, by name."""

    marker: fx.Node
    update: fx.Node
    rows: int
    is_sharded: bool
    group_name: str
    coefficients: tuple[float, ...]
    steps: int
    eps: object

    @classmethod
    def of(cls, node: fx.Node) -> OrthogonalizeArgs:
        update, rows, is_sharded, group_name, coefficients, steps, eps = cast("tuple[Any, ...]", node.args)
        return cls(node, update, rows, is_sharded, group_name, tuple(coefficients), steps, eps)

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the whole matrix."""
        return self.rows, meta.tensor_value(self.update).shape[1]

    @property
    def options(self) -> tuple[object, ...]:
        """The last arguments of the operators that compute."""
        return self.coefficients, self.steps, self.eps

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that all matrices of one exchange share."""
        return self.is_sharded, self.group_name, meta.tensor_value(self.update).device, *self.options


@dataclass(frozen=True)
class OwnersArgs:
    """Arguments of an operator that works for the owners of matrices, by name.

    Attributes:
        layout: layout of its buffer.
        steps: iterations for each matrix; 0 if the operator only packs.
    """

    layout: OwnedMatrices
    steps: int

    @classmethod
    def of(cls, node: fx.Node) -> OwnersArgs:
        ops, args = torch.ops.zgraph, cast("tuple[Any, ...]", node.args)
        if node.target is ops.orthogonalize_owned.default:
            _, rows, columns, owners, group_name, _, steps, _ = args
            return cls(OwnedMatrices.of(rows, columns, owners, group_size(group_name)), steps)
        rows, columns = zip(*(meta.tensor_value(one).shape for one in args[0]), strict=True)
        if node.target is ops.send_to_owners.default:
            _, whole_rows, owners, world = args
            return cls(OwnedMatrices.of(whole_rows, columns, owners, world), 0)
        _, owners, group_name, _, steps, _ = args
        return cls(OwnedMatrices.of(rows, columns, owners, group_size(group_name), is_sharded=False), steps)


def layout_of(marker: fx.Node) -> ShardLayout:
    """Return the shard layout of the parameter that an unshard or reduce_grad node gathers or reduces."""
    return UnshardArgs.of(marker).layout if is_unshard(marker) else ReduceArgs.of(marker).layout


def methods_of(start: fx.Node) -> tuple[str, ...]:
    """Return the compression methods of a collective's data, as text; () if the data is not compressed."""
    found: dict[str, None] = {}
    pending = sent_by(start)
    while pending:
        node = pending.pop()
        if is_quantize(node):
            found[QuantizeArgs.of(node).method] = None
        elif is_quantize_shards(node):
            found[str(node.args[1])] = None
        elif _has_bytes(meta.value(node)):  # concatenated payloads, or parts of them
            pending.extend(node.all_input_nodes)
    return tuple(sorted(found))


def _has_bytes(value: Any) -> bool:
    members = cast("Iterable[Any]", value) if isinstance(value, list | tuple) else [value]
    return any(isinstance(member, Tensor) and member.dtype == torch.uint8 for member in members)
