"""`zgraph.AdamW8bit`: AdamW whose moments take one byte each, for weights of fp32 or of bf16 with 8 further bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.compression.packed_state import GROUP, Unpacked, has_codes, pack_into, packed_shape, unpack
from zgraph.dialect.adam import packed_adamw_op
from zgraph.errors import ZgraphError
from zgraph.torch_compat.dtensor import dtensor_like, dtensor_of, local_of

PACKED = "packed"  # the state entry with both moments and the remainders of the weights
MOMENTS = ("exp_avg", "exp_avg_sq")
# Options of torch.optim.AdamW, with the values that a loaded state dict may have.
FOREIGN: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "amsgrad": (False,),
        "decoupled_weight_decay": (True,),
        "foreach": (None, False, True),
        "capturable": (False, True),
        "differentiable": (False,),
    }
)


class AdamW8bit(optim.Optimizer):
    """AdamW with state of 2.1 bytes per element of fp32 weights, or 3.1 bytes per element of bf16 weights.

    Takes the place of torch.optim.AdamW. Moments are 8-bit codes in groups of 32; updates compute in fp32. A bf16
    weight has 8 further bits in the state, so that small updates are not lost: weights, state and gradients together
    take 7.1 bytes per element; with torch.optim.AdamW in fp32 they take 16. Vectors, and tensors whose rows are no
    multiple of 32 elements, keep moments of fp32.

    Works on plain tensors, on the parameters of `zgraph.shard` and on other DTensors, in `zgraph.training_step` and in
    plain lines, with `GradScaler`, learning rate schedulers and checkpoints. Results do not depend on the number of
    ranks. The layout of the state is described in `zgraph.compression.packed_state`.

    Changing a bf16 weight between steps keeps its 8 further bits, which then add at most half a unit in its last place.

    Args:
        params: fp32 or bf16 parameters, or groups of them.
        lr: learning rate, a number or a tensor.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.

    Raises:
        ValueError: an option is out of range, or a parameter has another dtype.

    Source: FlashOptim, arXiv 2602.23349, with other codes (see `packed_state`).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        is_valid = float(lr) >= 0 and all(0 <= beta < 1 for beta in betas) and eps >= 0 and weight_decay >= 0
        if not is_valid:
            raise ValueError(
                f"zgraph.AdamW8bit: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}; betas must be at "
                "least 0 and less than 1, and the others at least 0."
            )
        # `fused`: the step is one call for all parameters, which may run on the host or in a GradScaler's step.
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**options, "fused": True})
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in param_group["params"]:
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                self.param_groups.pop()
                raise ValueError(
                    f"zgraph.AdamW8bit: a parameter of shape {list(parameter.shape)} is {parameter.dtype}; make it "
                    "torch.bfloat16 or torch.float32."
                )

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and gradients first.

        Returns:
            The loss of `closure`.

        Raises:
            ZgraphError: a gradient has another dtype or other placements than its parameter, or is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        for group in self.param_groups:
            stepped = [one for one in group["params"] if one.grad is not None]
            if not stepped:
                continue
            grads = [_gradient_of(one) for one in stepped]
            states = [self._state_of(one) for one in stepped]
            steps = [entries["step"] for entries in states]
            torch.ops.aten._foreach_add_.Scalar(steps, 1)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            lr = float(lr) if isinstance(lr, int) else lr
            packed_adamw_op(lr)(
                [_local(one) for one in stepped],
                grads,
                [_local(entries[PACKED]) for entries in states],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
            if found_inf is not None:
                torch.ops.aten._foreach_sub_.List(steps, [found_inf] * len(steps))
        return loss

    def unpacked_state_dict(self) -> dict[str, Any]:
        """Return a state dict of torch.optim.AdamW, with a third tensor for each parameter: "weight".

        All three are fp32, in the shape of the parameter and placed like it. Load the weights into an fp32 model, and
        the rest into torch.optim.AdamW; `load_state_dict` of this class takes it back.
        """
        found = self.state_dict()
        parameters = list(self._parameters())
        for index, entries in found["state"].items():
            whole = unpack(_local(parameters[index]), _local(entries[PACKED]))
            tensors = {"exp_avg": whole.exp_avg, "exp_avg_sq": whole.exp_avg_sq, "weight": whole.weight.clone()}
            found["state"][index] = {
                "step": entries["step"],
                **{key: _placed_like(parameters[index], value) for key, value in tensors.items()},
            }
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of `unpacked_state_dict`, or of torch.optim.AdamW or its fused variants.

        Moments of fp32 become codes, rounded to nearest. A "weight" of fp32 overwrites its parameter.

        Raises:
            ValueError: the state dict has options or entries that this optimizer lacks; nothing was changed.
        """
        given: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        indices = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        pairs = [pair for pair in zip(indices, self._parameters(), strict=False) if given.get(pair[0])]
        groups = [_own_options(group, self.defaults) for group in state_dict["param_groups"]]
        for index, parameter in pairs:
            _check_entries(index, parameter, given[index])
        counts = {index: {"step": entries["step"]} for index, entries in given.items() if "step" in entries}
        super().load_state_dict({**state_dict, "state": counts, "param_groups": groups})
        for index, parameter in pairs:
            entries = given[index]
            if PACKED in entries:
                local = _part_of(parameter, entries[PACKED]).to(_local(parameter).device, copy=True)
                self.state[parameter][PACKED] = _placed_like(parameter, local, entries[PACKED].shape)
            else:
                packed = packed_zeros(parameter)
                given_tensors = (entries.get("weight", parameter), *(entries[key] for key in MOMENTS))
                local = _local(parameter)
                parts = (_part_of(parameter, one).to(local.device, torch.float32) for one in given_tensors)
                pack_into(local, _local(packed), Unpacked(*parts))
                self.state[parameter][PACKED] = packed

    def _parameters(self) -> Iterable[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter; in its first step, the state is made."""
        entries = self.state[parameter]
        if "step" not in entries:
            entries["step"] = torch.zeros((), dtype=torch.float32, device=_local(parameter).device)
            entries[PACKED] = packed_zeros(parameter)
        return entries


def packed_zeros(parameter: Tensor) -> Tensor:
    """Return the packed state of a parameter before its first step, placed like the parameter."""
    local, codes = _local(parameter), _gets_codes(parameter)
    own = torch.zeros(packed_shape(local.shape, local.dtype, codes=codes), dtype=torch.int32, device=local.device)
    return _placed_like(parameter, own, packed_shape(parameter.shape, local.dtype, codes=codes))


def _gets_codes(parameter: Tensor) -> bool:
    """Return whether moments become codes. All ranks agree: a row must lie on one rank, or be cut between groups."""
    if not has_codes(parameter.shape) or not isinstance(parameter, DTensor):
        return has_codes(parameter.shape)
    cuts = 1  # of columns
    for axis, placement in enumerate(parameter.placements):
        if placement.is_partial():
            return False
        if getattr(placement, "dim", 0) > 0:
            cuts *= parameter.device_mesh.size(axis)
    return cuts == 1 or (parameter.ndim == 2 and parameter.shape[1] % (GROUP * cuts) == 0)


def _own_options(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    for key, allowed in FOREIGN.items():
        if key in group and group[key] not in allowed:
            raise ValueError(
                f"zgraph.AdamW8bit: the state dict is of an optimizer with {key}={group[key]!r}, which this one does "
                "not have; load it into the optimizer that saved it."
            )
    return {key: value for key, value in group.items() if key not in FOREIGN} | {"fused": defaults["fused"]}


def _check_entries(index: int, parameter: Tensor, entries: Mapping[str, Any]) -> None:
    needed = (PACKED,) if PACKED in entries else MOMENTS
    shape = packed_shape(parameter.shape, parameter.dtype, codes=_gets_codes(parameter))
    shapes = {PACKED: shape, **dict.fromkeys((*MOMENTS, "weight"), tuple(parameter.shape))}
    wrong = [key for key in needed if key not in entries] + [key for key in entries if key not in (*shapes, "step")]
    wrong += [
        f"{key} of shape {list(value.shape)}"
        for key, value in entries.items()
        if tuple(value.shape) != shapes.get(key, ())
    ]
    if wrong:
        raise ValueError(
            f"zgraph.AdamW8bit: the state of parameter {index}, of shape {list(parameter.shape)} and "
            f"{parameter.dtype}, has or lacks {', '.join(wrong)}; load the state dict of AdamW8bit or of "
            "torch.optim.AdamW for the same parameters."
        )


def _gradient_of(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    placements = [one.placements if isinstance(one, DTensor) else None for one in (parameter, grad)]
    if grad.dtype != parameter.dtype or grad.is_sparse or placements[0] != placements[1]:
        raise ZgraphError(
            f"zgraph.AdamW8bit: the gradient of a parameter of shape {list(parameter.shape)} is {grad.layout}, "
            f"{grad.dtype} and placed {placements[1]}, and the parameter {parameter.dtype} and placed "
            f"{placements[0]}; leave gradients as backward makes them."
        )
    return _local(grad)


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _part_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a state entry, which may be a DTensor or equal and whole on all ranks."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        mesh = parameter.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return _local(value)


def _placed_like(parameter: Tensor, local: Tensor, shape: Iterable[int] | None = None) -> Tensor:
    """Return a local tensor as a DTensor placed like a parameter, with a whole shape of its own if one is given."""
    if not isinstance(parameter, DTensor):
        return local
    return dtensor_like(local, parameter) if shape is None else dtensor_of(local, parameter, tuple(shape))
