"""Units: modules that gather their parameters once when their forward starts and keep them to its end.

A unit's class is replaced by a subclass whose `forward` gathers first, and whose parameters are properties: inside the
forward they read as the whole tensor, outside as the DTensor at rest. Because every rank gathers the whole unit at its
start, reads that depend on the data cannot issue different collectives on different ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.dialect.markers import unshard
from zgraph.runtime.window_state import ALONE
from zgraph.sharding.dry_run_load import load_whole_or_nothing
from zgraph.sharding.scope import STATE, ModuleState, Scope, ShardedParam, state_of
from zgraph.torch_compat.dynamo import never_a_frame, no_frames_inside
from zgraph.torch_compat.modules import local_parameters, tree_flatten, tree_unflatten


@no_frames_inside
def gather(read: ShardedParam, scope: Scope) -> Tensor:
    """The whole parameter, through the marker.

    Raises:
        ZgraphError: the parameter is no longer what `shard` made of it.
    """
    read.check()
    owner, attribute = read.sites[0]
    parameter = cast(DTensor, local_parameters(owner)[attribute])
    spec = read.spec
    if spec.ignored:
        return parameter.to_local()
    window = scope.window if spec.zero_stage < 3 else ALONE
    share = scope.gathered if not torch.compiler.is_compiling() else None
    if share is None or not (parameter.requires_grad and torch.is_grad_enabled()):
        return _unshard(parameter, read, window)
    if read not in share:  # by identity: parts sharded one by one have parameters of equal names
        share[read] = _unshard(parameter, read, window)
    return share[read]


@no_frames_inside
def _unshard(parameter: DTensor, read: ShardedParam, window: str) -> Tensor:
    spec = read.spec
    return unshard(
        parameter.to_local(),
        read.handle,
        spec.shape,
        spec.compute_dtype,
        spec.wire_dtype,
        spec.mean_dtype,
        spec.zero_stage,
        spec.reduction,
        window,
        spec.replicas,
        spec.group_name,
    )


class _Tie(torch.autograd.Function):
    """Identity on a unit's outputs that makes autograd visit all of the unit's gathered parameters.

    A parameter that this rank did not read (an expert without tokens) then takes part in the reduction with zeros,
    instead of leaving the other ranks waiting.
    """

    @staticmethod
    def forward(ctx: Any, outputs: int, zeros: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.zeros = zeros
        ctx.layouts = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[outputs:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.zeros:
            return (None, None, *grads, *([None] * len(ctx.layouts)))
        # One zero, expanded: no memory. None would do without a compiler, but AOTAutograd cuts inputs whose gradient is
        # always None off the tape, and with them the reduction that the other ranks are waiting for.
        none = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.layouts]
        return (None, None, *grads, *none)


@no_frames_inside
def _tie(result: Any, whole: list[Tensor]) -> Any:
    trainable = [tensor for tensor in whole if tensor.requires_grad]
    leaves, spec = tree_flatten(result)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    # Where no output needs a gradient, this rank has read nothing trainable, and has to take part all the same.
    places = [i for i in tensors if leaves[i].requires_grad] or tensors
    if not trainable or not places:
        return result
    tied = _Tie.apply(len(places), torch.compiler.is_compiling(), *[leaves[i] for i in places], *trainable)
    for place, tensor in zip(places, cast("tuple[Tensor, ...]", tied), strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, spec)


@no_frames_inside
def _cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    leaves, spec = tree_flatten((args, kwargs))
    leaves = [
        leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype else leaf
        for leaf in leaves
    ]
    return tree_unflatten(leaves, spec)


@never_a_frame
def _run_unit(forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, run the module's own forward, release: also when it raises."""
    state = state_of(module)
    if state is None:  # made after sharding, such as a slice of an nn.Sequential: its parts are the units
        return forward(module, *args, **kwargs)
    scope = state.scope
    outermost = not scope.active
    if outermost:
        scope.check_optimizers()
        scope.begin()
    before: list[tuple[ModuleState, dict[str, Tensor] | None]] = []
    try:
        if state.input_dtype is not None:
            args, kwargs = _cast_inputs(args, kwargs, state.input_dtype)
        whole: list[Tensor] = []
        for read in state.reads:
            tensor = gather(read, scope)
            whole.append(tensor)
            for site, attribute in read.sites:
                site_state: ModuleState = getattr(site, STATE)
                before.append((site_state, site_state.whole))
                site_state.whole = {**(site_state.whole or {}), attribute: tensor}
        result = forward(module, *args, **kwargs)
        if state.tied:
            result = _tie(result, whole)
        if outermost and not torch.compiler.is_compiling():
            scope.watch_backward(result)
        return result
    finally:
        for site_state, previous in reversed(before):
            site_state.whole = previous
        if outermost:
            scope.end()


def _read_property(attribute: str) -> property:
    def read(module: nn.Module) -> Any:
        state = state_of(module)
        if state is None:
            return local_parameters(module)[attribute]
        if state.whole is not None and attribute in state.whole:
            return state.whole[attribute]
        if state.scope.active and attribute in state.by_attribute:
            # Read by a module other than its owner, such as nn.MultiheadAttention and its out_proj.
            return gather(state.by_attribute[attribute], state.scope)
        return local_parameters(module)[attribute]

    return property(read)


@functools.cache
def unit_class(base: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `base` that gathers in forward and reads `attributes` through the gathered tensors.

    One class for all modules of a type, or equal blocks could not share a compiled graph. It keeps the name of `base`:
    a model prints, and is found by its class name, as before.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_unit(base.forward, self, args, kwargs)

    # Dynamo keeps what it compiles, and counts recompiles against its limit, by code object: each class needs its own.
    forward.__code__ = forward.__code__.replace(co_qualname=f"{base.__qualname__}.forward")

    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return load_whole_or_nothing(self, base.load_state_dict, state_dict, strict, assign)

    body: dict[str, Any] = {attribute: _read_property(attribute) for attribute in attributes}
    body |= {
        "forward": functools.wraps(base.forward)(forward),
        "load_state_dict": functools.wraps(base.load_state_dict)(load_state_dict),
        "_zgraph_attributes": attributes,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_zgraph_base": base,
    }
    return type(base.__name__, (base,), body)
