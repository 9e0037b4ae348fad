"""What zgraph keeps of a sharded model: its parameters, its modules, and the forward that is running."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.analysis.hardware import Hardware
from zgraph.errors import ZgraphError
from zgraph.runtime.handle import name_of
from zgraph.runtime.window_state import ALONE, CLOSING, OPEN, ParameterState, state_behind
from zgraph.sharding.dry_run_load import COMPILED
from zgraph.torch_compat.autograd import at_end_of_backward, is_in_backward
from zgraph.torch_compat.dynamo import no_frames_inside
from zgraph.torch_compat.modules import local_parameters, tree_flatten

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
        repeats: a backward runs through what an uncompiled forward has returned. Compiled parts of it that activation
            checkpointing repeats cannot ask autograd; they are compiled once more for this.
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
        self.repeats = False
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
        if not torch.compiler.is_compiling():
            self.repeats = self.repeats and is_in_backward()  # one that raised has not told its end
            self.gathered = {}
        self.window = self._next_window()

    @no_frames_inside
    def end(self) -> None:
        self.active = False
        if not torch.compiler.is_compiling():
            self.gathered = None

    def _next_window(self) -> str:
        if not self.has_windows or not torch.is_grad_enabled():
            return ALONE
        if self.repeats or (not torch.compiler.is_compiling() and is_in_backward()):
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

    @no_frames_inside
    def watch_backward(self, result: Any) -> None:
        """Note when a backward begins at what an uncompiled forward returns, and when it ends."""
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
