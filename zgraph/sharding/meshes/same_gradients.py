"""A check that parameters which a tensor-parallel axis does not split have equal gradients on all ranks of the axis.

Gradients differ if ranks compute with different activations, for example in a layer that reads a part of the sequence,
or with dropout and different random states. zgraph does not sum such gradients, so the replicas would drift apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.torch_compat.collectives import all_gather
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.modules import hook_steps, local_parameters

_TOLERANCE = 0.02  # fraction of the norm: nondeterministic summation stays far below, different activations exceed it
_NOISE = 1e-4  # fraction of the largest norm: smaller gradients may be pure rounding, such as of a bias before a norm


class SameGradients:
    """A check that compares gradients over a tensor-parallel axis before the first optimizer step.

    All ranks of the axis must run it.

    Args:
        mesh: the tensor-parallel axis, a mesh of T ranks.
        places: (name, module, attribute) of each parameter.
    """

    def __init__(self, mesh: DeviceMesh, places: Sequence[tuple[str, nn.Module, str]]) -> None:
        self.mesh = mesh
        self.names = [name for name, _, _ in places]
        self.places = [(weakref.ref(part), attribute) for _, part, attribute in places]
        self.is_due = mesh.size() > 1 and bool(places)

    @classmethod
    def watching(cls, mesh: DeviceMesh, places: Sequence[tuple[str, nn.Module, str]]) -> SameGradients:
        """Create a check that runs when an optimizer first steps any of the parameters in `places`."""
        made = cls(mesh, places)
        watched = weakref.ref(made)

        def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            one = watched()
            if one is not None and one.is_due:
                one.check(optimizer)

        hook_steps(made, before=check)
        return made

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare gradients of the watched parameters, if `optimizer` steps any of them.

        Raises:
            ZgraphError: some gradients differ; raised on all ranks of the group.
        """
        parameters = self._parameters()
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in stepped for parameter in parameters):
            return
        grads = [local_of(one.grad) if isinstance(one.grad, DTensor) else None for one in parameters]
        if all(grad is None for grad in grads) or any(grad is not None and is_fake(grad) for grad in grads):
            return
        with torch.no_grad():
            own = torch.stack([_described(grad, number) for number, grad in enumerate(grads)])
            own = own.to(torch.float32).to(self.mesh.device_type)
            every = own.new_empty((self.mesh.size() * own.shape[0], 2))
            all_gather(every, own, self.mesh.get_group())
            every = every.view(self.mesh.size(), -1, 2).cpu()
        if not every.isfinite().all():
            return  # a step that a GradScaler will drop
        self.is_due = False
        spread = (every.amax(0) - every.amin(0)).amax(-1)
        norms = every[..., 0].amax(0)
        differing = (spread > _TOLERANCE * norms) & (norms > _NOISE * norms.max())
        if differing.any():
            names = [name for name, differs in zip(self.names, differing.tolist(), strict=True) if differs]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ZgraphError(
                f"zgraph: {', '.join(names[:4])}{more} got different "
                "gradients on the ranks of one tensor-parallel group, although all hold the same values, which would "
                "drift apart. Give a layer that reads a part of the sequence the style SequenceParallel() in "
                "parallelize_module, and ranks of one group the same random state if there is dropout."
            )

    def _parameters(self) -> list[Tensor]:
        found = [(part(), attribute) for part, attribute in self.places]
        held = [local_parameters(part).get(attribute) if part is not None else None for part, attribute in found]
        return [torch.empty(0) if parameter is None else parameter for parameter in held]


def _described(grad: Tensor | None, number: int) -> Tensor:
    """Return a gradient's norm, and its dot product with random numbers that are equal on all ranks, as fp64 [2]."""
    if grad is None:
        return torch.zeros(2, dtype=torch.float64)
    values = grad.detach().reshape(-1).cpu().double()
    drawn = torch.randn(values.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return torch.stack([values.norm(), values @ drawn])
