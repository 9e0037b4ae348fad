"""The kernels of `zgraph::fused_adam_`, for bf16 moments on a CPU or a GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.adam_reference import AdamOptions
from zgraph.codegen.kernels.cpu.adam import update
from zgraph.codegen.kernels.triton import launch_options, tables
from zgraph.dialect import adam as adam

# Triton launches:
BLOCK = 1024  # elements per program
WARPS = 4
RUN = 8  # elements in one load of a thread, if tensors are aligned
FACTORS = 16  # 4-byte numbers per parameter


def fused_adam_(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    salts: Sequence[int],
    firsts: Sequence[int],
    *,
    lr: float | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    if found_inf is not None and found_inf.item() == 1:
        return
    taken = AdamOptions(lr=float(lr), **options)
    steps = [step.item() for step in state_steps]
    scale = None if grad_scale is None else grad_scale.item()
    update(parameters, grads, exp_avgs, exp_avg_sqs, steps, salts, firsts, taken, scale)


def update_on_gpu(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    salts: Sequence[int],
    firsts: Sequence[int],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    decoupled: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Run `zgraph::fused_adam_` on tensors of one GPU, with two kernel launches.

    The host never waits for the GPU: kernels read scalars that are on the GPU.
    """
    if not parameters:
        return
    device = parameters[0].device
    copies: list[tuple[Tensor, Tensor]] = []
    rows: list[list[int]] = []
    steps = [_number(step, device) for step in state_steps]
    for *given, step, salt, first in zip(parameters, grads, exp_avgs, exp_avg_sqs, steps, salts, firsts, strict=True):
        tensors = [one.contiguous() for one in given]
        copies += [(one, copy) for one, copy in zip(given, tensors, strict=True) if one is not copy]
        addresses = [one.data_ptr() for one in (*tensors, step)]
        rows.append([*addresses, tensors[0].numel(), first, salt])
    numels = tuple(row[5] for row in rows)
    programs = tables.programs_of(numels, BLOCK, device)
    if not programs.shape[0]:
        return
    scale, overflowed = (None if one is None else _number(one, device) for one in (grad_scale, found_inf))
    kind, rate = _learning_rate(lr, device)
    options = [rate, *map(_bits, (beta1, beta2, weight_decay, eps)), _address(scale), _address(overflowed)]
    table = tables.entries_of([options, *rows], device)
    factors = torch.empty(len(rows), FACTORS, dtype=torch.int32, device=device)
    shared = {"SCALED": scale is not None, "SKIPS": overflowed is not None, "enable_fp_fusion": False}
    launch_options.load("adam", "adam_factors")[(len(rows),)](
        table, factors, LR=kind, DECOUPLED=decoupled, MAXIMIZE=maximize, num_warps=1, **shared
    )
    launch_options.load("adam")[(programs.shape[0],)](
        table,
        programs,
        factors,
        COUPLED=not decoupled and weight_decay != 0,
        ALIGNED=tables.are_aligned([address for row in rows for address in row[:4]], numels, RUN),
        BLOCK=BLOCK,
        num_warps=WARPS,
        **shared,
    )
    for one, copy in copies:
        one.copy_(copy)


def _number(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a scalar tensor as fp32 on `device`; the copy is ordered by the stream and does not block the host."""
    return tensor.to(device, torch.float32, non_blocking=True)


def _learning_rate(lr: float | Tensor, device: torch.device) -> tuple[str, int]:
    """Return (dtype, address) for a learning rate on `device`, else ("number", bits of the rate as a double)."""
    if isinstance(lr, Tensor) and lr.device == device and lr.dtype in (torch.float32, torch.float64):
        return str(lr.dtype).removeprefix("torch."), lr.data_ptr()
    return "number", _bits(float(lr))


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def fused_adam_on_cuda(parameters: Sequence[Tensor], *lists: Any, **options: Any) -> None:
    if parameters:
        with torch.cuda.device(parameters[0].device):  # Triton launches on the current GPU
            update_on_gpu(parameters, *lists, **options)


for name in ("zgraph::fused_adam_", "zgraph::fused_adam_.tensor_lr"):
    torch.library.impl(name, "cpu", fused_adam_)
    torch.library.impl(name, "cuda", fused_adam_on_cuda)
