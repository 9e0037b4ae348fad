"""What a step reads and writes beside its arguments: the inputs of its graph that stay from call to call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from zgraph.sharding.scope import Scope, ShardedParam, sharded_parameters, state_of
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.modules import local_buffers, local_parameters

Site = tuple[nn.Module, str]


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, with every place that holds it."""

    name: str
    tensor: Tensor
    sites: tuple[Site, ...]


@dataclass(frozen=True)
class Lifted:
    """A model and its optimizer as they are before a step.

    Attributes:
        parameters: each once, in the order of `named_parameters`.
        handles: of the sharded ones, by name.
        buffers: each once.
        positions: of the optimizer's parameters, group by group, among `parameters`.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    parameters: tuple[Held, ...]
    handles: dict[str, ShardedParam]
    buffers: tuple[Held, ...]
    positions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: optim.Optimizer) -> Lifted:
        """Look at a model and its optimizer.

        Raises:
            ValueError: the optimizer steps what is not a parameter of the model.
        """
        parameters = _held(model, local_parameters)
        places = {id(one.tensor): place for place, one in enumerate(parameters)}
        groups: list[tuple[int, ...]] = []
        for number, group in enumerate(optimizer.param_groups):
            missing = [parameter for parameter in group["params"] if id(parameter) not in places]
            if missing:
                raise ValueError(
                    f"zgraph.training_step: group {number} of the optimizer steps a tensor of shape "
                    f"{list(missing[0].shape)} that is not a parameter of the model; pass the model whose parameters "
                    "the optimizer was created with, after zgraph.shard."
                )
            groups.append(tuple(places[id(parameter)] for parameter in group["params"]))
        buffers = _held(model, local_buffers)
        return cls(model, optimizer, parameters, sharded_parameters(model), buffers, tuple(groups))

    def is_current(self) -> bool:
        """Whether the model still holds the same tensors at the same places."""
        return all(
            local_parameters(part).get(attribute) is one.tensor
            for one in self.parameters
            for part, attribute in one.sites
        ) and all(
            local_buffers(part).get(attribute) is one.tensor for one in self.buffers for part, attribute in one.sites
        )

    def scopes(self) -> list[Scope]:
        """The scopes of the model's sharded parts."""
        states = (state_of(part) for part in self.model.modules())
        return list(dict.fromkeys(state.scope for state in states if state is not None))

    def stepped(self) -> Iterator[int]:
        """Positions of the optimizer's parameters, one group after the other."""
        for group in self.positions:
            yield from group

    def state_entries(self) -> list[tuple[int, str, Any]]:
        """(position of the parameter, key, value) of everything in the optimizer's state."""
        state = self.optimizer.state
        return [
            (position, key, value)
            for position in self.stepped()
            if self.parameters[position].tensor in state
            for key, value in state[self.parameters[position].tensor].items()
        ]

    def tensors(self) -> list[Tensor]:
        """The graph's inputs, as this rank holds them: shards, handles, buffers and the tensors of the state."""
        found = [local(one.tensor) for one in self.parameters]
        found += [param.handle for param in self.handles.values()]
        found += [local(one.tensor) for one in self.buffers]
        found += [local(value) for _, _, value in self.state_entries() if isinstance(value, Tensor)]
        return found

    def names(self) -> list[str]:
        """Names of these inputs, for people."""
        found = [f"shard_{name_part(one.name)}" for one in self.parameters]
        found += [f"handle_{name_part(name)}" for name in self.handles]
        found += [f"buffer_{name_part(one.name)}" for one in self.buffers]
        found += [
            f"{key}_{name_part(self.parameters[position].name)}"
            for position, key, value in self.state_entries()
            if isinstance(value, Tensor)
        ]
        return found


def _held(model: nn.Module, of_module: Callable[[nn.Module], Mapping[str, Tensor | None]]) -> tuple[Held, ...]:
    found: dict[int, tuple[str, Tensor, list[Site]]] = {}
    for prefix, part in model.named_modules():
        for attribute, tensor in of_module(part).items():
            if tensor is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(tensor), (name, tensor, []))[2].append((part, attribute))
    return tuple(Held(name, tensor, tuple(sites)) for name, tensor, sites in found.values())


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        return local_of(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def name_part(name: str) -> str:
    """A qualified name as part of a node's name."""
    return re.sub(r"\W", "_", name)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Places of tensors that share memory with one before, or may do so."""
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
