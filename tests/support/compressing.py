"""Models whose gradients are compressed, however small they are, and a look at what the parameters keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import zgraph
from tests.support.compiled import with_fx
from zgraph.compression.methods import CompressionMethod, TwoHop
from zgraph.passes import CompressGradients, presets
from zgraph.runtime.error_feedback import Feedback
from zgraph.sharding.scope import sharded_parameters


def compressing_passes(method: CompressionMethod | TwoHop, **options: Any) -> zgraph.PassList:
    """The default pipeline, in which gradients of two dims travel as the method says."""
    return zgraph.PassList(
        [
            replace(each, min_numel=1, **options) if isinstance(each, CompressGradients) else each
            for each in presets.default(compression=method)
        ]
    )


def compressing(model: nn.Module, method: CompressionMethod | TwoHop, **options: Any) -> nn.Module:
    """Compiled with fx; gradients of two dims travel as the method says."""
    return with_fx(model, passes=compressing_passes(method, **options))


def feedback_of(model: nn.Module) -> dict[str, dict[str, Feedback]]:
    """By parameter and slot, of those that keep any."""
    module = getattr(model, "_orig_mod", model)
    found = {name: read.state.feedbacks.by_slot for name, read in sharded_parameters(module).items()}
    return {name: slots for name, slots in found.items() if slots}


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what is kept, by parameter, slot and name."""
    return {
        f"{name} {slot} {key}": tensor.clone()
        for name, slots in feedback_of(model).items()
        for slot, feedback in slots.items()
        for key, tensor in feedback.tensors.items()
    }
