"""Units: modules that gather their parameters once when their forward starts and keep them to its end.

A unit's class is replaced by a subclass whose `forward` gathers first, and whose parameters are properties: inside the
forward they read as the whole tensor, outside as the DTensor at rest. Because every rank gathers the whole unit at its
start, reads that depend on the data cannot issue different collectives on different ranks.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.dialect.markers import unshard
from zgraph.errors import ZgraphError
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import ALONE, CLOSING, OPEN, ParameterState, state_behind
from zgraph.sharding.dry_run_load import COMPILED, load_whole_or_nothing
from zgraph.torch_compat.autograd import is_in_backward
from zgraph.torch_compat.dynamo import never_a_frame, no_frames_inside
from zgraph.torch_compat.modules import local_parameters, tree_flatten, tree_unflatten

STATE = "_zgraph"  # the one attribute that zgraph adds to a module


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What the markers need to know of one parameter; equal for equal blocks.

    Attributes:
        shape: of the whole parameter.
        dtype: at rest.
        device_type: where it was sharded.
        compute_dtype: in which it is gathered and read.
        wire_dtype: in which its gradient travels; None: as it arrives.
        mean_dtype: in which the gradient's mean is gathered, see `zgraph.dialect.wire_dtypes.mean_dtype_of`.
        zero_stage: 0 replicated, 1 to 3 sharded on dim 0.
        reduction: "mean" or "sum".
        replicas: process group of the mesh axis across which the shards are replicated; "" for none.
        group_name: process group of the mesh axis over which it is sharded.
        ignored: read as it is, gradient left alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype | None
    mean_dtype: torch.dtype | None
    zero_stage: int
    reduction: str
    replicas: str
    group_name: str
    ignored: bool = False


class Scope:
    """Shared by all modules under one `shard` root: is a forward running, and what has it gathered already?

    Attributes:
        active: a forward is running.
        has_windows: some parameter is of a stage that keeps or lets wait; else `no_sync` changes nothing.
        accumulating: it is under `no_sync`.
        opened: a forward has run under `no_sync` since the last one without.
        window: where the running forward stands in its window.
        last: where the last forward that recorded gradients stood.
        guards_steps: optimizers are watched for steps in an open window.
        report: the `zgraph.Report` of what was compiled for these modules, which this room only keeps; None: nothing.
        machine: that all ranks are on, as far as GPUs tell it; None: unknown.
    """

    def __init__(self) -> None:
        self.active = False
        self.has_windows = False
        self.accumulating = False
        self.opened = False
        self.window: str = ALONE
        self.last: str = ALONE
        self.guards_steps = False
        self.report: object = None
        self.machine: Hardware | None = None
        # Without a compiler autograd keeps every gathered parameter for backward anyway, so a trainable parameter is
        # gathered once per outermost forward: several uses then sum their gradients before the one reduction, as they
        # do in the replicated model. In a compiled graph the pass dedupe_gathers has that duty.
        self.gathered: dict[ShardedParam, Tensor] | None = None
        self.replaced: list[tuple[str, weakref.ref[nn.Parameter]]] = []

    @no_frames_inside
    def begin(self) -> None:
        self.active = True
        self.window = self._next_window()
        if not torch.compiler.is_compiling():
            self.gathered = {}

    @no_frames_inside
    def end(self) -> None:
        self.active = False
        if not torch.compiler.is_compiling():
            self.gathered = None

    def _next_window(self) -> str:
        if not self.has_windows or not torch.is_grad_enabled():
            return ALONE
        if not torch.compiler.is_compiling() and is_in_backward():
            return self.last  # activation checkpointing repeats a forward that has had its place
        if self.accumulating:
            self.opened = True
            self.last = OPEN
        elif self.opened:
            self.opened = False
            self.last = CLOSING
        else:
            self.last = ALONE
        return self.last

    @torch.compiler.assume_constant_result
    def check_optimizers(self) -> None:
        """Refuse to train when an optimizer still steps the parameters that `shard` replaced.

        Raises:
            ZgraphError: names the first such parameter.
        """
        replaced, self.replaced = self.replaced, []
        for name, reference in replaced:
            old = reference()
            if old is not None and _is_held_by_optimizer(old):
                self.replaced = replaced
                raise ZgraphError(
                    f"zgraph: an optimizer created before zgraph.shard still holds {name}, which shard (or "
                    "materialize) has replaced; its steps would change nothing. Create the optimizer after "
                    "zgraph.shard(model) and zgraph.materialize(model)."
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        return memo.setdefault(id(self), Scope())


def _is_held_by_optimizer(parameter: nn.Parameter) -> bool:
    """Whether some optimizer's param_groups list this very tensor."""
    for holder in gc.get_referrers(parameter):
        if not isinstance(holder, list):
            continue
        for group in gc.get_referrers(cast("list[object]", holder)):
            if isinstance(group, dict) and "lr" in group and group.get("params") is holder:
                return True
    return False


