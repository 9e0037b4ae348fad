"""Replaces operators of `torch.ops` by torch's Python functions, whose calls take half the time.

An overload in `torch.ops` parses its arguments by its schema at each call; functions such as `torch.mm` have compiled
parsers. Both call the same kernel, so results are bitwise equal.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx

from zgraph.torch_compat.operators import OpOverload

aten = torch.ops.aten

_SAME_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "embedding", "native_layer_norm", "native_dropout"),
    *("t", "permute", "clone", "cat", "stack", "zeros_like", "ones_like", "empty_like", "tril", "triu"),
    *("tanh", "sigmoid", "relu", "exp", "log", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf"),
    *("maximum", "minimum", "mean", "amax", "_softmax", "_log_softmax", "_foreach_sqrt", "_foreach_neg"),
)
# Functions that accept the arguments of an overload unchanged, by position and by name, and call exactly that overload
# (torch 2.11 - 2.15).
FUNCTIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        **{getattr(aten, name).default: getattr(torch, name) for name in _SAME_NAMES},
        aten.view.default: Tensor.view,
        aten.expand.default: Tensor.expand,
        aten.reshape.default: Tensor.reshape,
        aten.split_with_sizes.default: torch.split_with_sizes,
        aten.transpose.int: torch.transpose,
        aten.unsqueeze.default: torch.unsqueeze,
        aten.squeeze.dim: torch.squeeze,
        aten.select.int: torch.select,
        aten.unbind.int: torch.unbind,
        aten.add.Tensor: torch.add,
        aten.sub.Tensor: torch.sub,
        aten.mul.Tensor: torch.mul,
        aten.div.Tensor: torch.div,
        aten.where.self: torch.where,
        aten.pow.Tensor_Scalar: torch.pow,
        aten.sum.dim_IntList: torch.sum,
        aten.mean.dim: torch.mean,
        aten.gelu.default: torch.nn.functional.gelu,
        aten._foreach_add_.Scalar: torch._foreach_add_,
        aten._foreach_add_.List: torch._foreach_add_,
        aten._foreach_mul_.Scalar: torch._foreach_mul_,
        aten._foreach_lerp_.Scalar: torch._foreach_lerp_,
        aten._fused_adam_.tensor_lr: torch._fused_adam_,
        aten._fused_adamw_.tensor_lr: torch._fused_adamw_,
    }
)


def function_for(node: fx.Node) -> Callable[..., Any]:
    """Return the fastest callable for a node's operator: a function in `FUNCTIONS`, or else the overload's `_op`.

    `FUNCTIONS` does not apply if an argument is a number where the schema has a tensor (torch 2.11 - 2.15: `_schema`).
    """
    operator = node.target
    assert isinstance(operator, OpOverload)
    function = FUNCTIONS.get(operator)
    if function is not None:
        names = [argument.name for argument in operator._schema.arguments if str(argument.type) == "Tensor"]
        given = dict(zip([argument.name for argument in operator._schema.arguments], node.args, strict=False))
        if all(isinstance((given | node.kwargs).get(name), fx.Node) for name in names):
            return function
    entry: Any = partial(operator._op)
    # Its name in the generated program.
    entry.__name__, entry.__module__ = str(operator).replace(".", "_"), __name__
    return entry


def flatten_each(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten and concatenate contiguous tensors (torch 2.11 - 2.15: `flatten_dense_tensors`)."""
    return cast(Any, torch._C)._nn.flatten_dense_tensors(tensors)


def views_of(buffer: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split a vector into consecutive views with the shapes of the tensors in `like`, none of which may be empty.

    torch 2.11 - 2.15: `unflatten_dense_tensors`, which gives an empty tensor the shape [0].
    """
    return cast(Any, torch._C)._nn.unflatten_dense_tensors(buffer, like)


def rows_as(buffer: Tensor, index: Tensor, width: int, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy rows of a buffer into one vector, and split the vector into views with the shapes of the tensors in `like`.

    Args:
        buffer: contiguous tensor of any shape, treated as [rows, width].
        index: [n] int64, numbers of the rows to copy, in order.
        width: number of elements per row.
        like: non-empty tensors with n * width elements together; only their shapes are used.
    """
    return views_of(buffer.view(-1, width).index_select(0, index).view(-1), like)


def interleave(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Cut each tensor's rows into `count` chunks; row r of the result has the r-th chunk of every tensor.

    torch 2.11 - 2.15: `_chunk_cat`.
    """
    return torch._chunk_cat(list(tensors), 0, count)
