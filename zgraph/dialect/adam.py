"""Adam and AdamW updates with stochastically rounded bf16 moments; kernels: `zgraph.codegen.adam_kernels`.

    fused_adam_([shard, ...], [grad, ...], [exp_avg, ...], [exp_avg_sq, ...], [step, ...], ...)

`fused_adam_` computes the same as `aten::_fused_adamw_`, except for the rounding of moments. With rounding to nearest,
a bf16 second moment that decays by 0.999 would stop changing: each change is smaller than half a unit in the last place
(1/512), and would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_SCHEMA = (
    "(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor[] state_steps, "
    "int[] salts, int[] firsts, *, {lr} lr, float beta1, float beta2, float weight_decay, float eps, bool decoupled, "
    "bool maximize, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
)
torch.library.define("zgraph::fused_adam_", _SCHEMA.format(lr="float"))
torch.library.define("zgraph::fused_adam_.tensor_lr", _SCHEMA.format(lr="Tensor"))


@torch.library.register_fake("zgraph::fused_adam_")
@torch.library.register_fake("zgraph::fused_adam_.tensor_lr")
def _(
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    salts: Sequence[int],
    firsts: Sequence[int],
    **options: Any,
) -> None:
    """Update parameters and moments in place by one step of Adam or AdamW (`zgraph::fused_adam_`).

    Args:
        parameters: fp32, contiguous, of any shapes; written to.
        grads: fp32, of the same shapes; if `grad_scale` is given, divided by it in place.
        exp_avgs, exp_avg_sqs: bf16, of the same shapes; written to.
        state_steps: 0-d fp32 for each parameter: the number of this update, counted from 1.
        salts: a 32-bit seed for each parameter, so that parameters draw different random numbers.
        firsts: for each parameter, the index of this rank's first element in the unsharded parameter, so that ranks
            draw different random numbers.
        lr, beta1, beta2, weight_decay, eps, maximize, grad_scale, found_inf: as in `aten::_fused_adamw_`.
        decoupled: whether weight decay shrinks parameters (AdamW), or is added to gradients (Adam).
    """


def fused_adam_op(lr: object) -> Any:
    """Return the overload of `zgraph::fused_adam_` for a learning rate that is a number or a tensor."""
    packet = torch.ops.zgraph.fused_adam_
    return packet.tensor_lr if isinstance(lr, Tensor) else packet.default
