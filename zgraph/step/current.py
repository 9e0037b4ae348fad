"""Facts about a model and its optimizers that every call of a captured step needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn, optim

from zgraph.runtime.exchanges.steps import check_all_sharded
from zgraph.step import guards
from zgraph.step.capture import parameter_hooks
from zgraph.step.capture.lifted import Lifted, StateLayout
from zgraph.step.capture.option_inputs import OptionInputs
from zgraph.step.lines.refusals import check_optimizer
from zgraph.step.outside.variables import Outside
from zgraph.torch_compat.dtensor import requires_grad_of


class Current:
    """Facts about a model and its optimizers, computed once and valid until one of their tensors is replaced.

    Attributes:
        lifted: description of the model and its optimizers.
        own: ids of the model's parameters and buffers.
        scopes: shared state of each part of the model that `zgraph.shard` sharded.
        optional: for each call of `zgraph.shard` with optional parameters, their reduction.

    Raises:
        ValueError: an optimizer is not supported.
        ZgraphError: an optimizer steps plain parameters together with sharded ones.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[optim.Optimizer]) -> None:
        self.lifted = lifted = Lifted.of(model, optimizers)
        for optimizer in optimizers:
            check_optimizer(optimizer)
            check_all_sharded(one for group in optimizer.param_groups for one in group["params"])
        held = (*lifted.parameters, *lifted.buffers)
        self.own = frozenset(id(one.tensor) for one in held)
        self.scopes, self.optional = lifted.scopes(), lifted.optional()
        for one in self.optional:
            one.watch(lifted.held)
        self._modules = guards.Modules(model)
        self._states = [StateLayout.of(one, number) for number, one in enumerate(lifted.optimizers)]
        self._layouts = tuple((tuple(one.tensor.shape), one.tensor.dtype, one.tensor.device) for one in held)

    @property
    def device(self) -> torch.device:
        """Device on which the step computes."""
        resting = self.lifted.resting
        return self.lifted.held[0].device if resting is None else resting.device

    def state(self) -> list[Tensor]:
        """Return this rank's tensors of the optimizers' state, in the order of the graph's inputs."""
        found: list[Tensor] = []
        for number, one in enumerate(self.lifted.optimizers):
            tensors = self._states[number].tensors(one.optimizer.state)
            if tensors is None:
                self._states[number] = StateLayout.of(one, number)
                tensors = self._states[number].tensors(one.optimizer.state)
                assert tensors is not None
            found += tensors
        return found

    def conditions(
        self,
        leaves: list[Any],
        tree: Any,
        options: OptionInputs,
        outside: Outside,
        tensors: list[Tensor],
    ) -> guards.Conditions:
        """Return the conditions of this call: graphs captured under equal conditions are valid for it."""
        lifted = self.lifted
        return guards.Conditions(
            arguments=guards.of_arguments(leaves, tree),
            modes=self._modules.conditions(),
            trainable=tuple(requires_grad_of(lifted.held)),
            hooks=parameter_hooks.conditions(lifted.held),
            options=(*(groups for one in lifted.optimizers for groups in one.groups), *options.conditions),
            state=tuple(chain.from_iterable(layout.conditions for layout in self._states)),
            layouts=self._layouts,
            outside=guards.of_tensors(outside),
            variables=guards.of_variables(outside),
            spaces=lifted.spaces(tensors, outside.tensors.values()),
            ambient=guards.ambient(),
        )
