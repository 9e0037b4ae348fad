"""AdamW updates on packed state; kernels: `zgraph.codegen.adam_kernels`.

    packed_adamw_([shard, ...], [grad, ...], [state, ...], [step, ...], ...)

`packed_adamw_` computes the same as `aten::_fused_adamw_`, except for the rounding of what it stores. The layout of the
state is that of `zgraph.compression.packed_state`.
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
