"""The parameters that outer steps exchange: those that require gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_values(named: Mapping[str, nn.Parameter], sites: ProcessGroup | None) -> None:
    if not named:
        raise ZgraphError("zgraph.OuterSteps: no parameter of the model requires gradients; there is nothing to train.")
    for name, parameter in named.items():
        if parameter.is_meta:
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} has no values yet; call zgraph.materialize or load them before."
            )
        if parameter.is_complex():
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} is complex, and differences are exchanged as real numbers; store its real "
                "and imaginary part (torch.view_as_real) and join them in forward."
            )
        if sites is None or not isinstance(parameter, DTensor):
            continue
        shared = {*parameter.device_mesh.mesh.flatten().tolist()} & {*dist.get_process_group_ranks(sites)}
        if len(shared) > 1:
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} is sharded over ranks {sorted(shared)}, which are of different sites, so "
                'all steps would exchange gradients between sites; shard over the ranks of a site, as in mesh["dp"].'
            )


def check_unchanged(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Check that a model's trained parameters are still the same.

    Raises:
        ZgraphError: a parameter was frozen, unfrozen, added or replaced.
    """
    now = trained(model)
    for name in {**before, **now}:
        if before.get(name) is not now.get(name):
            raise ZgraphError(
                f"zgraph.OuterSteps: {name} was frozen, unfrozen, added or replaced after OuterSteps was made, and "
                "would differ between sites; call outer.finish() before such a change, and make a new OuterSteps after "
                "it."
            )
