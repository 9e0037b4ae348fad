"""Make a module named in `units` gather and reduce all its parameters on all ranks, even unread ones.

In eager mode, gathers run where they are called. In a graph, unread gathers would be removed as dead code. So the
module's outputs are made to depend on all gathers of forward, and its incoming gradients on all gathers of backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.dialect.dependence import depend
from zgraph.errors import ZgraphError
from zgraph.sharding.scope import Scope, ShardedParam
from zgraph.torch_compat.dynamo import constant_in_graphs, no_frames_inside, raise_through_dynamo
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten

Rebuild = Callable[[Iterator[Any]], Any]


class _ReduceAllParams(torch.autograd.Function):
    """Identity on a unit's outputs whose backward passes through all of the unit's gathered parameters.

    A parameter that this rank did not read (an expert without tokens) thus gets a zero gradient and is reduced; else
    the other ranks would wait for this rank.

    Args of `forward`:
        outputs: number of outputs in `tensors`.
        zeros: whether backward returns zeros for the parameters.
        again: for each parameter, whether backward gathers it again.
        gathered: result of `after_gathers`.
        tensors: the outputs, then the gathered parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: int, zeros: bool, again: tuple[bool, ...], gathered: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        unsharded = tensors[outputs:]
        ctx.zeros = zeros
        ctx.layouts = [(part.shape, part.dtype, part.device) for part in unsharded]
        ctx.save_for_backward(*(part for part, is_saved in zip(unsharded, again, strict=True) if is_saved))
        return tuple(_dependent(tensor, gathered) for tensor in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Depends on the gradients, too: else the partitioner would compute it in forward, and backward gather nothing.
        arrived = [grad for grad in grads if not isinstance(grad, DTensor)]
        again = after([*ctx.saved_tensors, *arrived]) if ctx.saved_tensors else None
        if again is not None:
            grads = tuple(_dependent(grad, again) for grad in grads)
        if not ctx.zeros:
            return (None, None, None, None, *grads, *([None] * len(ctx.layouts)))
        # One expanded zero needs no memory. None would do in eager mode, but AOTAutograd removes inputs whose gradient
        # is always None from the tape, and with them the reduction that the other ranks wait for. Also, a gradient that
        # autocast has only widened would be sent in its narrow dtype unless zeros were added to it.
        zeros = [torch.zeros((), dtype=dtype, device=device) for _, dtype, device in ctx.layouts]
        if again is not None:  # one of the zeros is always reduced, even if the other gradients are unused
            zeros[0] = _dependent(zeros[0], again)
        none = [zero.expand(shape) for zero, (shape, _, _) in zip(zeros, ctx.layouts, strict=True)]
        return (None, None, None, None, *grads, *none)


@no_frames_inside
def after(gathered: Sequence[Tensor]) -> Tensor | None:
    """Return an empty tensor that depends on all given tensors; None if there are none."""
    if not gathered:
        return None
    return depend(torch.empty(0, dtype=torch.uint8, device=gathered[0].device), list(gathered))


@no_frames_inside
def _dependent(tensor: Tensor, gathered: Tensor | None) -> Tensor:
    if gathered is None or isinstance(tensor, DTensor):  # DTensors do not support zgraph's operators
        return tensor.view_as(tensor)
    return depend(tensor, [gathered])


@no_frames_inside
def after_gathers(params: Sequence[ShardedParam], unsharded: Sequence[Tensor], scope: Scope) -> Tensor | None:
    """Return an empty tensor that depends on all gathers of a unit; None without gathers, or in eager mode."""
    if not _is_traced(scope):
        return None
    return after([part for param, part in zip(params, unsharded, strict=True) if _is_gathered(param)])


def _is_traced(scope: Scope) -> bool:
    return torch.compiler.is_compiling() or scope.handle_of is not None


def _is_gathered(param: ShardedParam) -> bool:
    """Return whether reading a parameter runs a gather, even if the group has a single rank."""
    return param.spec.layout.is_sharded and not param.spec.ignored


@no_frames_inside
def reduce_all_params(
    result: Any,
    module: nn.Module,
    params: Sequence[ShardedParam],
    unsharded: Sequence[Tensor],
    gathered: Tensor | None,
    scope: Scope,
) -> Any:
    """Return a unit's outputs, changed to depend on all gathers of the unit, and to give all its parameters a gradient.

    Args:
        result: return value of the module's forward.
        module: the unit.
        params: parameters of the unit.
        unsharded: tensors that forward reads for `params`, in the same order.
        gathered: result of `after_gathers`.
        scope: shared state of the model.

    Raises:
        ZgraphError: the outputs contain no tensor, so backward cannot reach the parameters.
    """
    leaves, rebuild = flatten_outputs(result)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    records = torch.is_grad_enabled()
    trains = records and any(part.requires_grad for part in unsharded)
    if trains and not tensors:
        _refuse(type(module).__name__, params[0].name, type(result).__name__)
    floating = [i for i in tensors if leaves[i].is_floating_point()]
    # If no output needs a gradient, this rank has read no trainable parameter, but must join the reductions anyway.
    places = [i for i in floating if leaves[i].requires_grad] or (floating if trains else [])
    if not records or not places:
        if gathered is None:
            return result
        for i in floating or tensors:
            leaves[i] = _dependent(leaves[i], gathered)
        return rebuild(iter(leaves))
    again = [gathered is not None and _is_gathered(param) and param.lifetime_stage == 3 for param in params]
    visited = [i for i, part in enumerate(unsharded) if part.requires_grad or again[i]]
    visited.sort(key=lambda i: not unsharded[i].requires_grad)  # the first one is reduced, if any is
    if visited or gathered is not None:
        outputs = _ReduceAllParams.apply(
            len(places),
            _is_traced(scope),
            tuple(again[i] for i in visited),
            gathered,
            *(leaves[i] for i in places),
            *(unsharded[i] for i in visited),
        )
        for i, tensor in zip(places, cast("tuple[Tensor, ...]", outputs), strict=True):
            leaves[i] = tensor
    return rebuild(iter(leaves))


# Run, not traced: see `ShardedParam.check`.
@constant_in_graphs
def _refuse(unit: str, parameter: str, returned: str) -> None:
    raise_through_dynamo(
        f"zgraph: the unit {unit}, which holds {parameter}, returns a {returned} in which no tensor was found, so "
        "backward could not reduce parameters that a rank has not read. Return a tensor from its forward, or tensors "
        "in a tuple, list, dict or dataclass.",
        ZgraphError,
    )


# --- outputs of a unit ------------------------------------------------------------------------------------------------


@no_frames_inside
def flatten_outputs(result: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a module's output, and a function that rebuilds the output from other leaves.

    Flattens pytree's types, and dataclasses by their fields. If the leaves then contain no tensor, other objects are
    flattened, too, by their attributes. Rebuilding copies the flattened objects.
    """
    leaves, rebuild = _flatten(result, dataclasses.is_dataclass)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, rebuild
    return _flatten(result, lambda leaf: dataclasses.is_dataclass(leaf) or _has_attributes(leaf))


@no_frames_inside
def _flatten(result: Any, opens: Callable[[Any], bool], inside: tuple[Any, ...] = ()) -> tuple[list[Any], Rebuild]:
    """Flatten like `flatten_outputs`, but open only the objects for which `opens` returns true.

    `inside` are the objects that contain `result`; they are not opened again.
    """
    found, spec = tree_flatten(result)
    leaves: list[Any] = []
    parts: list[Rebuild | None] = []
    for leaf in found:
        below, rebuild = [leaf], None
        if _is_copied_by_attributes(leaf) and opens(leaf) and not any(leaf is one for one in inside):
            inner, rebuild = _flatten_object(leaf, opens, (*inside, leaf))
            below, rebuild = (inner, rebuild) if any(isinstance(one, Tensor) for one in inner) else (below, None)
        leaves.extend(below)
        parts.append(rebuild)

    def rebuilt(given: Iterator[Any]) -> Any:
        return tree_unflatten([next(given) if part is None else part(given) for part in parts], spec)

    return leaves, rebuilt


@no_frames_inside
def _flatten_object(value: Any, opens: Callable[[Any], bool], inside: tuple[Any, ...]) -> tuple[list[Any], Rebuild]:
    attributes = _attributes(value)
    leaves, rebuild = _flatten(list(attributes.values()), opens, inside)

    def rebuilt(given: Iterator[Any]) -> Any:
        copied = object.__new__(type(value))
        for name, attribute in zip(attributes, rebuild(given), strict=True):
            object.__setattr__(copied, name, attribute)  # also where the class is frozen
        return copied

    return leaves, rebuilt


@no_frames_inside
def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):  # may have slots
        found |= {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if hasattr(value, one.name)}
    return found


def _is_copied_by_attributes(leaf: Any) -> bool:
    """Return whether an object can be copied by copying its attributes; False for subclasses of dict, for example."""
    return not isinstance(leaf, Tensor | type | nn.Module) and type(leaf).__new__ is object.__new__


def _has_attributes(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not callable(leaf)
