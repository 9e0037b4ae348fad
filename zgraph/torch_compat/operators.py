"""Properties of operators, mostly read from their schemas, and calls of torch's foreach kernels."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket


def foreach_norms(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, computed as in torch's gradient clipping (torch 2.11 - 2.15: `_foreach_norm`)."""
    return tuple(torch._foreach_norm(list(tensors), norm_type))


def foreach_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a factor, as in torch's gradient clipping (torch 2.11 - 2.15: `_foreach_mul_`)."""
    torch._foreach_mul_(list(tensors), factor)


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node's call, by their names in the operator's schema (torch 2.11 - 2.15: `_schema`)."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs  # args may be fewer: defaults are left out


def bound_arguments(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name, with defaults (torch 2.13: `_schema`)."""
    declared = target._schema.arguments
    defaults = {one.name: one.default_value for one in declared if one.has_default_value()}
    return defaults | dict(zip((one.name for one in declared), args, strict=False)) | dict(kwargs)


def plain_name(target: OpOverload) -> str:
    """Return the name of an operator without namespace, overload and the underscore of aten's in-place operators.

    torch 2.13: `_schema`.
    """
    name = target._schema.name.partition("::")[2]
    return name.removesuffix("_") if target.namespace == "aten" else name


def argument_of(node: fx.Node, name: str) -> object:
    """Return the argument `name` of a node's call, or its default; None if the operator has no such argument.

    torch 2.11 - 2.15: `_schema`.
    """
    if not isinstance(node.target, OpOverload):
        return None
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def overwritten(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node's call really overwrites.

    These are the arguments that the schema marks as written, without the gradients of a fused optimizer update that
    has no `grad_scale`.
    """
    grads = None if argument_of(node, "grad_scale") is not None else argument_of(node, "grads")
    kept = frozenset(cast("list[fx.Node]", grads or []))
    return [one for one in written_arguments(node) if one not in kept]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node's call writes: those that its schema marks, and statistics of a batch norm.

    torch 2.11 - 2.15: `_schema`.
    """
    if not isinstance(node.target, OpOverload):
        return []
    written: list[fx.Node] = []
    updates = argument_of(node, "training") is True
    for position, name in (*_written_places(node.target), *(_statistics(node.target) if updates else ())):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        items = given if isinstance(given, list | tuple) else (given,)
        written.extend(item for item in items if isinstance(item, fx.Node))
    return written


@functools.cache
def _written_places(target: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _statistics(target: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the places and names of arguments that an operator updates in training, although its schema is silent.

    torch 2.11 - 2.15: `aten::native_batch_norm` and its kin; a graph that is not functionalized calls them.
    """
    if target._schema.name not in ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"):
        return ()
    names = [argument.name for argument in target._schema.arguments]
    return tuple((names.index(name), name) for name in ("running_mean", "running_var"))


def returns_alias(target: object) -> bool:
    """Return whether an operator's result shares storage with an argument (torch 2.11 - 2.15: `_schema`)."""
    return isinstance(target, OpOverload) and _aliases(target)


@functools.cache
def _aliases(target: OpOverload) -> bool:
    return any(returned.alias_info is not None for returned in target._schema.returns)


def alias_positions(target: object) -> tuple[int | None, ...]:
    """For each result of an operator, return the position of the argument whose storage it shares, or None.

    torch 2.11 - 2.15: `_schema`.
    """
    if not isinstance(target, OpOverload):
        return ()
    arguments = target._schema.arguments
    return tuple(
        next(
            (
                position
                for position, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.before_set & returned.alias_info.before_set
            ),
            None,
        )
        if returned.alias_info is not None
        else None
        for returned in target._schema.returns
    )


def is_mutable(target: OpOverload) -> bool:
    """Return whether an operator writes to an argument, by its schema (torch 2.11 - 2.15: `_schema`)."""
    return target._schema.is_mutable


def assigns_data(target: object) -> bool:
    """Return whether `target` is the operator into which Dynamo translates `tensor.data = value`.

    torch 2.11 - 2.13: `set_`; newer versions: `shallow_copy_data_`.
    """
    names = ("aten.set_.source_Tensor", "aten.shallow_copy_data_")
    return target is Tensor.set_ or str(target).startswith(names)


def is_binary(target: OpOverload) -> bool:
    """Return whether an operator is pointwise with an argument `other`, like `add` (torch 2.11 - 2.15: `_schema`)."""
    arguments = target._schema.arguments
    return len(arguments) > 1 and arguments[1].name == "other" and torch.Tag.pointwise in target.tags


def is_elementwise_over_lists(target: OpOverload) -> bool:
    """Return whether an operator is a foreach operator or a fused optimizer update (torch 2.11 - 2.15: by its name)."""
    return is_fused_update(target) or str(target).startswith("aten._foreach_")


def has_kernel(name: str, key: str) -> bool:
    """Return whether an operator has a kernel for a dispatch key.

    torch 2.11 - 2.15: `_dispatch_has_kernel_for_dispatch_key`.
    """
    return cast(Any, torch._C)._dispatch_has_kernel_for_dispatch_key(name, key)


def is_fused_update(target: object) -> bool:
    """Return whether an operator is a fused optimizer update of torch or zgraph (torch 2.11 - 2.15: by its name)."""
    return str(target).startswith(("aten._fused_", "zgraph.packed_adamw_.", "zgraph.momentum_adamw_."))


def over_lists(packet: OpOverloadPacket, overload: str) -> OpOverload:
    """Return the foreach variant of an operator, such as `_foreach_mul_.Scalar` for `mul_` (torch 2.11 - 2.15)."""
    return getattr(getattr(torch.ops.aten, f"_foreach_{packet.__name__}"), overload)


def is_pure(target: OpOverload) -> bool:
    """Return whether an operator is deterministic and writes nothing (torch 2.11 - 2.15: `_schema`, tags)."""
    random = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    return not target._schema.is_mutable and not _statistics(target) and not random.intersection(target.tags)


def is_tagged_random(target: OpOverload) -> bool:
    """Return whether an operator draws random numbers, by its tags (torch 2.11 - 2.15)."""
    return torch.Tag.nondeterministic_seeded in target.tags


def overloads_of(operator: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """Return all overloads of an operator; for an overload, only itself (torch 2.11 - 2.15: `OpOverloadPacket`)."""
    if isinstance(operator, OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def is_higher_order(target: object) -> bool:
    """Return whether a target calls other graphs, like torch.cond (torch 2.11 - 2.15: HigherOrderOperator)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def flop_formula(target: object) -> Callable[..., Any] | None:
    """Return torch's formula for the number of floating-point operations of an operator, or None.

    The formula is a function of the operator's arguments and `out_val`, with shapes in place of tensors. torch 2.11 -
    2.15: torch.utils.flop_counter.flop_registry, which the module does not export.
    """
    from torch.utils.flop_counter import flop_registry

    if not isinstance(target, OpOverload):
        return None
    return flop_registry.get(target.overloadpacket)


def is_of_torch(function: Any) -> bool:
    """Return whether the code of a function is torch's or zgraph's, whatever names the function carries.

    A function that wraps another one is torch's if both are. Functions in C count as torch's.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return not hasattr(function, "__dict__") or isinstance(function, OpOverload | OpOverloadPacket | type)
    if not code.co_filename.startswith(_OWN_FOLDERS):
        return False
    return not hasattr(function, "__wrapped__") or is_of_torch(function.__wrapped__)


_OWN_FOLDERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).resolve().parents[1])
)