@dataclass(frozen=True, eq=False)
class ShardedParam:
    """One parameter that a unit gathers, and every place (module, attribute) that reads it."""

    name: str
    spec: ParamSpec
    handle: Tensor
    sites: tuple[tuple[nn.Module, str], ...]

    @property
    def state(self) -> ParameterState:
        return state_behind(self.handle)

    @property
    def sharded(self) -> DTensor:
        """The parameter itself."""
        owner, attribute = self.sites[0]
        return cast(DTensor, local_parameters(owner)[attribute])

    # Run, not traced: Dynamo would answer a traced raise by skipping the frame for good, also once its cause is mended.
    @torch.compiler.assume_constant_result
    def check(self) -> None:
        """Refuse a parameter that is no longer what `shard` made of it.

        Raises:
            ZgraphError: says what it is now.
        """
        owner, attribute = self.sites[0]
        parameter, spec = local_parameters(owner)[attribute], self.spec
        if not isinstance(parameter, DTensor):
            raise ZgraphError(
                f"zgraph: {self.name} is no longer the DTensor that zgraph.shard made; something has replaced it after "
                "sharding. Load or convert the model before zgraph.shard, or assign a DTensor of the same mesh."
            )
        if parameter.is_meta:
            raise ZgraphError(
                f"zgraph: {self.name} is on the meta device and has no values; call zgraph.materialize(model) after "
                "zgraph.shard and before the first forward, or load a checkpoint into it."
            )
        if (parameter.shape, parameter.dtype, parameter.device.type) != (spec.shape, spec.dtype, spec.device_type):
            raise ZgraphError(
                f"zgraph: {self.name} was sharded as {list(spec.shape)} {spec.dtype} on {spec.device_type} and is now "
                f"{list(parameter.shape)} {parameter.dtype} on {parameter.device.type}. Move, cast or resize the model "
                "before zgraph.shard."
            )


@dataclass(eq=False)
class ModuleState:
    """What zgraph keeps on a module, in the attribute `_zgraph`.

    Attributes:
        scope: shared with every module under the same root.
        reads: parameters gathered when this module's forward starts.
        by_attribute: for each of its own parameters, how to gather it when it is read outside its unit.
        whole: parameters gathered right now, by attribute name.
        tied: this is a named unit, whose parameters all receive a gradient.
        input_dtype: floating-point inputs are cast to it (roots with a param_dtype).
    """

    scope: Scope
    reads: tuple[ShardedParam, ...] = ()
    by_attribute: dict[str, ShardedParam] = field(default_factory=dict[str, ShardedParam])
    whole: dict[str, Tensor] | None = None
    tied: bool = False
    input_dtype: torch.dtype | None = None


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(STATE)


def sharded_parameters(module: nn.Module) -> dict[str, ShardedParam]:
    """Every sharded parameter by its first name in the module, as if nothing was compiled."""
    found: dict[int, tuple[str, ShardedParam]] = {}
    for prefix, part in module.named_modules():
        state = state_of(part)
        for attribute, read in state.by_attribute.items() if state is not None else ():
            name = ".".join(filter(None, (prefix, attribute))).replace(COMPILED, "")
            found.setdefault(id(read.handle), (name, read))
    return dict(found.values())


def window_is_open(module: nn.Module) -> bool:
    """Whether gradients, or copies at stages 1 and 2, wait for a closing forward of some part."""
    states = (state_of(part) for part in module.modules())
    return any(state is not None and state.scope.opened for state in states)


def scope_behind(handle: object) -> Scope | None:
    """The scope of the model whose parameter a handle stands for; None for anything else."""
    if not isinstance(handle, Tensor) or name_of(handle) == "?":
        return None
    state = state_of(state_behind(handle).owner)
    return None if state is None else state.scope


def closes_window(handle: Tensor, window: str) -> bool:
    """Whether an optimizer step follows the backward at hand, to which a marker of that window belongs.

    At stage 3 forwards do not tell their backward that they ran under `no_sync`: there it counts where the backward
    itself runs.
    """
    scope = scope_behind(handle)
    return window != OPEN and not (window == ALONE and scope is not None and scope.accumulating)


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
        return _tie(result, whole) if state.tied else result
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
