"""AdamW updates on packed state, and with a given momentum; kernels: `zgraph.codegen.adam_kernels`.

    packed_adamw_([shard, ...], [grad, ...], [state, ...], [step, ...], ...)
    momentum_adamw_([shard, ...], [mean momentum, ...], [exp_avg, ...], [exp_avg_sq, ...], [step, ...], ...)

`packed_adamw_` computes the same as `aten::_fused_adamw_`, except for the rounding of what it stores. The layout of the
state is that of `zgraph.compression.packed_state`. `momentum_adamw_` takes the place of `aten::_fused_adamw_` for
gradients that are compressed by `zgraph.passes.SignMomentum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SCHEMA = (
    "(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] states, Tensor[] state_steps, *, {lr} lr, float beta1, "
    "float beta2, float weight_decay, float eps, bool maximize, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
torch.library.define("zgraph::packed_adamw_", _SCHEMA.format(lr="float"))
torch.library.define("zgraph::packed_adamw_.tensor_lr", _SCHEMA.format(lr="Tensor"))


@torch.library.register_fake("zgraph::packed_adamw_")
@torch.library.register_fake("zgraph::packed_adamw_.tensor_lr")
def _(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    **options: Any,
) -> None:
    """Update parameters and state in place by one step of AdamW (`zgraph::packed_adamw_`).

    Args:
        parameters: fp32 or bf16, contiguous, of any shapes; written to.
        grads: gradients of the same dtypes and shapes; if `grad_scale` is given, divided by it in place.
        states: packed state of each parameter, int32; written to.
        state_steps: 0-d fp32 for each parameter: the number of this update, counted from 1.
        lr, beta1, beta2, weight_decay, eps, maximize, grad_scale, found_inf: as in `aten::_fused_adamw_`.
    """


def packed_adamw_op(lr: object) -> Any:
    """Return the overload of `zgraph::packed_adamw_` for a learning rate that is a number or a tensor."""
    packet = torch.ops.zgraph.packed_adamw_
    return packet.tensor_lr if isinstance(lr, Tensor) else packet.default


_MOMENTUM_SCHEMA = (
    "(Tensor(a!)[] self, Tensor[] momenta, Tensor(b!)[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(c!)[] state_steps, *, "
    "{lr} lr, float beta1, float beta2, float weight_decay, float eps, bool maximize, float momentum_beta1) -> ()"
)
torch.library.define("zgraph::momentum_adamw_", _MOMENTUM_SCHEMA.format(lr="float"))
torch.library.define("zgraph::momentum_adamw_.tensor_lr", _MOMENTUM_SCHEMA.format(lr="Tensor"))


@torch.library.register_fake("zgraph::momentum_adamw_")
@torch.library.register_fake("zgraph::momentum_adamw_.tensor_lr")
def _(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    **options: Any,
) -> None:
    """Update parameters in place by AdamW with given first moments and frozen second ones (`zgraph::momentum_adamw_`).

        u = momentum / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps), bounded by max(1, (1 - beta1) / sqrt(1 - beta2))
        parameter = (1 - lr weight_decay) parameter - lr u

    The bound is that of AdamW's updates (Kingma and Ba 2015, arXiv 1412.6980, section 2.1). A frozen second moment does
    not guarantee it: an element without a gradient before has none, and would move by momentum / eps.

    Args:
        parameters: any floating-point dtype and shape; written to, computed in fp32.
        momenta: mean first moment of each parameter, corrected for its bias.
        exp_avgs: overwritten with `momenta`.
        exp_avg_sqs: second moments, of `step` updates.
        state_steps: 0-d for each parameter: number of this step, counted from 1 (the optimizer has added 1). Set back
            by 1, so that it remains the number of updates of `exp_avg_sqs`.
        lr, beta1, beta2, weight_decay, eps, maximize: as in `aten::_fused_adamw_`.
        momentum_beta1: with which `momenta` were computed.

    Raises:
        ValueError: `beta1` differs from `momentum_beta1`.
    """