def overridden_operator() -> str:
    """Return an operator of aten that AOTAutograd would trace by other code than torch's; "" if there is none.

    torch 2.11 - 2.15: `torch.library._impls`, `OpOverload.py_kernels`.
    """
    for entry in torch.library._impls:
        namespace, name, *_, key = entry.split("/")
        if namespace == "aten" and key.startswith(("Autograd", "Autocast", "Composite", "Functionalize", "Python")):
            return f"aten.{name}"
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
            operator = getattr(packet, overload)
            if any(not is_of_torch(kernel) for kernel in operator.py_kernels.values()):
                return str(operator)
    return ""


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, with casts; one kernel on CUDA (torch 2.11 - 2.15: `_foreach_copy_`)."""
    torch._foreach_copy_(list(targets), list(sources))


def zero_each(targets: Sequence[Tensor]) -> None:
    """Fill each tensor with zeros; one kernel on CUDA (torch 2.11 - 2.15: `_foreach_zero_`)."""
    torch._foreach_zero_(list(targets))


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes to, as `written_arguments` does (torch 2.11 - 2.15: `_schema`)."""
    written: list[Tensor] = []
    names = [argument.name for argument in func._schema.arguments] if _statistics(func) else []
    updates = dict(zip(names, args, strict=False)).get("training", kwargs.get("training"))
    for position, name in (*_written_places(func), *(_statistics(func) if updates else ())):
        given = args[position] if position < len(args) else kwargs.get(name)
        items = given if isinstance(given, list | tuple) else (given,)
        written.extend(item for item in items if isinstance(item, Tensor))
    return written


def communicates(target: object) -> bool:
    """Return whether an operator is a collective, as called by DTensor (torch 2.11 - 2.15: by its namespace)."""
    spaces = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    return getattr(target, "namespace", "") in spaces and "wait_tensor" not in str(target)


def is_profiler(target: object) -> bool:
    """Return whether an operator only marks a range for the profiler (torch 2.11 - 2.15: `torch.ops.profiler`)."""
    return isinstance(target, OpOverload) and target.namespace == "profiler"


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention of CPU tensors; return the result and its log-sum-exps, [batch, heads, queries], fp32 or fp64.

    torch 2.11 - 2.15: the kernel of `scaled_dot_product_attention`, which does not return the second.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return operator(query, key, value, 0.0, is_causal, scale=scale)


def attend_block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of a block's queries, keys and values; result and log-sum-exps may be those of more keys."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return operator(grad, query, key, value, result, lse, 0.0, is_causal, scale=scale)
