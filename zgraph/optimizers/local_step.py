"""Optimizer steps on local shards, without the overhead of DTensor.

An element-wise optimizer needs only a rank's own rows. DTensor would run the same kernels on the same local tensors,
but for one parameter at a time, and would compute the placements of every result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from zgraph.optimizers.adamw_8bit import AdamW8bit
from zgraph.optimizers.muon import matrices_of, on_owners, shared_of, step_matrices
from zgraph.torch_compat.dtensor import dtensor_like, local_of
from zgraph.torch_compat.modules import step_hooks

Optimizer = TypeVar("Optimizer", bound=optim.Optimizer)

# Each element of a parameter is updated from its own gradient and state only (unlike with Muon, LBFGS and Adafactor).
ELEMENT_WISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.ASGD,
        optim.Rprop,
    }
)
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})  # state entries that are never DTensors


def step_on_shards(optimizer: Optimizer) -> Optimizer:
    """Make `optimizer.step()` run on this rank's local shards: faster than on DTensors, with bitwise equal results.

    Only hooks are added to the optimizer. Its class, parameters, groups, state dicts, schedulers and scalers work as
    before, its state still consists of DTensors, and a step that raises an error changes nothing but Muon's momenta.

    A step still runs on DTensors if it runs inside torch.compile, if the optimizer is differentiable, or if gradients
    have other placements than their parameters. A copied or unpickled optimizer needs its own call of this function.

    `torch.optim.Muon` orthogonalizes each matrix on one rank, with the bits of a model on a single rank; on DTensors,
    all ranks compute all matrices, and round differently.

    Args:
        optimizer: one of torch.optim's element-wise optimizers, Muon, or AdamW8bit, which steps on shards anyway; its
            parameters may be sharded or not.

    Returns:
        The same optimizer.

    Raises:
        ValueError: the optimizer's class is none of these classes; subclasses do not count.
    """
    if isinstance(optimizer, AdamW8bit):  # works on local shards by itself
        return optimizer
    if type(optimizer) not in ELEMENT_WISE | {optim.Muon}:
        known = ", ".join(sorted(kind.__name__ for kind in ELEMENT_WISE | {optim.Muon}))
        raise ValueError(
            f"zgraph.step_on_shards: {type(optimizer).__name__} is not known to update each element by itself; step it "
            f"without this call, on DTensors, or use one of torch.optim's {known}."
        )
    if steps_on_shards(optimizer):
        return optimizer
    stand_in = _StandIn()
    optimizer.register_step_pre_hook(stand_in.enter)
    optimizer.register_step_post_hook(stand_in.leave)
    return optimizer


def steps_on_shards(optimizer: optim.Optimizer) -> bool:
    """Return whether `step_on_shards` has been called for an optimizer."""
    return any(isinstance(getattr(hook, "__self__", None), _StandIn) for hook in step_hooks(optimizer))


class _StandIn:
    """Makes each step of an optimizer run on a second optimizer of the same class, which has the local shards.

    A hook before the step passes the second optimizer to the step in place of the first (torch 2.11 - 2.15).
    """

    def __init__(self) -> None:
        self.present: optim.Optimizer | None = None
        self.taken: list[list[Tensor]] = []  # shards in place of the parameters, by group

    def enter(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.present, self.taken = None, []  # may be left over from a step that raised an error
        closure = kwargs.get("closure") if len(args) == 1 else args[1]
        ordinary = args[0] is not optimizer or len(args) + len(kwargs) > 2 or not kwargs.keys() <= {"closure"}
        if ordinary or torch.compiler.is_compiling() or optimizer.defaults.get("differentiable"):
            return None
        given: tuple[Any, ...] = ()
        if closure is not None:  # all these optimizers call it once, before they read gradients
            with torch.enable_grad():
                loss = closure()
            given = (lambda: loss,)
        found, matrices = shards_of(optimizer), matrices_of(optimizer, shared_of(optimizer))
        if found is None or (matrices is None and type(optimizer) not in ELEMENT_WISE):
            return (optimizer, *given), {}
        self.taken, state = found
        groups = [{**group, "params": shards} for group, shards in zip(optimizer.param_groups, self.taken, strict=True)]
        self.present = stand_in = object.__new__(type(optimizer))
        if matrices is not None:
            groups = _Instead(partial(step_matrices, groups, state, matrices, on_owners))
        stand_in.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": state}
        return (stand_in, *given), {}

    def leave(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stand_in, taken = self.present, self.taken
        self.present, self.taken = None, []
        if stand_in is not None and args[0] is stand_in:
            take_over(optimizer, taken, stand_in.state)


class _Instead(list[dict[str, Any]]):
    """Empty parameter groups. A step that iterates over them, after all hooks before it, calls a function instead."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._step = step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._step()
        return super().__iter__()


def take_over(
    optimizer: optim.Optimizer, taken: Sequence[Sequence[Tensor]], made: Mapping[Tensor, dict[str, Any]]
) -> None:
    """Copy the state of local shards after a step into the optimizer's state, as DTensors.

    Args:
        optimizer: the user's optimizer.
        taken: local shards by group, in the order of the parameters.
        made: state of each local shard.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter, shard in zip(parameters, chain.from_iterable(taken), strict=True):
        if shard not in made:
            continue
        known = optimizer.state[parameter]
        for key, value in made[shard].items():
            if _local(known.get(key)) is not value:
                if isinstance(parameter, DTensor) and isinstance(value, Tensor) and key not in SCALARS:
                    value = dtensor_like(value, parameter)
                known[key] = value


def shards_of(
    optimizer: optim.Optimizer,
) -> tuple[list[list[Tensor]], dict[Tensor, dict[str, Any]]] | None:
    """Return two values: the local shards (with gradients) of each group, and the optimizer state of each shard.

    None if the step must run on DTensors, because placements of gradients or state differ from those of parameters.
    """
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups: list[list[Tensor]] = []
    for group in optimizer.param_groups:
        shards: list[Tensor] = []
        for parameter in group["params"]:
            shard = parameter
            if isinstance(parameter, DTensor):
                if any(placement.is_partial() for placement in parameter.placements):
                    return None
                # A new tensor over the same storage, whose gradient and state entries end with this step.
                shard = local_of(parameter).detach()
                grad = parameter.grad
                if grad is not None:
                    if not _lies_like(grad, parameter):
                        return None
                    shard.grad = _local(grad)
            if parameter in optimizer.state:
                known = optimizer.state[parameter]
                for key, value in known.items():
                    if isinstance(value, Tensor) and key not in SCALARS and not _lies_like(value, parameter):
                        return None
                state[shard] = {key: _local(value) for key, value in known.items()}
            shards.append(shard)
        groups.append(shards)
    return groups, state


def _lies_like(value: Tensor, parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return not isinstance(value, DTensor)
    if not isinstance(value, DTensor) or value.placements != parameter.placements:
        return False
    return value.device_mesh == parameter.device_mesh


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value
