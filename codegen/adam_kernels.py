"""The kernels of `zgraph::fused_adam_`: moments of bf16 are updated on the host, or on the device that they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.adam_reference import AdamOptions
from zgraph.codegen.kernels.cpu.adam import update
from zgraph.codegen.kernels.triton import adam as triton_adam
from zgraph.dialect import adam as adam


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


def fused_adam_on_cuda(parameters: Sequence[Tensor], *lists: Any, **options: Any) -> None:
    if parameters:
        with torch.cuda.device(parameters[0].device):  # Triton launches on the current GPU
            triton_adam.update(parameters, *lists, **options)


for name in ("zgraph::fused_adam_", "zgraph::fused_adam_.tensor_lr"):
    torch.library.impl(name, "cpu", fused_adam_)
    torch.library.impl(name, "cuda", fused_adam_on_cuda)
