"""Units: modules that gather their parameters when their forward starts, and release them when it ends.

`zgraph.shard` replaces a unit's class by a subclass, whose `forward` gathers first. The unit's parameters become
properties that return the unsharded tensor inside forward, and the sharded DTensor outside. Inside forward,
`parameters()` yields unsharded tensors, too, if gradients are enabled, so a penalty on all parameters gets gradients as
usual.

All ranks gather the whole unit, so ranks whose reads depend on the data still issue the same collectives.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.dialect.markers import unshard
from zgraph.errors import ZgraphError
from zgraph.runtime.window_state import ALONE, OPEN
from zgraph.sharding.context.axis import ContextAxis
from zgraph.sharding.local_shards import local_shards, read_whole
from zgraph.sharding.model.dry_run_load import load_all_or_nothing
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.sharding.model.written_weights import Gathered, as_gathered
from zgraph.sharding.scope import READ, STATE, ModuleState, PlainRead, Scope, ShardedParam, state_of
from zgraph.sharding.whole_units import after_gathers, reduce_all_params
from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.dynamo import (
    break_graph,
    compiles_frames,
    constant_in_graphs,
    is_at_recompile_limit,
    is_inlining,
    never_a_frame,
    no_frames_inside,
    no_graph_breaks,
    raise_through_dynamo,
    traced_body,
)
from zgraph.torch_compat.modules import (
    apply_keeping,
    flat_weights_by_attribute,
    local_parameters,
    tree_flatten,
    tree_unflatten,
)

Before = list[tuple[ModuleState, dict[str, Tensor] | None]]


@no_frames_inside
def gather(param: ShardedParam, scope: Scope) -> Tensor:
    """Return the unsharded parameter (if it is tensor-parallel, this rank's part), gathered by a marker operator.

    Raises:
        ZgraphError: the parameter is no longer the DTensor that `shard` made.
    """
    param.check()
    if torch.compiler.is_compiling() and traced_body() == "control_flow":
        _refuse_in_branch(param.name)
    owner, attribute = param.sites[0]
    parameter = cast(DTensor, local_parameters(owner)[attribute])
    spec = param.spec
    if spec.ignored:
        return _on_device(parameter, spec)
    stage = param.lifetime_stage
    window = _window_of(spec, scope, stage)
    handle = param.handle if scope.handle_of is None else scope.handle_of(param)
    if spec.codes is not None:
        return spec.codes.decode(_unshard(parameter, handle, spec, stage, window), spec.compute_dtype)
    share = scope.gathered if not torch.compiler.is_compiling() else None
    if share is None or not (parameter.requires_grad and torch.is_grad_enabled()):
        return _unshard(parameter, handle, spec, stage, window)
    if param not in share:  # by identity: parts sharded separately may have equal names
        share[param] = _unshard(parameter, handle, spec, stage, window)
    return share[param]


@no_frames_inside
def gather_as_stored(param: ShardedParam, scope: Scope) -> Tensor:
    """Return the unsharded parameter in the dtype in which it is stored; `gather` returns it in `param_dtype`.

    Raises:
        ZgraphError: as for `gather`.
    """
    param.check()
    handle = param.handle if scope.handle_of is None else scope.handle_of(param)
    stage = param.lifetime_stage
    spec = replace(param.spec, compute_dtype=param.spec.dtype)
    return _unshard(param.sharded, handle, spec, stage, _window_of(spec, scope, stage))


@no_frames_inside
def _window_of(spec: ParamSpec, scope: Scope, stage: int) -> str:
    if spec.is_optional:
        return OPEN  # the gradient always waits: `OptionalParameters` reduces it
    return scope.position if stage < 3 else ALONE


@constant_in_graphs
def _refuse_in_branch(name: str) -> None:
    """Refuse a gather inside `torch.cond` or a similar operator, where ranks that take different branches would hang.

    Raises:
        ZgraphError: always.
    """
    raise_through_dynamo(
        f"zgraph: {name} is read inside torch.cond, scan, map or while_loop, where nothing can be gathered: ranks may "
        "take different branches. Let the module whose forward calls it gather first: "
        "zgraph.shard(model, units=[ThatModule]); or read the weight before the call, and use that value inside.",
        ZgraphError,
    )


@no_frames_inside
def _on_device(parameter: DTensor, spec: ParamSpec) -> Tensor:
    """Return a parameter's local part on the computing device, as a differentiable copy if it is offloaded to the host.

    A compiled graph copies an offloaded part in advance instead (`zgraph.compiler.inputs_at_rest`).
    """
    # Dynamo's graph reads `to_local()`, whose own gradient would be a plain DTensor.
    part = parameter.to_local() if torch.compiler.is_compiling() else local_shards([parameter])[0]
    return part if part.device.type == spec.device_type else part.to(spec.device_type)


@no_frames_inside
def _as_read(part: Tensor, param: ShardedParam) -> Tensor:
    """Return a gathered parameter as the module reads it: as a DTensor if the parameter is tensor-parallel."""
    if param.spec.split is not None:
        return param.spec.split.as_read(part)
    return part if param.spec.ignored or torch.compiler.is_compiling() else as_gathered(part, param.name)


@no_frames_inside
def _unshard(parameter: DTensor, handle: Tensor, spec: ParamSpec, stage: int, window: str) -> Tensor:
    layout = spec.layout
    return unshard(
        _on_device(parameter, spec),
        handle,
        layout.shape,
        spec.gather_dtype,
        spec.wire_dtype,
        spec.mean_dtype,
        stage,
        spec.reduction,
        window,
        layout.replica_group,
        layout.gather_group,
    )


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
    """Gather a unit's parameters, run the module's original forward, and release them, even if forward raises."""
    state = state_of(module)
    if state is None:  # built after sharding, such as a slice of an nn.Sequential whose parts are units
        return forward(module, *args, **kwargs)
    scope = state.scope
    body = traced_body() if torch.compiler.is_compiling() else None
    if body == "checkpoint":
        return _run_in_region(forward, module, state, args, kwargs)
    outermost = not scope.active
    if not torch.compiler.is_compiling() and is_at_recompile_limit():
        scope.uncompiled.give_up()
    if outermost:
        if torch.compiler.is_compiling():
            scope.uncompiled.begin_traced()
        else:
            scope.uncompiled.begin(is_compiled=compiles_frames())
        scope.check_optimizers()
        state.check_call()
        if not scope.is_watched:  # a copy of a compiled model, which this guard traces again
            state.watch()
        scope.check_batch((args, kwargs))
        scope.begin()
    before: Before = []
    reads = None if torch.compiler.is_compiling() else Gathered()
    if state.params and not torch.compiler.is_compiling() and scope.runs_outside_graphs:
        scope.uncompiled.note(state.params[0].name, state.reduces_all_params)
    try:
        if state.input_dtype is not None:
            args, kwargs = _cast_inputs(args, kwargs, state.input_dtype)
        plain = state.plain_reads(state.signature) if state.params and body == "" else None
        if plain is None:
            unsharded = _gather_unit(state, before, reads)
        else:
            before.append((state, state.unsharded))
            unsharded = _gather_plain(module, state, plain)
        if outermost and scope.context is not None:
            result = _run_with_context(scope.context, forward, module, state, unsharded, args, kwargs)
        else:
            result = _forward(forward, module, state, unsharded, args, kwargs)
        if not torch.compiler.is_compiling():
            if outermost:
                scope.watch_backward(result)
            elif scope.runs_outside_graphs:
                scope.uncompiled.watch_backward(result)
        return result
    finally:
        for site_state, previous in reversed(before):
            site_state.unsharded = previous
        if outermost:
            scope.end()
        if reads is not None:
            reads.check()


@never_a_frame
def _gather_unit(state: ModuleState, before: Before, reads: Gathered | None) -> list[Tensor]:
    """Gather a unit's parameters, and put them into the state of each module that reads them.

    Args:
        before: gets those modules' states, each with the tensors that it had.
        reads: gets the tensors, to check later that forward has not written to them; None in a graph.
    """
    unsharded: list[Tensor] = []
    for param in state.params:
        part = gather(param, state.scope)
        unsharded.append(part)
        tensor = _as_read(part, param)
        if reads is not None and not param.spec.ignored:
            reads.add(param.name, tensor)
        for site, attribute in param.sites:
            site_state: ModuleState = getattr(site, STATE)
            before.append((site_state, site_state.unsharded))
            site_state.unsharded = {**(site_state.unsharded or {}), attribute: tensor}
    return unsharded


@never_a_frame
def _gather_plain(module: nn.Module, state: ModuleState, reads: tuple[PlainRead, ...]) -> list[Tensor]:
    """Gather a unit's parameters and put them into its state, in few lines: Dynamo traces them for each unit."""
    shards: dict[str, Any] = local_parameters(module)  # pyright: ignore[reportAssignmentType]
    window = state.scope.position
    tensors = {} if state.unsharded is None else {**state.unsharded}
    for param, (attribute, head, stage, reduction, tail) in zip(state.params, reads, strict=True):
        stage = 2 if param.stays_gathered else stage
        position = window if stage < 3 else ALONE
        tensors[attribute] = read_whole(shards[attribute], param.handle, *head, stage, reduction, position, *tail)
    state.unsharded = tensors
    return [tensors[attribute] for attribute, *_ in reads]


@never_a_frame
def _forward(
    forward: Callable[..., Any],
    module: nn.Module,
    state: ModuleState,
    unsharded: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the module's original forward. For a module named in `units`, make all parameters receive gradients."""
    if not state.reduces_all_params:
        return forward(module, *args, **kwargs)
    gathered = after_gathers(state.params, unsharded, state.scope)
    result = forward(module, *args, **kwargs)
    return reduce_all_params(result, module, state.params, unsharded, gathered, state.scope)


@no_frames_inside
def _gathered_alone(param: ShardedParam, scope: Scope) -> Tensor:
    tensor = _as_read(gather(param, scope), param)
    if not torch.compiler.is_compiling() and scope.handle_of is None and not param.spec.ignored:
        scope.reads.add_read(param.name, tensor)  # not needed while a step is traced: its watch sees all writes
    return tensor


@never_a_frame
def _run_with_context(
    context: ContextAxis,
    forward: Callable[..., Any],
    module: nn.Module,
    state: ModuleState,
    unsharded: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the outermost forward of a model whose sequences are shared by ranks."""
    is_traced = torch.compiler.is_compiling()
    inside = context.inside if torch.is_grad_enabled() else context.inside_eval  # Dynamo guards on it
    if inside and (is_traced or not is_in_backward()):
        context.check_targets(inside, sum(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs))[0]))
    if not is_traced:
        with context.calls(module, args, kwargs):
            return _forward(forward, module, state, unsharded, args, kwargs)
    with no_graph_breaks(), context.calls(module, args, kwargs):  # between graphs, tokens would not be followed
        return _forward(forward, module, state, unsharded, args, kwargs)


@never_a_frame
def _run_in_region(
    forward: Callable[..., Any], module: nn.Module, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a unit inside a checkpointed region that is being traced, where code must not write to module state.

    Each read of a parameter has its own marker; the pass dedupe_gathers merges them.
    """
    scope = state.scope
    if not scope.active:
        scope.check_optimizers()
        if scope.has_to_note:  # no module of the model runs before the region and could note it
            _leave_graph(module)
            break_graph("zgraph: a region calls a part of a model while gradients are accumulated")
    if state.input_dtype is not None:
        args, kwargs = _cast_inputs(args, kwargs, state.input_dtype)
    unsharded = [gather(param, scope) for param in state.params] if state.reduces_all_params else []
    if scope.context is None:
        return _forward(forward, module, state, unsharded, args, kwargs)
    with scope.context.calls(module, args, kwargs):  # Dynamo traces a region without the modes around it
        return _forward(forward, module, state, unsharded, args, kwargs)


@constant_in_graphs
def _leave_graph(module: nn.Module) -> None:
    """Warn that a checkpointed region runs uncompiled, because traced code cannot record its window position."""
    states = [state for part in module.modules() if (state := state_of(part)) is not None]
    for state in states:
        for param in state.params:
            state.scope.uncompiled.leave(
                param.name,
                "a checkpointed region calls them while gradients are accumulated, which a region cannot record; call "
                "them in a module around the region that zgraph.shard has sharded",
            )
    states[0].scope.uncompiled.warn()


@constant_in_graphs
def _is_unnoted() -> bool:
    """Return whether the unit being traced is in a checkpointed region, so that `Scope.active` is not set."""
    return is_inlining(_run_in_region)


def _read_property(attribute: str) -> property:
    def read(module: nn.Module) -> Any:
        state: ModuleState | None = module.__dict__.get(STATE)
        # First, as Dynamo traces it for each read.
        if state is not None and state.unsharded is not None and attribute in state.unsharded:
            return state.unsharded[attribute]
        if state is None or attribute not in local_parameters(module):
            return module.__getattr__(attribute)  # as torch reads it; raises if missing
        if attribute in state.by_attribute and (
            state.scope.active or (torch.compiler.is_compiling() and _is_unnoted())
        ):
            # Read by a module other than its owner, such as nn.MultiheadAttention and its out_proj.
            return _gathered_alone(state.by_attribute[attribute], state.scope)
        return local_parameters(module)[attribute]

    return property(read)


def _named_parameters(base: type[nn.Module]) -> Callable[..., Iterator[tuple[str, Any]]]:
    @functools.wraps(base.named_parameters)
    def named_parameters(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        prefix = cast(str, args[0] if args else kwargs.get("prefix", ""))
        state = state_of(self)
        # Without gradients, loops look up devices and dtypes or write; the sharded parameters serve these.
        is_read = state is not None and state.scope.active and torch.is_grad_enabled()
        for name, parameter in base.named_parameters(self, *args, **kwargs):
            yield name, _attribute(self, name.removeprefix(f"{prefix}.")) if is_read else parameter

    return named_parameters


def _attribute(module: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)


@functools.cache
def container_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` whose `parameters()`, inside forward, yields the unsharded tensors."""
    body = {
        "named_parameters": _named_parameters(base),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_zgraph_base": base,
    }
    return type(base.__name__, (base,), body)


@functools.cache
def unit_class(base: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `base` that gathers in forward; `attributes` become properties that return gathered tensors.

    All modules of a type share one subclass, so that equal blocks can share a compiled graph. The subclass has the name
    of `base`, so that printing a model and finding modules by class name work as before.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_unit(base.forward, self, args, kwargs)

    # Dynamo caches what it compiles, and counts recompiles against its limit, by code object: each class needs its own.
    forward.__code__ = forward.__code__.replace(co_qualname=f"{base.__qualname__}.forward")

    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if name in attributes and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            _refuse_replacing(self, name)
        base.__setattr__(self, name, gathering(self, value) if name == "forward" else value)

    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return load_all_or_nothing(self, base.load_state_dict, state_dict, strict, assign)

    body: dict[str, Any] = {attribute: _read_property(attribute) for attribute in attributes}
    body |= {
        "forward": functools.wraps(base.forward)(forward),
        "__setattr__": functools.wraps(base.__setattr__)(set_attribute),
        "_apply": apply_keeping(base, READ),
        "named_parameters": _named_parameters(base),
        "load_state_dict": functools.wraps(base.load_state_dict)(load_state_dict),
        "_zgraph_attributes": attributes,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_zgraph_base": base,
    }
    body |= flat_weights_by_attribute(base)
    return type(base.__name__, (base,), body)


def _refuse_replacing(module: nn.Module, attribute: str) -> NoReturn:
    raise ZgraphError(
        f"zgraph: {attribute} of a sharded {type(module).__name__} is about to become a tensor that is not a "
        "parameter, as torch.nn.utils.prune and weight_norm make it. Do that before zgraph.shard."
    )


def gathering(module: nn.Module, own: Any) -> Any:
    """Return a wrapper around `own`, a forward assigned to a module instance, that gathers the unit's parameters first.

    The wrapper can be copied and inspected like `own`. If `own` is not callable, or is the class's forward, it is
    returned unchanged.
    """
    method = own if isinstance(own, MethodType) and own.__self__ is module else None
    if not callable(own) or (method is not None and method.__func__ is type(module).forward):
        return own

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    function = call if method is None else method.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_unit(function, self, args, kwargs)

    forward.__code__ = forward.__code__.replace(co_qualname=f"{type(module).__qualname__}.own_forward")
    functools.update_wrapper(forward, own if method is None else function, updated=())
    if method is None:
        del forward.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        with contextlib.suppress(TypeError, ValueError):  # callables without a signature
            found = inspect.signature(own)
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = found.replace(  # pyright: ignore[reportFunctionMemberAccess]
                parameters=[first, *found.parameters.values()]
            )
    return MethodType(forward, module)


def outermost_units(module: nn.Module, units: Iterable[nn.Module | type[nn.Module]] | None) -> tuple[str, ...]:
    """Return qualified names of the modules that the user passed as `units`; of nested modules, only the outermost.

    Raises:
        ValueError: the model has no such module.
    """
    names: list[str] = []
    for unit in units or ():
        matching = [
            name
            for name, part in module.named_modules()
            if part is unit or (isinstance(unit, type) and isinstance(part, unit))
        ]
        if not matching:
            shown = unit.__name__ if isinstance(unit, type) else type(unit).__name__
            raise ValueError(f"zgraph.shard: units names {shown}, which the model does not contain; name one it does.")
        names.extend(matching)
    return tuple(
        name for name in dict.fromkeys(names) if not any(name != other and lies_inside(name, other) for other in names)
    )


def lies_inside(name: str, unit: str) -> bool:
    return unit == "" or name == unit or name.startswith(unit + ".")
