"""Entries of the state of `zgraph.AdamW8bit`: made, checked, loaded and unpacked, for plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.compression.packed_state import GROUP, Unpacked, has_codes, pack_into, packed_shape, unpack
from zgraph.torch_compat.dtensor import dtensor_of, local_of

PACKED = "packed"  # the state entry with both moments and the remainders of the weights
WEIGHT = "weight"  # an fp32 weight in a state dict
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = (torch.float32, torch.bfloat16)
NEEDED = ("lr", "betas", "eps", "weight_decay", "fused")  # options that tell AdamW's groups from those of others
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


def packed_zeros(parameter: Tensor) -> Tensor:
    """Return the packed state of a parameter before its first step, placed like the parameter."""
    local = local_part(parameter)
    own = torch.zeros(_shape(local.shape, parameter), dtype=torch.int32, device=local.device)
    return placed_like(parameter, own, _shape(parameter.shape, parameter))


def fits(parameter: Tensor, packed: object) -> bool:
    """Return whether a state entry is the packed state of a parameter as it is now."""
    if not isinstance(packed, Tensor) or parameter.dtype not in DTYPES:
        return False
    local = local_part(packed)
    return local.dtype == torch.int32 and local.shape == _shape(local_part(parameter).shape, parameter)


def check_options(group: Mapping[str, Any]) -> None:
    """Check the options of a parameter group.

    Raises:
        ValueError: an option is out of range, or not one of AdamW8bit.
    """
    foreign = [key for key in FOREIGN if key in group]
    if foreign:
        raise ValueError(f"zgraph.AdamW8bit: {foreign[0]}={group[foreign[0]]!r} is no option of it; leave it out.")
    lr, betas, eps, weight_decay = (group[key] for key in NEEDED[:4])
    if not (float(lr) >= 0 and all(0 <= beta < 1 for beta in betas) and eps >= 0 and weight_decay >= 0):
        raise ValueError(
            f"zgraph.AdamW8bit: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}; betas must be at "
            "least 0 and less than 1, and the others at least 0."
        )


def own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a saved group, of AdamW8bit or torch.optim.AdamW, without those of torch alone.

    Raises:
        ValueError: the group is of another optimizer.
    """
    for key, allowed in FOREIGN.items():
        if key in group and group[key] not in allowed:
            raise ValueError(
                f"zgraph.AdamW8bit: the state dict is of an optimizer with {key}={group[key]!r}, which this one does "
                "not have; load it into the optimizer that saved it."
            )
    missing = [key for key in NEEDED if key not in group]
    if missing:
        raise ValueError(
            f"zgraph.AdamW8bit: the state dict is of another optimizer, because it has no {missing[0]}; load the state "
            "dict of AdamW8bit or of torch.optim.AdamW."
        )
    return {key: value for key, value in group.items() if key not in FOREIGN} | {"fused": True}


def check_entries(index: int, parameter: Tensor, entries: Mapping[str, Any]) -> None:
    """Check the saved state of one parameter: packed, in the form of torch.optim.AdamW, or only a weight.

    Raises:
        ValueError: an entry is missing or unknown, or has another shape, dtype or placement than the parameter.
    """
    wanted = {"step": (), PACKED: _shape(parameter.shape, parameter)}
    if PACKED not in entries:
        of_adamw = () if set(entries) == {WEIGHT} else ("step", *MOMENTS)
        wanted = {key: () if key == "step" else tuple(parameter.shape) for key in of_adamw}
        wanted |= {WEIGHT: tuple(parameter.shape)} if WEIGHT in entries else {}
    wrong = [f"no {key}" for key in wanted if key not in entries]
    wrong += [_described(key, value) for key, value in entries.items() if not _is_right(key, value, wanted, parameter)]
    if wrong:
        raise ValueError(
            f"zgraph.AdamW8bit: the state of parameter {index} ({_described('it', parameter)}) has "
            f"{' and '.join(wrong)}; load the state dict of AdamW8bit or torch.optim.AdamW for parameters that are "
            "placed alike, or write zgraph.save_checkpoint and zgraph.load_checkpoint, which take any placement."
        )


def loaded(parameter: Tensor, entries: Mapping[str, Any]) -> Tensor | None:
    """Return the packed state for saved entries; None if they are only a weight. Writes a saved weight.

    Args:
        parameter: overwritten if `entries` has its fp32 weight.
        entries: entries that `check_entries` has accepted.
    """
    local = local_part(parameter)
    if PACKED in entries:
        own = _part_of(parameter, entries[PACKED]).to(local.device, copy=True)
        return placed_like(parameter, own, entries[PACKED].shape)
    weight = _part_of(parameter, entries.get(WEIGHT, parameter)).to(local.device, torch.float32)
    if MOMENTS[0] not in entries:
        local.copy_(weight)
        return None
    packed = packed_zeros(parameter)
    moments = (_part_of(parameter, entries[key]).to(local.device, torch.float32) for key in MOMENTS)
    pack_into(local, local_part(packed), Unpacked(weight, *moments))
    return packed


def unpacked(parameter: Tensor, packed: Tensor | None) -> dict[str, Tensor]:
    """Return a parameter's fp32 weight and its moments, placed like it; only the weight if it has no state."""
    local = local_part(parameter)
    if packed is None:
        return {WEIGHT: placed_like(parameter, local.to(torch.float32, copy=True), parameter.shape)}
    whole = unpack(local, local_part(packed))
    parts = {"exp_avg": whole.exp_avg, "exp_avg_sq": whole.exp_avg_sq, WEIGHT: whole.weight}
    return {key: placed_like(parameter, value, parameter.shape) for key, value in parts.items()}


def local_part(tensor: Tensor) -> Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def placed_like(parameter: Tensor, local: Tensor, shape: Iterable[int]) -> Tensor:
    """Return a local tensor as a DTensor with a whole shape of its own, placed like a parameter that is one."""
    return dtensor_of(local, parameter, tuple(shape)) if isinstance(parameter, DTensor) else local


def _shape(shape: Iterable[int], parameter: Tensor) -> tuple[int, ...]:
    return packed_shape(tuple(shape), parameter.dtype, codes=_gets_codes(parameter))


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


def _is_right(key: str, value: Any, wanted: Mapping[str, tuple[int, ...]], parameter: Tensor) -> bool:
    if key == "step" and isinstance(value, int | float):
        return True
    if not isinstance(value, Tensor) or tuple(value.shape) != wanted.get(key):
        return False
    if value.dtype != torch.int32 if key == PACKED else not value.dtype.is_floating_point:
        return False
    if key == "step" or not isinstance(value, DTensor):
        return True
    placed = isinstance(parameter, DTensor) and (value.device_mesh, value.placements)
    return placed == (isinstance(parameter, DTensor) and (parameter.device_mesh, parameter.placements)) and bool(placed)


def _described(key: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{key} of type {type(value).__name__}"
    placed = f", placed {value.placements}" if isinstance(value, DTensor) else ""
    return f"{key} of shape {list(value.shape)} and {value.dtype}{placed}"


def _part_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a state entry, which is placed like the parameter, or whole and equal on all ranks."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        mesh = parameter.device_mesh
        value = distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return local_part(value)
