"""The kernel of `zgraph::fused_adam_`, on CPUs: moments of bf16 rest on the host or on disk, and are updated there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels.adam_reference import AdamOptions
from zgraph.codegen.kernels.cpu.adam import update
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


torch.library.impl("zgraph::fused_adam_", "cpu", fused_adam_)
torch.library.impl("zgraph::fused_adam_.tensor_lr", "cpu", fused_adam_)
