"""What a named unit does to communicate alike on all ranks: it gathers and reduces even what a rank never reads.

Without a compiler, gathers run where they are called. In a graph they are dead code if nobody reads them, so there the
unit's outputs depend on all that was gathered in forward, and what goes into its backward on all that is gathered again
for it. All of it is gathered before anything computes with it, in one order, whichever of it a rank reads.
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
from zgraph.torch_compat.dynamo import no_frames_inside, raise_through_dynamo
from zgraph.torch_compat.modules import tree_flatten, tree_unflatten

Rebuild = Callable[[Iterator[Any]], Any]


class _ReduceAllParams(torch.autograd.Function):
    """Identity on a unit's outputs that makes autograd visit all of the unit's gathered parameters.

    A parameter that this rank did not read (an expert without tokens) then joins the reduction with zeros, instead of
    leaving the other ranks waiting.

    Its arguments: how many of the tensors are outputs, the others being parameters; whether backward yields zeros for
    these, and which of them it gathers again; what forward's gathers end in.
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
        # After the gradients as well: else the partitioner would let forward compute it, and backward gather nothing.
        arrived = [grad for grad in grads if not isinstance(grad, DTensor)]
        again = after([*ctx.saved_tensors, *arrived]) if ctx.saved_tensors else None
        if again is not None:
            grads = tuple(_dependent(grad, again) for grad in grads)
        if not ctx.zeros:
            return (None, None, None, None, *grads, *([None] * len(ctx.layouts)))
        # One zero, expanded: no memory. None would do in eager mode, but AOTAutograd cuts inputs whose gradient is
        # always None off the tape, and with them the reduction that the other ranks wait for. Besides, a gradient that
        # autocast has only widened would be sent as it was before, were nothing added to it; zeros cannot be.
        zeros = [torch.zeros((), dtype=dtype, device=device) for _, dtype, device in ctx.layouts]
        if again is not None:  # one of these is always reduced, though nobody may need the other gradients
            zeros[0] = _dependent(zeros[0], again)
        none = [zero.expand(shape) for zero, (shape, _, _) in zip(zeros, ctx.layouts, strict=True)]
        return (None, None, None, None, *grads, *none)


@no_frames_inside
def after(gathered: Sequence[Tensor]) -> Tensor | None:
    """Something without values that is there only after all of these; None for none."""
    if not gathered:
        return None
    return depend(torch.empty(0, dtype=torch.uint8, device=gathered[0].device), list(gathered))


@no_frames_inside
def _dependent(tensor: Tensor, gathered: Tensor | None) -> Tensor:
    if gathered is None or isinstance(tensor, DTensor):  # which knows no operators of ours
        return tensor.view_as(tensor)
    return depend(tensor, [gathered])


@no_frames_inside
def after_gathers(params: Sequence[ShardedParam], unsharded: Sequence[Tensor], scope: Scope) -> Tensor | None:
    """In a graph, what forward's gathers of a unit end in; None if there are none, or they run anyway."""
    if not _is_traced(scope):
        return None
    return after([part for param, part in zip(params, unsharded, strict=True) if _is_gathered(param)])


def _is_traced(scope: Scope) -> bool:
    return torch.compiler.is_compiling() or scope.handle_of is not None


def _is_gathered(param: ShardedParam) -> bool:
    """Whether it takes a gather, though a group of one rank sends nothing; Dynamo cannot ask a group for its size."""
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
    """A unit's outputs, which depend on all that it has gathered, and whose backward visits all of its parameters.

    Args:
        result: of the module's forward.
        params, unsharded: its parameters, and what its forward reads for them.
        gathered: of `after_gathers`.
        scope: the module's.

    Raises:
        ZgraphError: there is no tensor among the outputs, through which backward could come.
    """
    leaves, rebuild = flatten_outputs(result)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    records = torch.is_grad_enabled()
    trains = records and any(part.requires_grad for part in unsharded)
    if trains and not tensors:
        _refuse(type(module).__name__, params[0].name, type(result).__name__)
    floating = [i for i in tensors if leaves[i].is_floating_point()]
    # Where no output needs a gradient, this rank has read nothing trainable, but has to join the reductions anyway.
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
@torch.compiler.assume_constant_result
def _refuse(unit: str, parameter: str, returned: str) -> None:
    raise_through_dynamo(
        f"zgraph: the unit {unit}, which holds {parameter}, returns a {returned} in which no tensor was found, so that "
        "backward could not reduce parameters that a rank has not read. Return a tensor from its forward, or tensors "
        "in a tuple, list, dict or dataclass.",
        ZgraphError,
    )


# --- what a unit returns ----------------------------------------------------------------------------------------------


@no_frames_inside
def flatten_outputs(result: Any) -> tuple[list[Any], Rebuild]:
    """The leaves of a result, and what puts others in their places.

    Beside what pytree knows, dataclasses are taken apart by their fields; where that finds no tensor, any object by its
    attributes. What is taken apart is copied, since it may be kept elsewhere; all else stays what it is.
    """
    leaves, rebuild = _flatten(result, dataclasses.is_dataclass)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, rebuild
    return _flatten(result, lambda leaf: dataclasses.is_dataclass(leaf) or _has_attributes(leaf))


@no_frames_inside
def _flatten(result: Any, opens: Callable[[Any], bool], inside: tuple[Any, ...] = ()) -> tuple[list[Any], Rebuild]:
    """As `flatten_outputs`; `inside` are the objects around the result, which may refer back to them."""
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
    """Whether its attributes make up an object; not so for a dict with attributes, for instance."""
    return not isinstance(leaf, Tensor | type | nn.Module) and type(leaf).__new__ is object.__new__


def _has_attributes(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not callable(leaf)
