"""Optimizer state by parameter name instead of parameter number, as in torch's `get_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.checkpoint.several_optimizers import Checkpointed
from zgraph.errors import CheckpointError
from zgraph.sharding.model.dry_run_load import COMPILED
from zgraph.sharding.scope import state_of
from zgraph.torch_compat.modules import local_parameters


def group_names(module: nn.Module, optimizer: Checkpointed) -> list[list[str]]:
    """Return the names of the parameters in each optimizer group.

    Raises:
        CheckpointError: the optimizer steps a tensor that is not a parameter of the model.
    """
    names = {id(parameter): name.replace(COMPILED, "") for name, parameter in module.named_parameters()}
    groups: list[list[str]] = []
    for position, group in enumerate(optimizer.param_groups):
        unknown = [list(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise CheckpointError(
                f"zgraph: group {position} of the optimizer holds {len(unknown)} tensors that are not parameters of "
                f"the model, the first of shape {unknown[0]}; pass the model that it steps, and create it after "
                "zgraph.shard."
            )
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def names_by_index(groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]) -> dict[int, str]:
    """Return the parameter names by the parameter numbers in an optimizer's state dict."""
    return {
        index: name
        for group, own in zip(groups, names, strict=True)
        for index, name in zip(group["params"], own, strict=True)
    }


def ignored_states(module: nn.Module, optimizer: Checkpointed) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state of parameters that `zgraph.shard` has ignored, by name.

    Each rank steps such parameters by itself, so their state may differ between ranks.
    """
    ignored = _ignored_names(module)
    saved = optimizer.state_dict()
    by_index = names_by_index(saved["param_groups"], group_names(module, optimizer))
    return {
        by_index[index]: {key: value.to_local().cpu() for key, value in entries.items() if isinstance(value, DTensor)}
        for index, entries in saved["state"].items()
        if by_index[index] in ignored
    }


def _ignored_names(module: nn.Module) -> frozenset[str]:
    ignored = {
        id(local_parameters(part)[attribute])
        for part in module.modules()
        if (state := state_of(part)) is not None
        for attribute, param in state.by_attribute.items()
        if param.spec.ignored
    }
    return frozenset(
        name.replace(COMPILED, "") for name, parameter in module.named_parameters() if id(parameter) in ignored
    )
