"""`full_tensor()` of a sharded parameter outside forward, with gradients that are reduced over the ranks.

DTensor's own `full_tensor()` would return the gradient of this rank's batch only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from zgraph.errors import ZgraphError
from zgraph.sharding.scope import READ, Scope, ShardedParam, state_of
from zgraph.sharding.unit import gather_as_stored
from zgraph.torch_compat.modules import local_parameters


class WholeRead:
    """Replacement of a parameter's method `full_tensor`, which gathers as forward does if gradients are needed.

    Args:
        owner: module that holds the parameter; None: the parameter is a copy outside any model.
        attribute: name of the parameter in `owner`.
    """

    def __init__(self, owner: nn.Module | None, attribute: str) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._attribute = attribute

    def __call__(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise ZgraphError(
                f"zgraph: this copy of a parameter {self._attribute} was made without its model; write "
                "copy.detach().full_tensor()."
            )
        parameter, state = cast(DTensor, local_parameters(owner)[self._attribute]), state_of(owner)
        param = None if state is None else state.by_attribute.get(self._attribute)
        is_function = parameter.requires_grad and torch.is_grad_enabled() and grad_placements is None
        if param is None or state is None or param.spec.ignored or not is_function:
            return DTensor.full_tensor(parameter, grad_placements=grad_placements)
        if param.spec.split is not None:
            whole = DTensor.full_tensor(parameter)
            whole.register_hook(partial(_refuse_gradient, param.name))
            return whole
        return _read(param, state.scope)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeRead:
        owner = None if self._owner is None else self._owner()
        return WholeRead(None if owner is None else memo.get(id(owner)), self._attribute)

    def __reduce__(self) -> tuple[Any, ...]:
        return WholeRead, (None, self._attribute)


def _refuse_gradient(name: str, grad: Tensor) -> NoReturn:
    raise ZgraphError(
        f"zgraph: a gradient has reached {name}, which is tensor-parallel, through full_tensor() outside forward, "
        "where it would not be averaged; read the whole parameter in the model's forward."
    )


def _read(param: ShardedParam, scope: Scope) -> Tensor:
    if scope.active:
        return gather_as_stored(param, scope)
    scope.begin()
    try:
        whole = gather_as_stored(param, scope)
        scope.watch_backward(whole)
    finally:
        scope.end()
    return whole


def attach_read(parameter: DTensor, owner: nn.Module, attribute: str) -> None:
    """Replace `parameter.full_tensor` by a `WholeRead` of `owner.attribute`."""
    vars(parameter)[READ] = WholeRead(owner, attribute)


def carry_read(parameter: Tensor, other: Tensor) -> None:
    """Copy the `WholeRead` of `parameter` to `other`, which replaces the parameter in its module."""
    read = vars(parameter).get(READ)
    if read is not None:
        vars(other)[READ] = read


torch.serialization.add_safe_globals([WholeRead])  # parameters are saved with their attributes
