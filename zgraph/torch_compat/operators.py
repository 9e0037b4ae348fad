"""Properties of operators, mostly read from their schemas, and torch's foreach kernels."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket


def foreach_norms(tensors: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """The norm of each tensor, computed as in torch's gradient clipping (`_foreach_norm`, 2.11 - 2.15)."""
    return tuple(torch._foreach_norm(list(tensors), norm_type))


def foreach_scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a factor, as torch's gradient clipping does (`_foreach_mul_`, 2.11 - 2.15)."""
    torch._foreach_mul_(list(tensors), factor)


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call by the names in its schema (`_schema`, 2.11 - 2.15)."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs  # args may be fewer: defaults are left out


def argument_of(node: fx.Node, name: str) -> object:
    """The value of argument `name` in a node's call, or its default; None if the operator lacks it (2.11 - 2.15)."""
    if not isinstance(node.target, OpOverload):
        return None
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def overwritten(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a node's call overwrites in fact.

    The schemas of fused updates say that they write to gradients, too. In fact they do so only if they have a
    `grad_scale` by which to divide gradients.
    """
    grads = None if argument_of(node, "grad_scale") is not None else argument_of(node, "grads")
    kept = frozenset(cast("list[fx.Node]", grads or []))
    return [one for one in written_arguments(node) if one not in kept]


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node's call writes to, by its schema (`_schema`, 2.11 - 2.15)."""
    if not isinstance(node.target, OpOverload):
        return []
    written: list[fx.Node] = []
    for position, name in _written_places(node.target):
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


def returns_alias(target: object) -> bool:
    """Whether the call's result shares storage with its first argument, by its schema (`_schema`, 2.11 - 2.15)."""
    return isinstance(target, OpOverload) and _aliases(target)


@functools.cache
def _aliases(target: OpOverload) -> bool:
    return any(returned.alias_info is not None for returned in target._schema.returns)


def alias_positions(target: object) -> tuple[int | None, ...]:
    """For each result of an operator, the position of the argument whose storage it shares, or None (2.11 - 2.15)."""
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
    """Whether the operator writes to an argument, by its schema (`_schema`, 2.11 - 2.15)."""
    return target._schema.is_mutable


def assigns_data(target: object) -> bool:
    """Whether `target` is Dynamo's form of `tensor.data = value` (`set_` in 2.11 - 2.13, then `shallow_copy_data_`)."""
    names = ("aten.set_.source_Tensor", "aten.shallow_copy_data_")
    return target is Tensor.set_ or str(target).startswith(names)


def is_binary(target: OpOverload) -> bool:
    """Whether the operator is pointwise in two tensors, `self` and `other`, by its schema (`_schema`, 2.11 - 2.15)."""
    arguments = target._schema.arguments
    return len(arguments) > 1 and arguments[1].name == "other" and torch.Tag.pointwise in target.tags


def is_elementwise_over_lists(target: OpOverload) -> bool:
    """Whether the operator computes with lists of tensors element by element, by its name (2.11 - 2.15)."""
    return is_fused_update(target) or str(target).startswith("aten._foreach_")


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator has a kernel for a dispatch key (`_dispatch_has_kernel_for_dispatch_key`, 2.11 - 2.15)."""
    return cast(Any, torch._C)._dispatch_has_kernel_for_dispatch_key(name, key)


def is_fused_update(target: object) -> bool:
    """Whether `target` updates lists of parameters in one kernel, torch's or zgraph's (2.11 - 2.15)."""
    return str(target).startswith(("aten._fused_", "zgraph.fused_adam_."))


def over_lists(packet: OpOverloadPacket, overload: str) -> OpOverload:
    """The variant of an operator for lists of tensors, such as `_foreach_mul_.Scalar` for `mul_` (2.11 - 2.15)."""
    return getattr(getattr(torch.ops.aten, f"_foreach_{packet.__name__}"), overload)


def is_pure(target: OpOverload) -> bool:
    """Whether equal arguments yield equal bits and nothing is written, by schema and tags (`_schema`, 2.11 - 2.15)."""
    random = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    return not target._schema.is_mutable and not random.intersection(target.tags)


def is_tagged_random(target: OpOverload) -> bool:
    """Whether the operator draws from a generator, by its tags (2.11 - 2.15)."""
    return torch.Tag.nondeterministic_seeded in target.tags


def overloads_of(operator: OpOverload | OpOverloadPacket) -> list[OpOverload]:
    """All overloads of an operator (`OpOverloadPacket`, 2.11 - 2.15); for an overload, only itself."""
    if isinstance(operator, OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def is_higher_order(target: object) -> bool:
    """Whether a node's target calls other graphs, as torch.cond does (HigherOrderOperator, 2.11 - 2.15)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def flop_formula(target: object) -> Callable[..., Any] | None:
    """torch's flop formula of an operator: a function of its arguments and `out_val`, with shapes in place of tensors.

    2.11 - 2.15: torch.utils.flop_counter.flop_registry, keyed by overload packet; the module does not export it.
    """
    from torch.utils.flop_counter import flop_registry

    if not isinstance(target, OpOverload):
        return None
    return flop_registry.get(target.overloadpacket)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target; one kernel on CUDA, casts included (`_foreach_copy_`, 2.11 - 2.15)."""
    torch._foreach_copy_(list(targets), list(sources))


def zero_each(targets: Sequence[Tensor]) -> None:
    """Fill each tensor with zeros; one kernel on CUDA (`_foreach_zero_`, 2.11 - 2.15)."""
    torch._foreach_zero_(list(targets))


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to, by its schema (`_schema`, 2.11 - 2.15)."""
    written: list[Tensor] = []
    for position, name in _written_places(func):
        given = args[position] if position < len(args) else kwargs.get(name)
        items = given if isinstance(given, list | tuple) else (given,)
        written.extend(item for item in items if isinstance(item, Tensor))
    return written


def communicates(target: object) -> bool:
    """Whether DTensor calls the operator to exchange local parts (`namespace`, 2.11 - 2.15)."""
    spaces = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
    return getattr(target, "namespace", "") in spaces and "wait_tensor" not in str(target)


def is_profiler(target: object) -> bool:
    """Whether an operator only marks a range for the profiler (`torch.ops.profiler`, 2.11 - 2.15)."""
    return isinstance(target, OpOverload) and target.namespace == "profiler"
