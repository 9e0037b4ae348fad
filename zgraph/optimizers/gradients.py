"""Drop-in replacements for `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_`, for sharded gradients.

torch's own versions compute two results from only one rank's shards: whether a gradient has overflowed, and the
infinity norm of the gradients.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.optimizers.local_norm import ShardedGradients
from zgraph.runtime.collective_error import collective_error
from zgraph.sharding.scope import sharded_parameters
from zgraph.sharding.tensors.sharded_tensor import as_sharded, note_change
from zgraph.tiers.devices import KINDS
from zgraph.torch_compat.autograd import AgreeingGradScaler
from zgraph.torch_compat.collectives import all_gather, all_reduce_op, wait
from zgraph.torch_compat.dtensor import gradients_of, replicated_scalar

Found = list[tuple[torch.optim.Optimizer, list[Tensor]]]  # flags of dropped steps


class GradScaler(AgreeingGradScaler):
    """A `torch.amp.GradScaler` for sharded models: all ranks skip a step if any rank finds an inf or a NaN.

    Arguments and methods are those of `torch.amp.GradScaler`; every rank must make the same calls. If gradients are
    compressed, also call `zgraph.set_loss_scale(model, scaler)`. The scaler then informs the model of each new scale
    and of skipped steps, so that error feedback stays correct.

    Attributes:
        defer: callback that receives the steps' overflow flags from each `update()`, perhaps before the device has
            computed the flags; pass the flags to `tell_models` later. None: `update()` itself informs the models.
        found: overflow flags of the steps since the last `update()`, by optimizer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.found: Found = []
        self.defer: Callable[[Found], None] | None = None

    def follow(self, model: nn.Module) -> None:
        """Inform a model of new scales and skipped steps from now on."""
        self._models.add(model)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        found, self.found = self.found, []
        if self.defer is not None:
            self.defer([(optimizer, [flag.clone() for flag in flags]) for optimizer, flags in found])
            super().update(new_scale)
            return
        dropped = self._dropped(found)
        super().update(new_scale)
        self._tell(dropped)

    def tell_models(self, found: Found) -> None:
        """Inform the models of the steps that an earlier `update()` has skipped.

        Args:
            found: overflow flags that `defer` received in that `update()`.
        """
        self._tell(self._dropped(found))

    def _dropped(self, found: Found) -> set[int]:
        """Return the ids of the parameters whose steps were skipped."""
        if not self._models:  # reading the flags waits for the device, so only if a model needs them
            return set()
        return {
            id(parameter)
            for optimizer, flags in found
            if any(flag.item() for flag in flags)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._tell(set())

    def _tell(self, dropped: set[int]) -> None:
        if not (self.is_enabled() and self._models):
            return
        scale = float(self.get_scale())
        for model in self._models:
            for param in sharded_parameters(model).values():
                param.state.feedbacks.set_loss_scale(scale, dropped=id(param.sharded) in dropped)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_models": None,
            "found": [],
            "defer": None,
        }  # a copy of the scaler must not copy models

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_models": weakref.WeakSet[nn.Module]()})

    def agree(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for group in _groups_of(parameters):
            for flag in flags.values():
                try:
                    flag.copy_(wait(all_reduce_op()(flag, "max", group.group_name)))
                except RuntimeError as error:
                    raise collective_error("all_reduce", ["GradScaler's found_inf"], group.group_name, error) from error
        self.found.append((optimizer, list(flags.values())))


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pipeline: DeviceMesh | dist.ProcessGroup | None = None,
) -> Tensor:
    """Clip gradients like `torch.nn.utils.clip_grad_norm_`, but faster, and also correctly for the infinity norm.

    Norms are computed on local shards instead of by one DTensor operation for each parameter. Without `pipeline`, each
    pipeline stage is clipped by its own norm, as by torch's function.

    Args:
        parameters: parameters of a sharded model; the same on every rank, or with `pipeline` on every rank of a stage.
        max_norm, norm_type, error_if_nonfinite, foreach: as for `torch.nn.utils.clip_grad_norm_`.
        pipeline: mesh axis or process group with one rank of each stage, such as `mesh["pp"]`; all stages are then
            clipped by the norm of the whole model. If modules are replicated on several stages, use
            `zgraph.Replicas.clip_grad_norm_` instead, which counts each replica once.

    Returns:
        The norm before clipping, replicated; NaN on every rank if a gradient of any rank has a NaN. With `pipeline` it
        is a plain tensor, equal on all stages.

    Raises:
        RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite` is set.
        CollectiveError: a collective failed.
    """
    everything = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if pipeline is not None:
        return clip_by_stages(everything, everything, pipeline, max_norm, norm_type, error_if_nonfinite, foreach)
    found = [grad for grad in gradients_of(everything) if grad is not None]
    order = float(norm_type)
    note_change(found[:1], "zgraph.clip_grad_norm_", (max_norm, order))
    if order != math.inf or not everything:
        sharded = ShardedGradients.of(found) if math.isfinite(order) and order > 0 else None
        if sharded is None or sharded.mesh.device_type not in KINDS:
            return torch.nn.utils.clip_grad_norm_(everything, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = sharded.norm(order, foreach)
        local_norm = norm.to_local()
        if error_if_nonfinite:
            _refuse_nonfinite(local_norm, norm_type)
        sharded.scale(max_norm, local_norm, foreach)
        as_sharded(norm)
        return norm
    grads = [_local(grad) for grad in found]
    first = everything[0]
    dtype = first.dtype  # dtype of the result, the same on ranks with and without rows
    for parameter in everything[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)
    filled = [grad for grad in grads if grad.numel()]
    # Norms are exchanged on the mesh's device; gradients of parameters offloaded from a GPU are on the host.
    device = first.device_mesh.device_type if isinstance(first, DTensor) else first.device
    total = torch.nn.utils.get_total_norm(filled, norm_type, foreach=foreach).to(device, dtype)
    for group in _groups_of(everything):
        # Gathered, not reduced by MAX, for which gloo may return a number although a rank has sent a NaN.
        norms = total.new_empty(dist.get_world_size(group))
        try:
            all_gather(norms, total.view(1), group)
        except ZgraphError:
            raise  # a captured step refuses it
        except RuntimeError as error:
            raise collective_error("all_gather", ["the gradients' norm"], group.group_name, error) from error
        total = norms.amax()
    if error_if_nonfinite:
        _refuse_nonfinite(total, norm_type)
    if isinstance(first, DTensor):
        total = replicated_scalar(total.to(first.device), first.device_mesh)
        as_sharded(total)
    torch.nn.utils.clip_grads_with_norm_(everything, max_norm, total, foreach)
    return total


@torch.no_grad()
def clip_by_stages(
    parameters: Sequence[Tensor],
    counted: Sequence[Tensor],
    pipeline: DeviceMesh | dist.ProcessGroup,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of all stages of a pipeline by the norm of the whole model.

    Args:
        parameters: parameters of all of this rank's chunks.
        counted: parameters whose gradients this rank adds to the norm.
        pipeline: mesh axis or process group with one rank of each stage.
        max_norm, norm_type, error_if_nonfinite, foreach: as for `clip_grad_norm_`.

    Returns:
        The norm before clipping, [], equal on all ranks.

    Raises:
        RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite` is set.
        CollectiveError: a collective failed.
    """
    group = pipeline.get_group() if isinstance(pipeline, DeviceMesh) else pipeline
    own = _local(clip_grad_norm_(counted, math.inf, norm_type, foreach=foreach))  # clips nothing
    # Stages may differ in dtypes, and a stage without counted parameters has a norm on the CPU.
    device = _local(parameters[0]).device if parameters else own.device
    norms = torch.empty(dist.get_world_size(group), dtype=torch.float64, device=device)
    try:
        all_gather(norms, own.to(device, torch.float64).view(1), group)
    except ZgraphError:
        raise  # a captured step refuses it
    except RuntimeError as error:
        raise collective_error("all_gather", ["the gradients' norm"], group.group_name, error) from error
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite:
        _refuse_nonfinite(total, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).mul_(scale)
    return total.to(own.dtype)


def _refuse_nonfinite(norm: Tensor, norm_type: float) -> None:
    if not norm.isfinite():
        raise RuntimeError(
            f"zgraph.clip_grad_norm_: the norm of order {norm_type} is {norm.item()} on every rank, so nothing can be "
            "clipped; skip the step, or pass error_if_nonfinite=False to scale by it all the same."
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _groups_of(tensors: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """Return the process groups of all axes of the tensors' meshes, each once, in the order of first use."""
    groups: dict[str, dist.ProcessGroup] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            for group in tensor.device_mesh.get_all_groups():
                groups.setdefault(group.group_name, group)
    return list(groups.values())
