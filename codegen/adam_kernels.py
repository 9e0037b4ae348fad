"""The kernels of `zgraph::packed_adamw_` and `zgraph::momentum_adamw_`, on a CPU or a GPU."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.adam_reference import AdamOptions
from zgraph.codegen.kernels.cpu.adam import update
from zgraph.codegen.kernels.triton import launch_options, tables
from zgraph.compression.packed_state import GROUP, is_coded, packed_shape
from zgraph.dialect import adam as adam

# Triton launches:
BLOCK = 1024  # elements per program
WARPS = 4
FACTORS = 16  # 4-byte numbers per parameter


def packed_adamw_(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    _check(parameters, grads, states)
    if found_inf is not None and found_inf.item() == 1:
        return
    taken = AdamOptions(lr=float(lr), **options)
    steps = [step.item() for step in state_steps]
    scale = None if grad_scale is None else grad_scale.item()
    update(parameters, grads, states, steps, taken, scale)


def update_on_gpu(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Run `zgraph::packed_adamw_` on tensors of one GPU, with a launch for each kind of parameter and one before them.

    The host never waits for the GPU: kernels read scalars that are on the GPU.
    """
    _check(parameters, grads, states)
    if not parameters:
        return
    device = parameters[0].device
    copies: list[tuple[Tensor, Tensor]] = []
    kinds: dict[tuple[torch.dtype, bool], list[list[int]]] = {}  # (dtype, has codes): table entries
    steps = [_number(step, device) for step in state_steps]
    for *given, step in zip(parameters, grads, states, steps, strict=True):
        parameter, _, state = tensors = [one.contiguous() for one in given]
        written = zip(given, tensors, (True, grad_scale is not None, True), strict=True)
        copies += [(one, copy) for one, copy, is_written in written if is_written and one is not copy]
        entry = [*(one.data_ptr() for one in (*tensors, step)), parameter.numel()]
        if parameter.numel():
            kinds.setdefault((parameter.dtype, is_coded(parameter, state)), []).append(entry)
    if not kinds:
        return
    scale, overflowed = (None if one is None else _number(one, device) for one in (grad_scale, found_inf))
    kind, rate = _learning_rate(lr, device)
    options = [rate, *map(_bits, (beta1, beta2, weight_decay, eps)), _address(scale), _address(overflowed)]
    rows = list(chain.from_iterable(kinds.values()))
    table = tables.entries_of([options, *rows], device)
    factors = torch.empty(len(rows), FACTORS, dtype=torch.int32, device=device)
    shared = {"SCALED": scale is not None, "SKIPS": overflowed is not None, "enable_fp_fusion": False}
    launch_options.load("adam", "adam_factors")[(len(rows),)](
        table, factors, LR=kind, MAXIMIZE=maximize, num_warps=1, **shared
    )
    begin = 0
    for (dtype, coded), entries in kinds.items():
        unit = GROUP if coded else 1
        programs = tables.programs_of(tuple(entry[4] // unit for entry in entries), BLOCK // unit, device)
        launch_options.load("adam", "update_codes" if coded else "update_words")[(programs.shape[0],)](
            table[begin:],
            programs,
            factors[begin:],
            HALF=dtype == torch.bfloat16,
            BLOCK=BLOCK,
            num_warps=WARPS,
            **shared,
        )
        begin += len(entries)
    for one, copy in copies:
        one.copy_(copy)


def _check(parameters: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Tensor]) -> None:
    """Refuse tensors for which kernels would read or write other memory."""
    for parameter, grad, state in zip(parameters, grads, states, strict=True):
        is_known = parameter.dtype == grad.dtype in (torch.float32, torch.bfloat16) and parameter.shape == grad.shape
        shape = packed_shape(parameter.shape, parameter.dtype, codes=is_coded(parameter, state))
        if not is_known or state.dtype != torch.int32 or state.shape != shape:
            raise ValueError(
                f"zgraph.packed_adamw_: a parameter is {parameter.dtype} {list(parameter.shape)}, its gradient "
                f"{grad.dtype} {list(grad.shape)} and its state {state.dtype} {list(state.shape)}; its state must be "
                f"torch.int32 {list(shape)}, and its gradient as the parameter is, float32 or bfloat16."
            )


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


def packed_adamw_on_cuda(parameters: Sequence[Tensor], *lists: Any, **options: Any) -> None:
    if parameters:
        with torch.cuda.device(parameters[0].device):  # Triton launches on the current GPU
            update_on_gpu(parameters, *lists, **options)


def momentum_adamw_(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    momentum_beta1: float,
) -> None:
    if beta1 != momentum_beta1:
        raise ValueError(
            f"zgraph: AdamW has betas[0]={beta1}, and momenta were averaged by SignMomentum(beta1={momentum_beta1}); "
            f"write SignMomentum(beta1={beta1}), and keep beta1 constant in schedules (cycle_momentum=False)."
        )
    bound = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
    for parameter, momentum, average, square, step in zip(
        parameters, momenta, exp_avgs, exp_avg_sqs, state_steps, strict=True
    ):
        step.sub_(1)
        average.copy_(momentum)
        root = square.float().div(1 - beta2 ** step.double()).sqrt_().add_(eps)
        update = momentum.float().div(root).clamp_(-bound, bound).mul_(lr if maximize else -lr)
        parameter.copy_(parameter.float().mul(1 - lr * weight_decay).add_(update))


for name in ("zgraph::momentum_adamw_", "zgraph::momentum_adamw_.tensor_lr"):
    torch.library.impl(name, ("cpu", "cuda"), momentum_adamw_)
for name in ("zgraph::packed_adamw_", "zgraph::packed_adamw_.tensor_lr"):
    torch.library.impl(name, "cpu", packed_adamw_)
    torch.library.impl(name, "cuda", packed_adamw_on_cuda)
