"""Tensors of a model and its optimizers: inputs of a captured step, in addition to the step's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.memory_ledger import ledger_of
from zgraph.sharding.model.optional_parameters import OptionalParameters
from zgraph.sharding.scope import Scope, ShardedParam, sharded_parameters, state_of
from zgraph.tiers.placement.host_budget import check_host_budget
from zgraph.tiers.placement.resting import Resting
from zgraph.tiers.tier import DEVICE, HOST, Tier
from zgraph.torch_compat.dtensor import local_of, locals_of
from zgraph.torch_compat.modules import local_buffers, local_parameters

Site = tuple[nn.Module, str]
State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, with every (module, attribute) that holds it."""

    name: str
    tensor: Tensor
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class LiftedOptimizer:
    """An optimizer, with its parameters as indices into the model's parameters.

    Attributes:
        parameters: all parameters of the model.
        groups: for each parameter group, the indices of its parameters in `parameters`.
        shared: ids of the parameters whose gradients are reduced.
    """

    optimizer: optim.Optimizer
    parameters: tuple[Held, ...]
    groups: tuple[tuple[int, ...], ...]
    shared: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        optimizer: optim.Optimizer,
        parameters: tuple[Held, ...],
        places: Mapping[int, int],
        shared: frozenset[int] = frozenset(),
    ) -> LiftedOptimizer:
        """Describe an optimizer; `places` maps ids of parameters to their indices."""
        groups: list[tuple[int, ...]] = []
        for number, group in enumerate(optimizer.param_groups):
            missing = [parameter for parameter in group["params"] if id(parameter) not in places]
            if missing:
                raise ValueError(
                    f"zgraph.training_step: group {number} of the optimizer ({type(optimizer).__name__}) steps a "
                    f"tensor of shape {list(missing[0].shape)} that is not a parameter of the model; pass the model "
                    "whose parameters the optimizer was created with, after zgraph.shard."
                )
            groups.append(tuple(places[id(parameter)] for parameter in group["params"]))
        return cls(optimizer, parameters, tuple(groups), shared)

    def positions(self) -> Iterator[int]:
        """Yield the indices of the optimizer's parameters, group by group."""
        for group in self.groups:
            yield from group

    @cached_property
    def _held(self) -> list[list[Tensor]]:
        return [[self.parameters[position].tensor for position in positions] for positions in self.groups]

    def is_current(self) -> bool:
        """Return whether the optimizer still steps the same parameters."""
        groups = self.optimizer.param_groups
        return len(groups) == len(self._held) and all(
            len(group["params"]) == len(held) and all(map(is_, group["params"], held))
            for group, held in zip(groups, self._held, strict=True)
        )

    def state_entries(self) -> list[tuple[int, str, Any]]:
        """Return every entry of the optimizer's state as (index of the parameter, key, value)."""
        state = self.optimizer.state
        return [
            (position, key, value)
            for position in self.positions()
            if self.parameters[position].tensor in state
            for key, value in state[self.parameters[position].tensor].items()
        ]


