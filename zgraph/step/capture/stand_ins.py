"""Stand-ins for a model's parameters, buffers and optimizers while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.window_state import Accumulation
from zgraph.sharding.scope import ShardedParam
from zgraph.sharding.whole_read import carry_read
from zgraph.step.capture.lifted import Held, Lifted
from zgraph.step.capture.parameter_hooks import CarriedHooks
from zgraph.step.capture.traced_optimizer import TracedOptimizer
from zgraph.step.lines.refusals import refusal
from zgraph.step.lines.watch import Watch
from zgraph.torch_compat.dtensor import dtensor_like
from zgraph.torch_compat.modules import local_buffers, local_parameters, replace_parameter

WINDOW = ("accumulation", "window", "last", "repeats", "active", "gathered")  # of a Scope, as a forward leaves it


@dataclass
class StandIns:
    """Traced tensors and optimizers that replace a model's own during one trace.

    Attributes:
        outside: tensors that the function reads from outside, each with its stand-in.
        parameters: leaves that wrap the traced shards, as DTensors if the parameters are DTensors.
        optimizers: stand-ins in the order of `Lifted.optimizers`.
        read: indices of parameters whose gradients were read.
        cleared: indices of parameters whose gradients were set to None before any read.
    """

    lifted: Lifted
    watch: Watch
    parameters: list[Tensor]
    handles: dict[ShardedParam, Tensor]
    buffers: list[Tensor]
    optimizers: list[TracedOptimizer]
    outside: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    read: set[int] = field(default_factory=set[int])
    cleared: set[int] = field(default_factory=set[int])

    @classmethod
    def of(
        cls,
        lifted: Lifted,
        watch: Watch,
        tensors: Sequence[Tensor],
        options: Sequence[Any],
        outside: Sequence[tuple[Tensor, Tensor]],
    ) -> StandIns:
        """Create stand-ins from the traced inputs.

        Args:
            tensors: traced inputs in the order of `Lifted.tensors`.
            options: traced inputs in the order of `OptionInputs`.
            outside: tensors from outside, each with its traced input.
        """
        given = iter(tensors)
        shards = [next(given) for _ in lifted.parameters]
        parameters = [_leaf(shard, one.tensor) for shard, one in zip(shards, lifted.parameters, strict=True)]
        handles = {param: next(given) for param in lifted.handles.values()}
        buffers = [next(given) for _ in lifted.buffers]
        numbers = iter(options)
        optimizers = [TracedOptimizer.of(one, watch, parameters, shards, given, numbers) for one in lifted.optimizers]
        others = [
            (tensor, _leaf(traced, tensor) if isinstance(tensor, DTensor) or tensor.requires_grad else traced)
            for tensor, traced in outside
        ]
        return cls(lifted, watch, parameters, handles, buffers, optimizers, others)

    def __post_init__(self) -> None:
        self._positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}
        self._clears = False

    @contextlib.contextmanager
    def in_place(self, redirected: AbstractContextManager[Any]) -> Generator[None]:
        """Install the stand-ins in the model and optimizers; restore everything afterwards.

        Args:
            redirected: context manager that replaces real tensors by traced ones while hooks on parameters run.
        """
        lifted = self.lifted
        hooks = CarriedHooks(lifted.parameters, self.parameters, redirected)
        scopes = lifted.scopes()
        windows = [{name: getattr(scope, name) for name in WINDOW} for scope in scopes]
        for one, parameter in zip(lifted.parameters, self.parameters, strict=True):
            _put_parameter(one, parameter)
        for one, buffer in zip(lifted.buffers, self.buffers, strict=True):
            _put_buffer(one, buffer)
        for scope in scopes:
            scope.handle_of = self.handle_of
            scope.accumulation = Accumulation()  # for the trace; only its graph knows pending gradients
        model_zero_grad = lifted.model.__dict__.get("zero_grad")
        object.__setattr__(lifted.model, "zero_grad", self._zero_grad_of_model)
        try:
            with contextlib.ExitStack() as stack:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.in_place(self._clear))
                yield
            self._check_after()
            hooks.check()
        finally:
            for one in lifted.parameters:
                _put_parameter(one, one.tensor)
            for one in lifted.buffers:
                _put_buffer(one, one.tensor)
            for scope, window in zip(scopes, windows, strict=True):
                scope.handle_of = None
                for name, value in window.items():
                    setattr(scope, name, value)
            if model_zero_grad is None:
                del lifted.model.__dict__["zero_grad"]
            else:
                object.__setattr__(lifted.model, "zero_grad", model_zero_grad)

    def by_id(self) -> dict[int, Tensor]:
        """Return a map from the ids of real tensors to their stand-ins."""
        pairs = [
            (one.tensor, parameter) for one, parameter in zip(self.lifted.parameters, self.parameters, strict=True)
        ]
        pairs += [(one.tensor, buffer) for one, buffer in zip(self.lifted.buffers, self.buffers, strict=True)]
        return {id(tensor): stand_in for tensor, stand_in in [*pairs, *self.outside]}

    def note_reading(self, tensor: Tensor) -> None:
        """Note that the gradient of `tensor` is read, if `tensor` is a parameter."""
        position = self._positions.get(id(tensor))
        if position is not None and not self._clears:
            self.read.add(position)

    def new_state(self) -> list[tuple[int, int, str, Any]]:
        """Return new entries of optimizer state as (index of the optimizer, index of the parameter, key, value)."""
        return [(number, *entry) for number, one in enumerate(self.optimizers) for entry in one.new_state()]

    def step_unless(self, optimizer: optim.Optimizer, found_inf: Tensor) -> None:
        """Run an optimizer's step on its stand-in; the graph undoes it if `found_inf` is nonzero."""
        for one in self.optimizers:
            if one.lifted.optimizer is optimizer:
                one.step_unless(found_inf)
                return
        raise refusal("steps an optimizer that it was not given", "pass it to training_step")

    def handle_of(self, param: ShardedParam) -> Tensor:
        """Return the traced handle of a parameter.

        Raises:
            ZgraphError: the step's model does not have this parameter.
        """
        if param not in self.handles:
            raise refusal(
                f"reads {param.name}, which is not a parameter of the step's model",
                "pass the module that holds all parameters to training_step",
            )
        return self.handles[param]

    def _zero_grad_of_model(self, set_to_none: bool = True) -> None:
        self._clear(range(len(self.parameters)), set_to_none)

    def _clear(self, positions: Sequence[int], set_to_none: bool) -> None:
        if not set_to_none:
            raise refusal("calls zero_grad(set_to_none=False)", "leave the argument out: gradients become None")
        self._clears = True
        for position in positions:
            if self.parameters[position].grad is None and position not in self.read:
                self.cleared.add(position)
            self.parameters[position].grad = None
        self._clears = False

    def _check_after(self) -> None:
        self._check_bindings("parameter", self.lifted.parameters, self.parameters, local_parameters)
        self._check_bindings("buffer", self.lifted.buffers, self.buffers, local_buffers)
        for tensor, stand_in in self.outside:
            if stand_in.grad is not None:
                raise ZgraphError(
                    f"zgraph.training_step: the step computes a gradient of a tensor of shape {list(tensor.shape)} "
                    "that is not a parameter of its model; put all trained parameters into one module."
                )

    def _check_bindings(
        self,
        kind: str,
        held: Sequence[Held],
        stand_ins: Sequence[Tensor],
        of_module: Callable[[nn.Module], Mapping[str, Tensor | None]],
    ) -> None:
        for one, stand_in in zip(held, stand_ins, strict=True):
            if any(of_module(part).get(attribute) is not stand_in for part, attribute in one.sites):
                raise ZgraphError(
                    f"zgraph.training_step: the step binds another tensor to the {kind} {one.name}; write its values "
                    "in place, with copy_."
                )
            if stand_in.requires_grad != one.tensor.requires_grad:
                raise ZgraphError(
                    f"zgraph.training_step: the step sets requires_grad of the {kind} {one.name}, which would happen "
                    "only while it is captured; set it before the step."
                )


def _leaf(shard: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        leaf = dtensor_like(shard, like).requires_grad_(like.requires_grad)
        carry_read(like, leaf)
        return leaf
    return shard.detach().requires_grad_(like.requires_grad)


def _put_parameter(one: Held, value: Tensor) -> None:
    for part, attribute in one.sites:
        replace_parameter(part, attribute, value)


def _put_buffer(one: Held, value: Tensor) -> None:
    for part, attribute in one.sites:
        local_buffers(part)[attribute] = value
