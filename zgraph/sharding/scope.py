"""State that the modules of a sharded model share, such as whether a forward is running."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.errors import ZgraphError
from zgraph.runtime.exchanges.steps import Model, guard_steps
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import (
    ALONE,
    CLOSING,
    OPEN,
    Accumulation,
    ParameterState,
    state_behind,
)
from zgraph.sharding.context.axis import ContextAxis
from zgraph.sharding.local_shards import read_whole
from zgraph.sharding.meshes.same_batch import SameBatch
from zgraph.sharding.meshes.same_gradients import SameGradients
from zgraph.sharding.model.dry_run_load import COMPILED
from zgraph.sharding.model.optional_parameters import OptionalParameters
from zgraph.sharding.model.param_spec import ParamSpec
from zgraph.sharding.model.replaced_parameters import ReplacedParameters
from zgraph.sharding.model.uncompiled import Uncompiled
from zgraph.sharding.model.written_weights import Gathered
from zgraph.tiers.placement.resting import Resting
from zgraph.torch_compat.autograd import at_end_of_backward, inside_functional_transform, is_in_backward
from zgraph.torch_compat.dynamo import (
    constant_in_graphs,
    let_into_graphs,
    never_a_frame,
    no_frames_inside,
    raise_through_dynamo,
)
from zgraph.torch_compat.modules import local_parameters, tree_flatten

STATE = "_zgraph"  # the only attribute that zgraph adds to a module
READ = "full_tensor"  # the only attribute that it adds to a parameter


class Scope:
    """State shared by all modules of a model passed to `zgraph.shard`.

    "Window position" is the position of a forward among the forwards of an accumulation window: ALONE, OPEN or CLOSING
    of `zgraph.runtime.window_state`.

    Attributes:
        active: whether a forward is running.
        has_windows: whether some parameter is at a stage that `no_sync` affects (0 to 2).
        accumulating: whether `no_sync` is active.
        accumulation: gradients and gathered parameters held by open windows.
        given: window position of the next forward, as set by a pipeline stage; None: `no_sync` determines it.
        window: window position of the running forward.
        last: window position of the last forward that recorded gradients.
        is_staged: whether a pipeline stage runs these modules; the stage may request a backward in two halves.
        splitting_forwards: number of compiled forwards so far whose backward can run in two halves.
        repeats: whether the backward of an uncompiled forward is running; a forward is then a recomputation by
            activation checkpointing.
        models: for each call of `zgraph.shard`, its parameters, which all ranks of the call's groups step together.
        report: `zgraph.Report` of the graphs compiled for these modules, only stored here; None: no graphs.
        machine: hardware of all ranks, as far as GPU names tell; None: unknown.
        resting: memory of the tensors that these modules offload; None: there is no offload.
        same_batch: check that the ranks of a tensor-parallel group get equal inputs; None: not needed or switched off.
        context: axis whose ranks share each sequence; None: each rank has whole sequences.
        same_gradients: for each tensor-parallel part, a check that its unsplit parameters have equal gradients.
        uncompiled: modules that gather outside of graphs although the model is compiled.
        clocks: clocks of each `zgraph.Metrics` that watches these modules, only stored here.
        optional: for each call of `zgraph.shard` with optional parameters, their reduction.
        is_watched: whether parameters have the hooks that `optional` needs; False in a copy until its first forward.
        replaced: parameters that sharding has replaced; emptied once a forward finds that no optimizer holds one.
        handle_of: while a whole step is traced, function that returns the traced tensor of a parameter's handle; else
            None.
    """

    # Slots for the attributes that forwards write, also at their end. In a Dynamo graph, after a torch.cond or similar,
    # a second write to an attribute in a `__dict__` is lost (2.13: the dict's stand-in keeps stale side effects).
    __slots__ = ("__dict__", "__weakref__", "active", "last", "window")

    def __init__(self) -> None:
        self.active = False
        self.has_windows = False
        self.accumulating = False
        self.accumulation = Accumulation()
        self.given: str | None = None
        self.window: str = ALONE
        self.last: str = ALONE
        self.is_staged = False
        self.splitting_forwards = 0
        self.repeats = False
        self.models: list[Model] = []
        self.report: object = None
        self.machine: Hardware | None = None
        self.resting: Resting | None = None
        self.same_batch: SameBatch | None = None
        self.context: ContextAxis | None = None
        self.same_gradients: list[SameGradients] = []
        self.optional: list[OptionalParameters] = []
        self.is_watched = True
        self.uncompiled = Uncompiled()
        self.clocks: list[Any] = []
        self.handle_of: Callable[[ShardedParam], Tensor] | None = None
        # Without a compiler autograd keeps every gathered parameter for backward anyway, so a trainable parameter is
        # gathered once per outermost forward: several uses then sum their gradients before a single reduction, as in
        # the replicated model. In a compiled graph the pass dedupe_gathers does this.
        self.gathered: dict[ShardedParam, Tensor] | None = None
        self.reads = Gathered()  # parameters gathered individually in the running forward
        self.replaced = ReplacedParameters()
        guard_steps(self)

    @no_frames_inside
    def check_batch(self, inputs: Any) -> None:
        """Check that the ranks of a tensor-parallel group run their first forward on the same batch.

        Raises:
            ZgraphError: the batches differ.
        """
        if self.same_batch is not None and self.same_batch.is_due and not torch.compiler.is_compiling():
            self.same_batch.check(tree_flatten(inputs)[0])

    @no_frames_inside
    def begin(self) -> None:
        self.active = True
        if not torch.compiler.is_compiling():
            self.repeats = self.repeats and is_in_backward()  # a backward that raised did not reset it
            self.gathered = {}
        self.window = self._next_window()

    @no_frames_inside
    def end(self) -> None:
        self.active = False
        if not torch.compiler.is_compiling():
            self.gathered = None
            reads, self.reads = self.reads, Gathered()
            reads.check()

    def _next_window(self) -> str:
        if not self.has_windows or not torch.is_grad_enabled():
            return ALONE
        if self.repeats or (not torch.compiler.is_compiling() and is_in_backward()):
            return self.last  # activation checkpointing repeats a forward that already has its position
        if self.accumulating:
            self.accumulation.opened = True
            self.last = OPEN
        elif self.given is not None:
            self.last = self.given
        elif self.accumulation.opened:
            # Each parameter closes its own window, so parts of the model may be called in any order: a parameter
            # without an open window treats CLOSING like ALONE.
            self.last = CLOSING
        else:
            self.last = ALONE
        return self.last

    @property
    @never_a_frame
    def runs_outside_graphs(self) -> bool:
        """Whether the running forward is of a compiled model; read only by code that runs outside of its graphs."""
        return self.active and (self.gathered is None or self.uncompiled.is_skipped)

    @property
    def position(self) -> str:
        """Window position of the running forward.

        When activation checkpointing recomputes a part of a forward, this is the position of the original forward.
        """
        if self.active:
            return self.window
        return self.last if self.repeats and self.has_windows and torch.is_grad_enabled() else ALONE

    @property
    def has_to_note(self) -> bool:
        """Whether the next forward must record its window position."""
        is_noted = self.accumulating or self.accumulation.opened or self.given is not None
        return is_noted and self.has_windows and torch.is_grad_enabled() and not self.repeats

    @no_frames_inside
    def watch_backward(self, result: Any) -> None:
        """Set `repeats` while a backward runs through `result`, the output of an uncompiled forward."""
        if not self.has_windows or not torch.is_grad_enabled() or is_in_backward():
            return
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)

    @no_frames_inside
    def _backward_begins(self, grad: Tensor) -> None:
        if not self.repeats:
            self.repeats = True
            at_end_of_backward(self._backward_ends)

    @no_frames_inside
    def _backward_ends(self) -> None:
        self.repeats = False

    @constant_in_graphs
    @no_frames_inside
    def check_optimizers(self) -> None:
        """Refuse a forward if offload options forbid training, or an optimizer holds parameters that `shard` replaced.

        Raises:
            ZgraphError: training is not possible; the message names the parameter or the offload option.
        """
        refusal = self.resting.forbids_gradients() if self.resting is not None and torch.is_grad_enabled() else None
        if refusal is not None:
            raise_through_dynamo(refusal, ZgraphError)
        name = self.replaced.held_by_optimizer()
        if name is not None:
            raise_through_dynamo(
                f"zgraph: an optimizer created before zgraph.shard still holds {name}, which shard (or "
                "materialize) has replaced; its steps would change nothing. Create the optimizer after "
                "zgraph.shard(model) and zgraph.materialize(model).",
                ZgraphError,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        if id(self) not in memo:
            memo[id(self)] = copied = Scope()
            copied.has_windows, copied.context = self.has_windows, self.context
            copied.accumulation = copy.deepcopy(self.accumulation, memo)
            copied.models = copy.deepcopy(self.models, memo)
            copied.optional = copy.deepcopy(self.optional, memo)
            for one in copied.optional:
                one.join(copied)
            copied.is_watched = not copied.optional
        return memo[id(self)]


@dataclass(eq=False)
class ShardedParam:
    """A sharded parameter, with every (module, attribute) that reads it.

    Attributes:
        stays_gathered: whether a parameter at stage 3 is kept gathered over a window, as at stage 2.
    """

    name: str
    spec: ParamSpec
    handle: Tensor
    sites: tuple[tuple[nn.Module, str], ...]
    stays_gathered: bool = False

    @property
    def lifetime_stage(self) -> int:
        """ZeRO stage that determines how long the gathered parameter is kept."""
        return 2 if self.stays_gathered else self.spec.layout.zero_stage

    @property
    def state(self) -> ParameterState:
        return state_behind(self.handle)

    def is_plain_in(self, module: nn.Module) -> bool:
        """Return whether only this module reads the parameter, by a single marker on a shard that is on the device."""
        spec = self.spec
        steps = spec.ignored or spec.is_optional or spec.codes is not None or spec.split is not None
        return not steps and spec.rests_on == spec.device_type and len(self.sites) == 1 and self.sites[0][0] is module

    @property
    def sharded(self) -> DTensor:
        """The parameter as a DTensor, as stored between forwards."""
        owner, attribute = self.sites[0]
        return cast(DTensor, local_parameters(owner)[attribute])

    # Run, not traced: Dynamo answers a traced raise by skipping the frame for good, even after the cause is fixed.
    @constant_in_graphs
    def check(self) -> None:
        """Check that the parameter is still the DTensor that `shard` made.

        Raises:
            ZgraphError: the parameter has changed; the message describes it.
        """
        owner, attribute = self.sites[0]
        parameter, spec = local_parameters(owner)[attribute], self.spec
        if not isinstance(parameter, DTensor):
            raise_through_dynamo(
                f"zgraph: {self.name} is no longer the DTensor that zgraph.shard made; something has replaced it after "
                "sharding. Load or convert the model before zgraph.shard, or assign a DTensor of the same mesh.",
                ZgraphError,
            )
        if parameter.is_meta:
            raise_through_dynamo(
                f"zgraph: {self.name} is on the meta device and has no values; call zgraph.materialize(model) after "
                "zgraph.shard and before the first forward, or load a checkpoint into it.",
                ZgraphError,
            )
        if spec.split is not None and "forward" in owner.__dict__ and not torch.is_grad_enabled():
            raise_through_dynamo(
                f"zgraph: {self.name} is read without gradients by a layer that Hugging Face's tensor parallelism has "
                "given another forward, which then computes on plain parts of its own parameters, and zgraph has "
                "sharded these further. Evaluate under torch.enable_grad() and detach the output; or parallelize by "
                "torch.distributed.tensor.parallel, also for generate(), which disables gradients.",
                ZgraphError,
            )
        shape, state = spec.shape, state_of(owner)
        # While a whole step is traced, the parameter's stand-in is on the device.
        is_traced = state is not None and state.scope.handle_of is not None
        device_type = spec.device_type if is_traced else spec.rests_on
        if (parameter.shape, parameter.dtype, parameter.device.type) != (shape, spec.dtype, device_type):
            raise_through_dynamo(
                f"zgraph: {self.name} was sharded as {list(shape)} {spec.dtype} on {device_type} and is now "
                f"{list(parameter.shape)} {parameter.dtype} on {parameter.device.type}. Move, cast or resize the model "
                "before zgraph.shard.",
                ZgraphError,
            )


# Constants of the marker that reads a parameter: the module's attribute, then arguments of `zgraph::unshard`: from the
# shape to the mean's dtype; the stage; the reduction; and the groups, which follow the window. Of built-in types, as
# torch 2.11's Dynamo does not unpack a constant NamedTuple.
PlainRead = tuple[str, tuple[Any, ...], int, str, tuple[str, str]]


def _plain_read(param: ShardedParam) -> PlainRead:
    spec, layout = param.spec, param.spec.layout
    head = (list(layout.shape), spec.gather_dtype, spec.wire_dtype, spec.mean_dtype)
    return param.sites[0][1], head, layout.zero_stage, spec.reduction, (layout.replica_group, layout.gather_group)


@dataclass(eq=False, slots=True)  # see Scope.__slots__
class ModuleState:
    """State of a module, in its attribute `_zgraph`.

    Attributes:
        scope: state shared by all modules of the sharded model.
        params: parameters gathered when this module's forward starts.
        by_attribute: the module's own parameters by attribute, used to gather a parameter that another module reads.
        unsharded: currently gathered parameters, by attribute.
        reduces_all_params: whether the user named the module in `units`, so that all its parameters receive a gradient.
        input_dtype: dtype to which the module's floating-point inputs are cast; only roots with a param_dtype have
            one, unless their parts are cast instead.
        module: module that has this state; a copied module's state has the copy here.
        signature: how the parameters are read, as text on which Dynamo guards.
    """

    scope: Scope
    module: nn.Module
    params: tuple[ShardedParam, ...] = ()
    by_attribute: dict[str, ShardedParam] = field(default_factory=dict[str, ShardedParam])
    unsharded: dict[str, Tensor] | None = None
    reduces_all_params: bool = False
    input_dtype: torch.dtype | None = None
    signature: str = ""

    def add(self, param: ShardedParam) -> None:
        """Let the module gather a parameter when its forward starts."""
        self.params += (param,)
        self.signature += f"{_plain_read(param)} {param.is_plain_in(self.module)}\n"

    @constant_in_graphs
    @no_frames_inside
    def plain_reads(self, signature: str) -> tuple[PlainRead, ...] | None:
        """Check the parameters, and return how to read each; None if one is read by other modules, too, or in steps.

        Args:
            signature: the attribute, on which Dynamo then guards: modules of a class may be sharded in different ways.

        Raises:
            ZgraphError: as for `ShardedParam.check`.
        """
        for param in self.params:
            param.check()
        if self.scope.handle_of is not None or not all(param.is_plain_in(self.module) for param in self.params):
            return None
        let_into_graphs(read_whole)
        return tuple(_plain_read(param) for param in self.params)

    @constant_in_graphs
    @no_frames_inside
    def check_call(self) -> None:
        """Refuse a call of the model inside torch.func, or after trainable parameters were added to it.

        Raises:
            ZgraphError: the call is not supported; the message names new parameters and says what to do.
        """
        owner = f"a sharded {type(self.module).__name__}"
        if inside_functional_transform():
            raise_through_dynamo(
                f"zgraph: {owner} was called inside a transform of torch.func (grad, vmap, jvp, ...), which gathers do "
                "not support; take gradients of inputs by torch.autograd.grad or torch.autograd.functional.",
                ZgraphError,
            )
        if any(_added_to(part) for part in self.module.modules()):
            named = [(prefix, part, name) for prefix, part in self.module.named_modules() for name in _added_to(part)]
            names = ", ".join(f"{prefix}.{name}".lstrip(".") for prefix, _, name in named)
            if any(isinstance(local_parameters(part)[name], DTensor) for _, part, name in named):
                raise_through_dynamo(
                    f"zgraph: {names} of {owner} are DTensors in modules that came after zgraph.shard and do not "
                    "gather them, as torchao's convert_to_float8_training makes them. Convert the model before "
                    "zgraph.shard.",
                    ZgraphError,
                )
            raise_through_dynamo(
                f"zgraph: {names} of {owner} came after zgraph.shard: not sharded, and with gradients of this rank "
                "only. Call zgraph.shard on the model again, which shards only new parameters, then add these to the "
                "optimizer.",
                ZgraphError,
            )
        if self.scope.optional:
            self.watch()  # loading with assign=True replaces parameters

    @constant_in_graphs
    @no_frames_inside
    def watch(self) -> None:
        """Set the hooks that reduce optional parameters."""
        if self.scope.handle_of is not None:
            return  # the hooks of the real parameters are carried to their stand-ins
        for one in self.scope.optional:
            one.watch(self.module.parameters())
        self.scope.is_watched = True


def _added_to(part: nn.Module) -> list[str]:
    """Return names of the module's own trainable parameters that were added after `zgraph.shard`."""
    state = state_of(part)
    return [
        name
        for name, parameter in local_parameters(part).items()
        if parameter is not None and parameter.requires_grad and (state is None or name not in state.by_attribute)
    ]


