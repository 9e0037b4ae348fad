"""`zgraph.set_loss_scale` and `zgraph.reset_error_feedback`, by which a training loop informs error feedback."""

from __future__ import annotations

import math

import torch
from torch import nn

from zgraph.optimizers.gradients import GradScaler
from zgraph.sharding.scope import ShardedParam, sharded_parameters
from zgraph.torch_compat.dynamo import without_compile


def set_loss_scale(model: nn.Module, scale: float | torch.amp.GradScaler) -> None:
    """Tell error feedback the factor of the losses, so that kept errors have the scale of the next gradients.

        scaler = zgraph.GradScaler("cuda")
        zgraph.set_loss_scale(model, scaler)        # once; the scaler tells the model from then on

    When the scale changes, the kept errors are multiplied by new / old, which is exact for powers of two. A step that
    is dropped because of an overflow does not change the errors: once this function has been called, each reduction
    keeps a copy of the previous errors until the step has succeeded. The copy doubles the memory of the errors during
    a step.

    A `zgraph.GradScaler` tells the model in each `update()`, parameter by parameter, which steps its optimizers have
    dropped. It also tells the model each scale that is loaded into the scaler. Call this function for any other scale:
    before the first forward and, with torch's own GradScaler, after every `scaler.update()`. A scale smaller than the
    last one then means that the last step was dropped. A step that is dropped without a change of scale looks
    like a step that was taken, so its effect on the errors stays.

    Args:
        model: module returned by `zgraph.shard`, compiled or not. Every rank calls this with the same scale.
        scale: factor of the next losses, or a scaler that has the factor. A disabled scaler has none.

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
    """Drop the errors that compression has kept, so that errors and their counts start again at zero.

    Needed before another compression method takes over the gradients. The loss scale stays as it was set.

    Args:
        model: module returned by `zgraph.shard`, compiled or not. Every rank must call this, or ranks would disagree on
            the random numbers of a reduction.

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