@dataclass(frozen=True)
class Lifted:
    """A model and its optimizers, described for a capture.

    Attributes:
        optimizers: the step's optimizers, in the user's order.
        parameters: parameters of the model, each once, in the order of `named_parameters`.
        handles: sharded parameters by name; the graph has the handle of each as a further input.
        buffers: buffers of the model, each once.
    """

    model: nn.Module
    optimizers: tuple[LiftedOptimizer, ...]
    parameters: tuple[Held, ...]
    handles: dict[str, ShardedParam]
    buffers: tuple[Held, ...]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> Lifted:
        """Describe a model and its optimizers.

        Raises:
            ValueError: an optimizer steps a tensor that is not a parameter of the model.
        """
        parameters = _held(model, local_parameters)
        places = {id(one.tensor): place for place, one in enumerate(parameters)}
        handles = sharded_parameters(model)
        shared = frozenset(id(one.sharded) for one in handles.values() if not one.spec.ignored)
        lifted = tuple(LiftedOptimizer.of(one, parameters, places, shared) for one in optimizers)
        return cls(model, lifted, parameters, handles, _held(model, local_buffers))

    @cached_property
    def held(self) -> list[Tensor]:
        """Parameters as tensors, in the order of `parameters`."""
        return [one.tensor for one in self.parameters]

    @cached_property
    def _handles(self) -> list[Tensor]:
        return [param.handle for param in self.handles.values()]

    @cached_property
    def _are_dtensors(self) -> bool:
        return all(isinstance(tensor, DTensor) for tensor in self.held)

    @cached_property
    def _places(self) -> tuple[tuple[list[nn.Module], list[str], list[Tensor]], ...]:
        """Two triples of lists (modules, attribute names, tensors): one of all parameters, one of all buffers."""
        return _places_of(self.parameters), _places_of(self.buffers)

    def is_current(self) -> bool:
        """Return whether the model and its optimizers still have the tensors that are described here."""
        (owners, names, parameters), (buffer_owners, buffer_names, buffers) = self._places
        return (
            all(map(is_, map(dict.get, map(local_parameters, owners), names), parameters))
            and all(map(is_, map(dict.get, map(local_buffers, buffer_owners), buffer_names), buffers))
            and all(one.is_current() for one in self.optimizers)
        )

    def scopes(self) -> list[Scope]:
        """Return the shared state of each part of the model that `zgraph.shard` sharded."""
        states = (state_of(part) for part in self.model.modules())
        return list(dict.fromkeys(state.scope for state in states if state is not None))

    def optional(self) -> list[OptionalParameters]:
        """Return the reduction of optional parameters of each call of `zgraph.shard` that has some."""
        return [one for scope in self.scopes() for one in scope.optional]

    def state_entries(self) -> list[tuple[int, str, Any]]:
        """Return every entry of optimizer state as (index of the parameter, key, value), optimizer by optimizer."""
        return [entry for one in self.optimizers for entry in one.state_entries()]

    @cached_property
    def resting(self) -> Resting | None:
        """Object that places the model's offloaded tensors; None without offload."""
        return next((scope.resting for scope in self.scopes() if scope.resting is not None), None)

    def spaces(self, tensors: Iterable[Tensor], outside: Iterable[Tensor] = ()) -> tuple[Tier, ...]:
        """Return the tier in which each input of the graph is stored; () if the model offloads nothing.

        With a GPU, handles, buffers and plain tensors from outside count as stored on the device, even if they are on
        the host.

        Args:
            tensors: this rank's parts of the inputs.
            outside: tensors that the function reads from outside, whose parts are the last elements of `tensors`.
        """
        resting = self.resting
        if resting is None:
            return ()
        parts, last = [*tensors], [*outside]
        found: list[Tier] = [resting.space_of(part) for part in parts]
        begin = len(self.parameters)
        state = begin + len(self.handles) + len(self.buffers)
        for place in (*range(begin), *range(state, len(parts) - len(last))):
            if found[place] == DEVICE and parts[place].ndim and not parts[place].numel():
                # A rank without rows must have the same graph as the others. Only the host holds empty tensors.
                tier = resting.options.params_tier if place < begin else resting.options.optimizer_tier
                found[place] = HOST if tier == HOST else DEVICE
        if resting.computes_elsewhere:
            for place in range(begin, state):
                found[place] = DEVICE
            for place, tensor in enumerate(last, len(found) - len(last)):
                found[place] = found[place] if isinstance(tensor, DTensor) else DEVICE
        return tuple(found)

    def longest_bytes(self, position: int, part: Tensor) -> int:
        """Return the size of a tensor in bytes on the rank that has most rows of it.

        Args:
            position: index of a parameter.
            part: this rank's part of the parameter, or of optimizer state for it.
        """
        shard = self.parameters[position]
        known = self.handles.get(shard.name)
        has_rows = part.ndim > 0 and part.shape[:1] == local(shard.tensor).shape[:1]
        if known is None or not known.spec.layout.is_sharded or not has_rows:
            return part.nbytes
        rows = part.shape[0]
        return (part[0].nbytes if rows else part.new_empty((1, *part.shape[1:])).nbytes) * known.spec.layout.chunk_rows

    def places(self) -> list[int | None]:
        """Return for each tensor of `tensors()` the index of its parameter; None for handles and buffers."""
        others = [None] * (len(self.handles) + len(self.buffers))
        state = [position for position, _, value in self.state_entries() if isinstance(value, Tensor)]
        return [*range(len(self.parameters)), *others, *state]

    def settle(self) -> None:
        """Move the optimizers' state to the tier in which it is stored between steps."""
        if self.resting is not None:
            names = {id(one.tensor): one.name for one in self.parameters}
            for one in self.optimizers:
                self.resting.settle(one.optimizer, names)
                self.resting.settle_counts(one.optimizer)

    def check_host(self, plan: FramePlan, late: Sequence[int] = ()) -> None:
        """Refuse a step that would keep more bytes on the host than `Offload.host_budget_bytes`.

        Args:
            plan: plan of the step.
            late: unused; whole steps are not split.

        Raises:
            ValueError: the step exceeds the budget; the message says what would make it fit.
        """
        if self.resting is None or self.resting.options.host_budget_bytes is None:
            return
        host = next(line for line in ledger_of(plan.curve) if line.space == HOST.name)
        check_host_budget(
            self.resting.options,
            host.parameters,
            host.state,
            host.step,
            host.staging,
            on_gpu=self.resting.computes_elsewhere,
        )

    def tensors(self, state: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return this rank's tensors that are inputs of the graph: shards, handles, buffers, optimizer state.

        Args:
            state: tensors of the state; None: read them from the optimizers.
        """
        if state is None:
            state = [local(value) for _, _, value in self.state_entries() if isinstance(value, Tensor)]
        shards = locals_of(cast("list[DTensor]", self.held)) if self._are_dtensors else list(map(local, self.held))
        return [*shards, *self._handles, *(local(one.tensor) for one in self.buffers), *state]

    def names(self) -> list[str]:
        """Return a readable name for each tensor of `tensors()`."""
        found = [f"shard_{name_part(one.name)}" for one in self.parameters]
        found += [f"handle_{name_part(name)}" for name in self.handles]
        found += [f"buffer_{name_part(one.name)}" for one in self.buffers]
        found += [
            f"{key}_{name_part(self.parameters[position].name)}"
            for position, key, value in self.state_entries()
            if isinstance(value, Tensor)
        ]
        return found


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Structure of an optimizer's state, without the tensors, which are read anew at each call.

    Entries are listed in the order of the `state` dict, unless stated otherwise.

    Attributes:
        owners: parameters that have entries.
        sizes: number of entries of each owner.
        keys: name of each entry.
        kinds: type of each entry.
        are_dtensors: whether each entry is a DTensor.
        are_plain: whether each entry is a tensor but no DTensor.
        are_numbers: whether each entry is not a tensor.
        numbers: values of the entries that are not tensors.
        order: for each state input of the graph, its index in a list with the local parts of all DTensors first, and
            all plain tensors after them.
        conditions: for each entry (index of the optimizer, index of the parameter, key, value; None for a tensor), in
            the order of the graph's inputs.
    """

    owners: Sequence[Tensor]
    sizes: Sequence[int]
    keys: Sequence[str]
    kinds: Sequence[type]
    are_dtensors: Sequence[bool]
    are_plain: Sequence[bool]
    are_numbers: Sequence[bool]
    numbers: Sequence[Any]
    order: Sequence[int]
    conditions: tuple[Any, ...]

    @classmethod
    def of(cls, lifted: LiftedOptimizer, number: int) -> StateLayout:
        """Describe an optimizer's state; `number` is the index of the optimizer in the step."""
        state: State = lifted.optimizer.state
        keys, values = list(chain.from_iterable(state.values())), _values(state)
        are_dtensors = [isinstance(value, DTensor) for value in values]
        are_plain = [isinstance(value, Tensor) and not isinstance(value, DTensor) for value in values]
        are_numbers = [not isinstance(value, Tensor) for value in values]
        indices = range(len(values))
        ranked = [*compress(indices, are_dtensors), *compress(indices, are_plain)]
        rank = {index: place for place, index in enumerate(ranked)}
        starts = dict(zip(map(id, state), _starts(list(map(len, state.values()))), strict=True))
        # Entry by entry in the order of the graph: that of `state_entries`.
        owners = [lifted.parameters[position].tensor for position in lifted.positions()]
        entries = [
            starts[id(owner)] + place for owner in owners if id(owner) in starts for place in range(len(state[owner]))
        ]
        return cls(
            owners=list(state),
            sizes=list(map(len, state.values())),
            keys=keys,
            kinds=list(map(type, values)),
            are_dtensors=are_dtensors,
            are_plain=are_plain,
            are_numbers=are_numbers,
            numbers=list(compress(values, are_numbers)),
            order=[rank[entry] for entry in entries if not are_numbers[entry]],
            conditions=tuple(
                (number, position, key, None if isinstance(value, Tensor) else value)
                for position, key, value in lifted.state_entries()
            ),
        )

    def tensors(self, state: State) -> list[Tensor] | None:
        """Return this rank's parts of the tensors in `state`, in the order of the graph's inputs.

        Returns None if the structure of `state` differs from this one.
        """
        owners, values = list(state), _values(state)
        if (
            len(owners) != len(self.owners)
            or not all(map(is_, owners, self.owners))
            or list(map(len, state.values())) != self.sizes
            or list(chain.from_iterable(state.values())) != self.keys
            or list(map(type, values)) != self.kinds
            or list(compress(values, self.are_numbers)) != self.numbers
        ):
            return None
        parts = [*locals_of(compress(values, self.are_dtensors)), *compress(values, self.are_plain)]
        return list(map(parts.__getitem__, self.order))


def _values(state: State) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts[:-1]


def _held(model: nn.Module, of_module: Callable[[nn.Module], Mapping[str, Tensor | None]]) -> tuple[Held, ...]:
    found: dict[int, tuple[str, Tensor, list[Site]]] = {}
    for prefix, part in model.named_modules():
        for attribute, tensor in of_module(part).items():
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(tensor), (name, tensor, []))[2].append((part, attribute))
    return tuple(Held(name, tensor, tuple(sites)) for name, tensor, sites in found.values())


def _places_of(held: Sequence[Held]) -> tuple[list[nn.Module], list[str], list[Tensor]]:
    places = [(part, attribute, one.tensor) for one in held for part, attribute in one.sites]
    return [part for part, _, _ in places], [name for _, name, _ in places], [tensor for *_, tensor in places]


def local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        return local_of(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def name_part(name: str) -> str:
    """Replace all characters of a qualified name that node names cannot have by "_"."""
    return re.sub(r"\W", "_", name)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Return indices of tensors that share, or may share, memory with an earlier tensor of the sequence."""
    spans: list[tuple[int, int, int]] = []
    for place, tensor in enumerate(tensors):
        if tensor.numel() and tensor.layout == torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), place))
    found: set[int] = set()
    until, holder = 0, -1
    for begin, end, place in sorted(spans):
        if begin < until:
            found.add(max(place, holder))
        if end > until:
            until, holder = end, place
    return found
