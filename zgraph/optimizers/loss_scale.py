"""`zgraph.set_loss_scale` and `zgraph.reset_error_feedback`: control of error feedback by the training loop."""

from __future__ import annotations

import math

import torch
from torch import nn

from zgraph.optimizers.gradients import GradScaler
from zgraph.sharding.scope import ShardedParam, sharded_parameters
from zgraph.torch_compat.dynamo import without_compile


def set_loss_scale(model: nn.Module, scale: float | torch.amp.GradScaler) -> None:
    """Inform error feedback of the loss scale, so that the kept errors have the scale of the next gradients.

        scaler = zgraph.GradScaler("cuda")
        zgraph.set_loss_scale(model, scaler)        # once; the scaler informs the model from then on

    When the scale changes, the errors are multiplied by new / old, which is exact for powers of two. A step that is
    skipped because of an overflow leaves the errors unchanged. For this, each reduction keeps a copy of the previous
    errors until the step has succeeded; the copy doubles the memory of the errors during a step.

    With a `zgraph.GradScaler`, one call is enough: each `update()` informs the model of the new scale and of the
    parameters whose steps were skipped. Otherwise, call this function before the first forward and after each change of
    the scale; with torch's own GradScaler, after every `scaler.update()`. If the scale has become smaller, the last
    step counts as skipped. A step skipped at an unchanged scale is not detected, so its effect on the errors stays.

    Args:
        model: module returned by `zgraph.shard`, compiled or not. Every rank calls this with the same scale.
        scale: factor by which the next losses are multiplied, or a scaler. A disabled scaler means no scaling.

    Raises:
        ValueError: nothing is sharded, or the scale is not a positive, finite number.
    """
    params = _params_of(model, "set_loss_scale")
    found: float | None
    if isinstance(scale, torch.amp.GradScaler):
        found = float(scale.get_scale()) if scale.is_enabled() else None
    else:
        found = float(scale)
    if found is not None and not (math.isfinite(found) and found > 0):
        raise ValueError(
            f"zgraph.set_loss_scale: scale={found}; losses are multiplied by a positive, finite number, such as 65536."
        )
    for param in params.values():
        param.state.feedbacks.set_loss_scale(found)
    if isinstance(scale, GradScaler):
        scale.follow(without_compile(model))


def reset_error_feedback(model: nn.Module) -> None:
    """Discard the errors that compression has kept, and their counts. The loss scale stays as it is.

    Call this before another compression method is used for the gradients.

    Args:
        model: module returned by `zgraph.shard`, compiled or not. Every rank must call this; otherwise ranks would draw
            different random numbers in a reduction.

    Raises:
        ValueError: nothing is sharded.
    """
    for param in _params_of(model, "reset_error_feedback").values():
        param.state.feedbacks.by_slot.clear()


def _params_of(model: nn.Module, caller: str) -> dict[str, ShardedParam]:
    module = without_compile(model)
    params = sharded_parameters(module)
    if not params:
        raise ValueError(
            f"zgraph.{caller}: nothing in this {type(module).__name__} is sharded, so nothing is compressed; call "
            "zgraph.shard first."
        )
    return params