@never_a_frame
def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get(STATE)


def compute_devices(module: nn.Module) -> list[torch.device]:
    """Return the devices that compute with a model's parameters; offloaded parameters are stored on other devices."""
    states = (state_of(part) for part in module.modules())
    resting = next((state.scope.resting for state in states if state is not None and state.scope.resting), None)
    if resting is not None and resting.computes_elsewhere:
        return [resting.device]
    return list(dict.fromkeys(parameter.device for parameter in module.parameters()))


def sharded_parameters(module: nn.Module) -> dict[str, ShardedParam]:
    """Return sharded parameters by qualified name, without torch.compile's prefixes; tied parameters appear once."""
    found: dict[int, tuple[str, ShardedParam]] = {}
    for prefix, part in module.named_modules():
        state = state_of(part)
        for attribute, param in state.by_attribute.items() if state is not None else ():
            name = ".".join(filter(None, (prefix, attribute))).replace(COMPILED, "")
            found.setdefault(id(param.handle), (name, param))
    return dict(found.values())


def window_is_open(module: nn.Module) -> bool:
    """Return whether any part of a model has unreduced gradients or gathered parameters of an open `no_sync` window."""
    return any(scope.accumulation.opened for scope in scopes_of(module))


def scopes_of(module: nn.Module) -> list[Scope]:
    """Return the shared states of a module's parts: one, unless parts were sharded without a common root."""
    states = (state_of(part) for part in module.modules())
    return list(dict.fromkeys(state.scope for state in states if state is not None))


def scope_behind(handle: object) -> Scope | None:
    """Return the shared state of the model that a parameter's handle belongs to; None if `handle` is not a handle."""
    if not isinstance(handle, Tensor) or name_of(handle) == "?":
        return None
    state = state_of(state_behind(handle).owner)
    return None if state is None else state.scope


def closes_window(handle: Tensor, window: str) -> bool:
    """Return whether the optimizer steps after the backward of a marker, rather than after a later backward.

    Args:
        handle: handle of the marker's parameter.
        window: window position of the marker. At stage 3 it is always ALONE, so the answer then depends on whether the
            backward runs under `no_sync`.
    """
    scope = scope_behind(handle)
    return window != OPEN and not (window == ALONE and scope is not None and scope.accumulating)
