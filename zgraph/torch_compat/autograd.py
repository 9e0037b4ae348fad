"""How this torch's autograd and loss scaling work."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zgraph.torch_compat import release_of


def is_in_backward() -> bool:
    """Whether this thread is running a backward (`_current_graph_task_id`, 2.11 - 2.13)."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that this thread is running has come to its end (2.11 - 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


def second_derivatives_vanish() -> bool:
    """Whether what `DTensor.to_local` passes to its tensor as gradient has no graph of its own.

    2.11: `_ToTorchTensor.backward` makes a DTensor by hand, so that `create_graph=True` yields a leaf, and the second
    derivative of what was computed from it is silently zero. From 2.12 on it calls `DTensor.from_local`.
    """
    return release_of(torch.__version__) < (2, 12)


def tangents_outlive_backward() -> bool:
    """Whether gradients of outputs are held until a compiled backward has ended, although it empties its list of them.

    2.11 and 2.12: AOTAutograd's `CompiledFunction.backward` takes them as `*flat_args`; 2.13 hands the tuple on.
    """
    return release_of(torch.__version__) < (2, 13)


class AgreeingGradScaler(torch.amp.GradScaler):
    """A GradScaler that shows its overflow flags to `agree` before it acts on them.

    `_unscale_grads_` (2.11 - 2.13) makes all of them: for `unscale_`, for a step without it, and for the fused
    optimizers, which unscale on their own.
    """

    def agree(self, optimizer: torch.optim.Optimizer, flags: dict[torch.device, Tensor]) -> None:
        """Change the flags (0-d, 1.0: an inf or a NaN was found) in place."""
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = flags or {found_inf.device: found_inf}  # a rank without gradients takes part all the same
        self.agree(optimizer, flags)
        return flags
