"""State dicts of optimizers as a run without sharding has them: plain tensors, under the optimizer's own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.checkpoint.all_ranks import rank_and_world
from zgraph.optimizers.local_step import SCALARS


def whole_state_dict(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return the state dict with unsharded CPU tensors on rank 0, and {} elsewhere; every rank must call it.

    State is gathered one tensor at a time.
    """
    first = rank_and_world()[0] == 0
    found = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for number, entries in found["state"].items():
        for key, value in entries.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if first:
                state.setdefault(number, {})[key] = whole.cpu() if isinstance(whole, Tensor) else whole
    return {**found, "state": state} if first else {}


def load_whole_state_dict(optimizer: optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict of plain tensors, equal on all ranks, into an optimizer of sharded parameters.

    Raises:
        ValueError: the state dict has other groups of parameters.
    """
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    by_number = dict(zip(numbers, parameters, strict=False))  # the optimizer itself compares the lengths
    state = {
        number: {key: _placed(value, key, by_number.get(number)) for key, value in entries.items()}
        for number, entries in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})


def _placed(value: Any, key: str, parameter: Tensor | None) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    if key in SCALARS or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
