"""Stand-in for an optimizer while a step is traced: the optimizer's step runs on traced shards, state and options."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.optimizers.local_step import ELEMENT_WISE, SCALARS
from zgraph.optimizers.muon import marked, matrices_of, step_matrices
from zgraph.step.capture.lifted import LiftedOptimizer, local
from zgraph.step.capture.option_inputs import with_inputs
from zgraph.step.capture.state_in_lines import StateInLines
from zgraph.step.lines.refusals import refusal, user_line
from zgraph.step.lines.watch import Watch
from zgraph.torch_compat.dtensor import dtensor_like, local_of, own_placements
from zgraph.torch_compat.modules import plain_step


@dataclass
class TracedOptimizer:
    """Stand-in for one optimizer.

    Attributes:
        lifted: the real optimizer.
        parameters, shards: traced parameters and shards of the model.
        groups: the optimizer's groups, with traced parameters and options.
        state: traced state, with the tensors of `stepped_on` as keys; it includes entries that the step adds.
        stepped: whether the optimizer has stepped.
        keeps_state: whether lines of the step have put entries into the state.
        skip: whether the step is skipped, as a 0-d bool tensor; None if it is never skipped.
    """

    lifted: LiftedOptimizer
    watch: Watch
    parameters: Sequence[Tensor]
    shards: Sequence[Tensor]
    groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    stepped: bool = False
    keeps_state: bool = False
    skip: Tensor | None = None

    @classmethod
    def of(
        cls,
        lifted: LiftedOptimizer,
        watch: Watch,
        parameters: Sequence[Tensor],
        shards: Sequence[Tensor],
        state: Iterator[Tensor],
        options: Iterator[Any],
    ) -> TracedOptimizer:
        """Create a stand-in from traced tensors; its state and options are taken from the two iterators."""
        groups = [
            {**with_inputs(group, options), "params": [parameters[position] for position in positions]}
            for group, positions in zip(lifted.optimizer.param_groups, lifted.groups, strict=True)
        ]
        found = cls(lifted, watch, parameters, shards, groups)
        for position, key, value in lifted.state_entries():
            entry = next(state) if isinstance(value, Tensor) else value
            if isinstance(value, DTensor) and not found.is_on_shards:
                entry = dtensor_like(entry, value)
            found.state[found.stepped_on[position]][key] = entry
        found.known = {one: dict(entries) for one, entries in found.state.items()}
        return found

    def __post_init__(self) -> None:
        self.known: dict[Tensor, dict[str, Any]] = {}
        self.own = list(dict.fromkeys(self.lifted.positions()))
        self.before = [_options(group) for group in self.groups]
        self.matrices = matrices_of(self.lifted.optimizer, self.lifted.shared)

    @property
    def is_on_shards(self) -> bool:
        """Whether the optimizer steps on local shards: if it is element-wise, or Muon with ordinary layouts."""
        return type(self.lifted.optimizer) in ELEMENT_WISE or self.matrices is not None

    @property
    def stepped_on(self) -> Sequence[Tensor]:
        """Tensors to step on, by parameter index: local shards, or parameters if the optimizer needs them."""
        return self.shards if self.is_on_shards else self.parameters

    @contextlib.contextmanager
    def in_place(self, clear: Callable[[Sequence[int], bool], None]) -> Generator[None]:
        """Install the stand-in in the user's optimizer; restore everything afterwards.

        Args:
            clear: function that clears gradients; `zero_grad` passes it the parameters' indices and `set_to_none`.
        """
        optimizer = self.lifted.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        own = {key: optimizer.__dict__.get(key) for key in ("step", "zero_grad")}
        optimizer.param_groups = self.groups
        optimizer.state = seen = cast(Any, StateInLines(type(optimizer).__name__, self._places(groups), self._keep))
        optimizer.__dict__["step"] = self._step
        optimizer.__dict__["zero_grad"] = lambda set_to_none=True: clear(self.own, set_to_none)
        try:
            yield
            if self.before != [_options(group) for group in self.groups]:
                raise ZgraphError(
                    "zgraph.training_step: the step changes options of its optimizer, such as the learning rate; call "
                    "scheduler.step() outside the step, after it."
                )
            if optimizer.state is not seen:
                raise ZgraphError(
                    f"zgraph.training_step: the step binds another state to {type(optimizer).__name__}, as "
                    "load_state_dict does; do it outside the step."
                )
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            for key, value in own.items():
                if value is None:
                    del optimizer.__dict__[key]
                else:
                    optimizer.__dict__[key] = value

    def _places(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Return each parameter's position, by the id of the parameter and by the id of its stand-in."""
        pairs = [
            (one, place)
            for group, places in zip(groups, self.lifted.groups, strict=True)
            for one, place in zip(group["params"], places, strict=True)
        ]
        return {id(one): place for one, place in [*pairs, *((self.parameters[place], place) for place in self.own)]}

    def _keep(self, position: int, key: str, value: Any) -> None:
        """Keep an entry that a line of the step has put into the state."""
        self.keeps_state = True
        if self.is_on_shards and isinstance(value, Tensor):
            parameter = self.parameters[position]
            if not _lies_like(value, parameter):
                raise refusal(
                    f'puts a tensor into state["{key}"] of {type(self.lifted.optimizer).__name__} that is not placed '
                    "like its parameter",
                    "keep it in an attribute",
                )
            value = _part_of(value)
        self.state[self.stepped_on[position]][key] = value

    def new_state(self) -> list[tuple[int, str, Any]]:
        """Return entries that the step has added to the optimizer's state, as (index of the parameter, key, value).

        Raises:
            ZgraphError: the step has changed a Python number in the state, which a graph could only keep as a constant.
        """
        known = {(position, key): value for position, key, value in self.lifted.state_entries()}
        before = {id(value) for entries in self.known.values() for value in entries.values()}
        found: list[tuple[int, str, Any]] = []
        for position in self.own:
            for key, value in self.state.get(self.stepped_on[position], {}).items():
                if (position, key) not in known or (isinstance(value, Tensor) and id(value) not in before):
                    found.append((position, key, value))
                elif not isinstance(value, Tensor) and value != known[position, key]:
                    raise _counts(
                        self.lifted.optimizer, f'state["{key}"]', "state as a tensor, such as torch.zeros(())"
                    )
        return found

    def layout_of(self, position: int, key: str, value: Tensor) -> DTensor | None:
        """Return a DTensor with the layout of a new state entry; None if each rank has the whole entry."""
        if not self.is_on_shards:
            return value if isinstance(value, DTensor) else None
        parameter = self.parameters[position]
        return parameter if isinstance(parameter, DTensor) and key not in SCALARS else None

    def step_unless(self, found_inf: Tensor) -> None:
        """Run the optimizer's step; the graph undoes it if `found_inf` is nonzero.

        The optimizer works on copies, which are copied back to parameters and state unless the step is skipped. An inf
        or NaN in the copies is thus discarded, and the host need not wait for `found_inf`.
        """
        if self.stepped:
            raise refusal("calls scaler.step() a second time for an optimizer", "write one step per call")
        self._step_or_skip(self._gradients(), found_inf)

    def _step(self, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer's original step on `stepped_on`; replaces `optimizer.step` during the trace."""
        if any(one is not None for one in (*args, *kwargs.values())):
            given = ", ".join(kwargs) or "a closure"
            raise refusal(
                f"passes {given} to optimizer.step()", "compute the loss before the step, and call it without arguments"
            )
        if self.skip is not None:
            raise refusal("calls optimizer.step() after scaler.step()", "write one of the two")
        self._step_on(self.stepped_on, self._gradients())

    def _gradients(self) -> dict[int, Tensor]:
        """Return gradients by index of the parameter; as local shards if the optimizer steps on local shards."""
        found: dict[int, Tensor] = {}
        for position in self.own:
            parameter = self.parameters[position]
            if parameter.grad is not None:
                is_local = self.stepped_on[position] is not parameter
                found[position] = _local_grad(parameter, parameter.grad) if is_local else parameter.grad
        return found

    def _step_or_skip(self, grads: Mapping[int, Tensor], found_inf: Tensor) -> None:
        self.skip = found_inf != 0
        with torch.no_grad():
            given = list(self.stepped_on)
            for position in grads:
                given[position] = given[position].detach().clone()
            self._step_on(given, grads)

    def _step_on(self, given: Sequence[Tensor], grads: Mapping[int, Tensor]) -> None:
        """Run the optimizer's original step on `given` with the gradients `grads`; both are by parameter index."""
        optimizer, state = self.lifted.optimizer, self._state_of(given)
        held = {position: given[position].grad for position in self.own}
        for position in self.own:
            given[position].grad = grads.get(position)
        groups = [
            {**group, "params": [given[position] for position in positions]}
            for group, positions in zip(self.groups, self.lifted.groups, strict=True)
        ]
        before = [_options(group) for group in groups]
        stand_in: optim.Optimizer = object.__new__(type(optimizer))
        stand_in.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": state}
        attributes = dict(optimizer.__dict__)
        with (
            self.watch.reading_values(optimizer),
            contextlib.nullcontext() if self.is_on_shards else own_placements(),
        ):
            if self.matrices is not None:
                step_matrices(groups, state, self.matrices, marked)
            else:
                plain_step(optimizer)(stand_in)
        if before != [_options(group) for group in groups]:
            raise _counts(optimizer, "param_groups", "state as a tensor for each parameter")
        for name, value in attributes.items():
            if name[0] != "_" and name not in ("param_groups", "state") and stand_in.__dict__.get(name) is not value:
                raise _counts(optimizer, f"self.{name}", "state as a tensor for each parameter")
        self.stepped = True
        for position in self.own:
            one, copy = self.stepped_on[position], given[position]
            copy.grad = held[position]
            if copy is not one:
                self._take_over(one, copy, state[copy])

    def _state_of(self, given: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """Return the optimizer's state with `given` as keys; for keys that are copies, clone the entries."""
        if given is self.stepped_on:
            return self.state
        found: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for position in self.own:
            copy, one = given[position], self.stepped_on[position]
            if one in self.state:
                entries = self.state[one].items()
                copies = copy is not one
                found[copy] = {
                    key: value.clone() if copies and isinstance(value, Tensor) else value for key, value in entries
                }
        return found

    def _take_over(self, one: Tensor, copy: Tensor, entries: dict[str, Any]) -> None:
        """Copy `copy` to the tensor `one`, and `entries` to the state of `one`, unless the step is skipped."""
        self._write(one, copy)
        known = self.state[one]
        for key, value in entries.items():
            if isinstance(value, Tensor) and isinstance(known.get(key), Tensor):
                self._write(known[key], value)
            else:
                known[key] = value

    def _write(self, kept: Tensor, new: Tensor) -> None:
        assert self.skip is not None
        kept, new = _part_of(kept), _part_of(new)
        kept.copy_(torch.where(self.skip.to(kept.device), kept, new))


def _lies_like(value: Tensor, parameter: Tensor) -> bool:
    if isinstance(parameter, DTensor):
        return isinstance(value, DTensor) and (value.placements, value.shape) == (parameter.placements, parameter.shape)
    return not isinstance(value, DTensor) and value.shape == parameter.shape


def _part_of(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, DTensor) else value


def _local_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        if not isinstance(grad, DTensor) or grad.placements != parameter.placements:
            raise ZgraphError(
                f"zgraph.training_step: at {user_line()} a gradient is not placed like its parameter; leave gradients "
                "as backward makes them, or change them in place."
            )
        return local_of(grad)
    return local(grad)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _counts(optimizer: optim.Optimizer, where: str, instead: str) -> ZgraphError:
    return ZgraphError(
        f"zgraph.training_step: {type(optimizer).__name__}.step changes a number in {where}, which would change only "
        f"while the step is traced; keep it in {instead}."
    )
