"""What stands in for a model's parameters and buffers, and for its optimizer, while a step is traced."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.optimizers.local_step import SCALARS
from zgraph.sharding.scope import Scope, ShardedParam
from zgraph.step.lifted import Held, Lifted, local
from zgraph.step.option_inputs import with_inputs
from zgraph.step.refusals import ELEMENT_WISE
from zgraph.step.user_line import user_line
from zgraph.step.watch import Watch, refusal
from zgraph.torch_compat.dtensor import dtensor_like, local_of
from zgraph.torch_compat.modules import local_buffers, plain_step, replace_parameter

_WINDOW = ("opened", "window", "last", "repeats", "active", "gathered")  # of a Scope, as a forward leaves it


@dataclass
class StandIns:
    """Stand-ins of one trace.

    Attributes:
        outside: tensors that the function reads from outside, and what stands in for them.
        parameters: leaves that wrap the traced shards, as DTensors where the parameters are.
        shards: these shards.
        stepped_on: what the optimizer steps on: shards, or parameters if it is not known to be element-wise.
        state: its state, by what it steps on; what the step adds is new.
        stepped: whether the optimizer has taken its step.
        skip: [] bool, whether that step changes nothing; None if it is always taken.
        clears_first: whether gradients were set to None before the first backward.
    """

    lifted: Lifted
    watch: Watch
    parameters: list[Tensor]
    shards: list[Tensor]
    stepped_on: list[Tensor]
    handles: dict[ShardedParam, Tensor]
    buffers: list[Tensor]
    options: Sequence[Any]
    outside: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    state: dict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    stepped: bool = False
    skip: Tensor | None = None
    clears_first: bool = False

    @classmethod
    def of(
        cls,
        lifted: Lifted,
        watch: Watch,
        tensors: Sequence[Tensor],
        options: Sequence[Any],
        outside: Sequence[tuple[Tensor, Tensor]],
    ) -> StandIns:
        """Make them from the traced inputs, which are in the order of `Lifted.tensors` and of `OptionInputs`.

        Args:
            outside: tensors from outside, each with its traced input.
        """
        given = iter(tensors)
        shards = [next(given) for _ in lifted.parameters]
        parameters = [_leaf(shard, one.tensor) for shard, one in zip(shards, lifted.parameters, strict=True)]
        handles = {param: next(given) for param in lifted.handles.values()}
        buffers = [next(given) for _ in lifted.buffers]
        on_shards = type(lifted.optimizer) in ELEMENT_WISE
        stepped_on = shards if on_shards else parameters
        found = cls(lifted, watch, parameters, shards, stepped_on, handles, buffers, options)
        found.outside = [(tensor, _leaf(traced, tensor)) for tensor, traced in outside]
        for position, key, value in lifted.state_entries():
            entry = next(given) if isinstance(value, Tensor) else value
            if isinstance(value, DTensor) and not on_shards:
                entry = dtensor_like(entry, value)
            found.state[stepped_on[position]][key] = entry
        return found

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Put them where the user's lines look for model and optimizer; afterwards all is as it was."""
        lifted, optimizer = self.lifted, self.lifted.optimizer
        scopes = lifted.scopes()
        windows = [{name: getattr(scope, name) for name in _WINDOW} for scope in scopes]
        groups, own = optimizer.param_groups, {key: optimizer.__dict__.get(key) for key in ("step", "zero_grad")}
        traced_groups = self._groups()
        for one, parameter in zip(lifted.parameters, self.parameters, strict=True):
            _put_parameter(one, parameter)
        for one, buffer in zip(lifted.buffers, self.buffers, strict=True):
            _put_buffer(one, buffer)
        for scope in scopes:
            scope.handle_of = self._handle_of
        optimizer.param_groups = traced_groups
        before = [_options(group) for group in traced_groups]
        optimizer.__dict__["step"], optimizer.__dict__["zero_grad"] = self._step, self._zero_grad
        model_zero_grad = lifted.model.__dict__.get("zero_grad")
        object.__setattr__(lifted.model, "zero_grad", self._zero_grad_of_model)
        try:
            yield
            self._check_after(scopes, before, [_options(group) for group in traced_groups])
        finally:
            for one in lifted.parameters:
                _put_parameter(one, one.tensor)
            for one in lifted.buffers:
                _put_buffer(one, one.tensor)
            for scope, window in zip(scopes, windows, strict=True):
                scope.handle_of = None
                for name, value in window.items():
                    setattr(scope, name, value)
            optimizer.param_groups = groups
            for key, value in own.items():
                if value is None:
                    del optimizer.__dict__[key]
                else:
                    optimizer.__dict__[key] = value
            if model_zero_grad is None:
                del lifted.model.__dict__["zero_grad"]
            else:
                object.__setattr__(lifted.model, "zero_grad", model_zero_grad)

    def by_id(self) -> dict[int, Tensor]:
        """Stand-ins by the ids of what they stand for."""
        pairs = [
            (one.tensor, parameter) for one, parameter in zip(self.lifted.parameters, self.parameters, strict=True)
        ]
        pairs += [(one.tensor, buffer) for one, buffer in zip(self.lifted.buffers, self.buffers, strict=True)]
        return {id(tensor): stand_in for tensor, stand_in in [*pairs, *self.outside]}

    def new_state(self) -> list[tuple[int, str, Any]]:
        """(position, key, value) of what the step has put into the optimizer's state.

        Raises:
            ZgraphError: it has changed a number there, which would stay what it is now.
        """
        known = {(position, key): value for position, key, value in self.lifted.state_entries()}
        before = {id(value) for entries in self.known.values() for value in entries.values()}
        found: list[tuple[int, str, Any]] = []
        for position in self.lifted.stepped():
            for key, value in self.state.get(self.stepped_on[position], {}).items():
                if (position, key) not in known or (isinstance(value, Tensor) and id(value) not in before):
                    found.append((position, key, value))
                elif not isinstance(value, Tensor) and value != known[position, key]:
                    raise _counts(
                        self.lifted.optimizer, f'state["{key}"]', "state as a tensor, such as torch.zeros(())"
                    )
        return found

    def layout_of(self, position: int, key: str, value: Tensor) -> DTensor | None:
        """How a new entry of the optimizer's state lies: like this DTensor, or whole on each rank."""
        if self.stepped_on is not self.shards:
            return value if isinstance(value, DTensor) else None
        parameter = self.parameters[position]
        return parameter if isinstance(parameter, DTensor) and key not in SCALARS else None

    def __post_init__(self) -> None:
        self.known: dict[Tensor, dict[str, Any]] = {}

    def _groups(self) -> list[dict[str, Any]]:
        self.known = {one: dict(entries) for one, entries in self.state.items()}
        inputs = iter(self.options)
        return [
            {**with_inputs(group, inputs), "params": [self.parameters[position] for position in positions]}
            for group, positions in zip(self.lifted.optimizer.param_groups, self.lifted.positions, strict=True)
        ]

    def _handle_of(self, param: ShardedParam) -> Tensor:
        if self.stepped:
            raise refusal(
                f"runs a forward that reads {param.name} after optimizer.step()",
                "call the optimizer's step after all forwards and backwards, once",
            )
        if param not in self.handles:
            raise refusal(
                f"reads {param.name}, which is not a parameter of the step's model",
                "pass the module that holds all parameters to training_step",
            )
        return self.handles[param]

    def step_unless(self, optimizer: optim.Optimizer, found_inf: Tensor) -> None:
        """Let the optimizer step, and undo it where an inf was found.

        The optimizer works on copies, of which parameters and state take over what they may: an inf or a NaN that it
        computes meanwhile goes nowhere, and nobody waits for the flag.
        """
        if optimizer is not self.lifted.optimizer:
            raise refusal("steps an optimizer that it was not given", "pass it to training_step")
        self.skip = found_inf != 0
        with torch.no_grad():
            self._step_on(
                [
                    one.detach().clone() if parameter.grad is not None else one
                    for one, parameter in zip(self.stepped_on, self.parameters, strict=True)
                ]
            )

    def _step(self, closure: Any = None) -> None:
        """The optimizer's own step, on local shards."""
        if closure is not None:
            raise refusal("passes a closure to optimizer.step()", "compute the loss before the step")
        self._step_on(self.stepped_on)

    def _step_on(self, given: Sequence[Tensor]) -> None:
        if self.stepped:
            raise refusal("calls optimizer.step() a second time", "write one step of the optimizer per call")
        if any(scope.opened for scope in self.lifted.scopes()):
            raise refusal(
                "calls optimizer.step() while the window of zgraph.no_sync is open, so gradients are not reduced",
                "run the last forward and backward outside of no_sync first",
            )
        optimizer, state = self.lifted.optimizer, self._state_of(given)
        for parameter, one in zip(self.parameters, given, strict=True):
            if one is not parameter:
                local_one = parameter.grad is not None and not isinstance(one, DTensor)
                one.grad = (
                    _local_grad(parameter, parameter.grad)
                    if local_one and parameter.grad is not None
                    else parameter.grad
                )
        groups = [
            {**group, "params": [given[position] for position in positions]}
            for group, positions in zip(optimizer.param_groups, self.lifted.positions, strict=True)
        ]
        before = [_options(group) for group in groups]
        stand_in: optim.Optimizer = object.__new__(type(optimizer))
        stand_in.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": state}
        with self.watch.reading_values():
            plain_step(optimizer)(stand_in)
        if before != [_options(group) for group in groups]:
            raise _counts(optimizer, "param_groups", "state as a tensor for each parameter")
        for name, value in optimizer.__dict__.items():
            if name[0] != "_" and name not in ("param_groups", "state") and stand_in.__dict__.get(name) is not value:
                raise _counts(optimizer, f"self.{name}", "state as a tensor for each parameter")
        self.stepped = True
        for parameter, one, copy in zip(self.parameters, self.stepped_on, given, strict=True):
            if copy is not parameter:
                copy.grad = None
            if copy is not one:
                self._take_over(one, copy, state[copy])

    def _state_of(self, given: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state, or copies of it for copies of what it steps on."""
        if all(copy is one for copy, one in zip(given, self.stepped_on, strict=True)):
            return self.state
        found: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for copy, one in zip(given, self.stepped_on, strict=True):
            if one in self.state:
                entries = self.state[one].items()
                found[copy] = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries}
        return found

    def _take_over(self, one: Tensor, copy: Tensor, entries: dict[str, Any]) -> None:
        """Write to a shard and its state what its copy has become, unless the step is skipped."""
        self._write(one, copy)
        known = self.state[one]
        for key, value in entries.items():
            if isinstance(value, Tensor) and isinstance(known.get(key), Tensor):
                self._write(known[key], value)
            else:
                known[key] = value

    def _write(self, kept: Tensor, new: Tensor) -> None:
        assert self.skip is not None
        kept, new = (local_of(one) if isinstance(one, DTensor) else one for one in (kept, new))
        kept.copy_(torch.where(self.skip.to(kept.device), kept, new))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        stepped = [self.parameters[position] for position in self.lifted.stepped()]
        self._clear(stepped, set_to_none)

    def _zero_grad_of_model(self, set_to_none: bool = True) -> None:
        self._clear(self.parameters, set_to_none)

    def _clear(self, parameters: Sequence[Tensor], set_to_none: bool) -> None:
        if not set_to_none:
            raise refusal("calls zero_grad(set_to_none=False)", "leave the argument out: gradients become None")
        if all(parameter.grad is None for parameter in self.parameters):
            missing = [
                one
                for one, parameter in zip(self.lifted.parameters, self.parameters, strict=True)
                if one.tensor.requires_grad and all(parameter is not cleared for cleared in parameters)
            ]
            self.clears_first = self.clears_first or (self.watch.part == 0 and not missing)
        for parameter in parameters:
            parameter.grad = None

    def _check_after(self, scopes: Sequence[Scope], before: Sequence[Any], after: Sequence[Any]) -> None:
        if any(scope.opened for scope in scopes):
            raise ZgraphError(
                "zgraph.training_step: the step ends while the window of zgraph.no_sync is open; run its last forward "
                "and backward outside of no_sync."
            )
        if before != after:
            raise ZgraphError(
                "zgraph.training_step: the step changes options of its optimizer, such as the learning rate; call "
                "scheduler.step() outside of the step, after it."
            )
        for one, buffer in zip(self.lifted.buffers, self.buffers, strict=True):
            part, attribute = one.sites[0]
            if local_buffers(part)[attribute] is not buffer:
                raise ZgraphError(
                    f"zgraph.training_step: the step binds another tensor to the buffer {one.name}; write its values "
                    "in place, with copy_."
                )
        for tensor, stand_in in self.outside:
            if stand_in.grad is not None:
                raise ZgraphError(
                    f"zgraph.training_step: the step computes a gradient of a tensor of shape {list(tensor.shape)} "
                    "that is not a parameter of its model; train all that it steps as one module."
                )


def _leaf(shard: Tensor, like: Tensor) -> Tensor:
    if isinstance(like, DTensor):
        return dtensor_like(shard, like).requires_grad_(like.requires_grad)
    return shard.detach().requires_grad_(like.requires_grad)


def _local_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        if not isinstance(grad, DTensor) or grad.placements != parameter.placements:
            raise ZgraphError(
                f"zgraph.training_step: at {user_line()} a gradient does not lie like its parameter; leave gradients "
                "as backward makes them, or change them in place."
            )
        return local_of(grad)
    return local(grad)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _put_parameter(one: Held, value: Tensor) -> None:
    for part, attribute in one.sites:
        replace_parameter(part, attribute, value)


def _put_buffer(one: Held, value: Tensor) -> None:
    for part, attribute in one.sites:
        local_buffers(part)[attribute] = value


def _counts(optimizer: optim.Optimizer, where: str, instead: str) -> ZgraphError:
    return ZgraphError(
        f"zgraph.training_step: {type(optimizer).__name__}.step changes a number in {where}, which would change only "
        f"while the step is traced; keep it in {instead}."
    )
