"""What compression must be told: of losses that are scaled, of steps that are dropped, of errors to be forgotten."""

from __future__ import annotations

import math

import torch
from torch import nn

from zgraph.optimizers.gradients import GradScaler
from zgraph.sharding.scope import ShardedParam, sharded_parameters
from zgraph.torch_compat.dynamo import without_compile


def set_loss_scale(model: nn.Module, scale: float | torch.amp.GradScaler) -> None:
    """Tell the errors that compression keeps by what losses are multiplied: gradients of another scale need others.

        scaler = zgraph.GradScaler("cuda")
        zgraph.set_loss_scale(model, scaler)        # once; the scaler tells the model from then on

    When the scale changes, the kept errors are multiplied by new / old: exact where that is a power of two. Of a step
    that is dropped because of an overflow nothing remains in them: from the first call on each reduction keeps a copy
    of the errors from before, until the step is known to count, which doubles what they take during a step.

    A `zgraph.GradScaler` tells the model in each `update()`, parameter by parameter, which steps its optimizers have
    dropped, and it tells the scale that it loads. Of any other scale only this function knows: call it before the
    first forward, and, with torch's own GradScaler, again after every `scaler.update()`. A smaller scale than the last
    one then says that the last step was dropped; a step that is dropped at an equal scale cannot be told from one that
    is taken, and leaves what it did to the errors.

    Args:
        model: what `zgraph.shard` returned, compiled or not. Every rank calls it with the same scale.
        scale: the factor of the losses to come, or a scaler that has one; a scaler that is not enabled has none.

    Raises:
        ValueError: nothing is sharded, or the scale is not a positive, finite number.
    """
    reads = _reads_of(model, "set_loss_scale")
    found: float | None
    if isinstance(scale, torch.amp.GradScaler):
        found = float(scale.get_scale()) if scale.is_enabled() else None
    else:
        found = float(scale)
    if found is not None and not (math.isfinite(found) and found > 0):
        raise ValueError(
            f"zgraph.set_loss_scale: scale={found}; losses are multiplied by a positive, finite number, such as 65536."
        )
    for read in reads.values():
        read.state.feedbacks.set_loss_scale(found)
    if isinstance(scale, GradScaler):
        scale.follow(without_compile(model))


def reset_error_feedback(model: nn.Module) -> None:
    """Drop what compression has kept of earlier gradients: the errors start as zeros again, and so do their counts.

    Such as before another method compresses the gradients. What `set_loss_scale` has told stays.

    Args:
        model: what `zgraph.shard` returned, compiled or not. Every rank calls it, or ranks would disagree on the random
            numbers of a reduction.

    Raises:
        ValueError: nothing is sharded.
    """
    for read in _reads_of(model, "reset_error_feedback").values():
        read.state.feedbacks.by_slot.clear()
        read.state.weight_copy = None


def _reads_of(model: nn.Module, caller: str) -> dict[str, ShardedParam]:
    module = without_compile(model)
    reads = sharded_parameters(module)
    if not reads:
        raise ValueError(
            f"zgraph.{caller}: nothing in this {type(module).__name__} is sharded, so nothing is compressed; call "
            "zgraph.shard first."
        )
    return reads
