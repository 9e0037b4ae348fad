"""What a captured step refuses before it is traced: optimizers and variables that it cannot honour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim

from zgraph.step.variables import variables_of
from zgraph.torch_compat.modules import step_hooks

# Each element is updated by its own gradient and state alone, so that they may step on shards; others step on DTensors.
ELEMENT_WISE = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.RMSprop,
        optim.Adagrad,
        optim.Adadelta,
        optim.NAdam,
        optim.RAdam,
        optim.Rprop,
    }
)


def check_optimizer(optimizer: optim.Optimizer) -> None:
    """Refuse optimizers whose step cannot be traced.

    Raises:
        ValueError: says why.
    """
    if isinstance(optimizer, optim.ASGD):
        raise ValueError(
            "zgraph.training_step: ASGD is not captured, for its step makes tensors of numbers, which would be "
            "constants; train with torch.compile(model) and call optimizer.step() yourself."
        )
    for name in ("differentiable", "capturable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ValueError(
                f"zgraph.training_step: the optimizer is {name}; create it without this option, which changes how it "
                "counts steps."
            )
    foreign = [hook for hook in step_hooks(optimizer) if not _is_own(hook)]
    if foreign:
        raise ValueError(
            f"zgraph.training_step: the optimizer has a step hook, {foreign[0]!r}, which would run only while the step "
            "is traced; remove it, or do its work after the step."
        )


def _is_own(hook: Any) -> bool:
    """Whether zgraph has registered it: `step_on_shards` does what a captured step does anyway."""
    return str(getattr(hook, "__module__", "")).startswith("zgraph.")


def check_function(function: Callable[..., Any], optimizer: optim.Optimizer) -> None:
    """Refuse functions that use what a step does not capture.

    Raises:
        ValueError: names the variable.
    """
    for name, value in variables_of(function):
        if isinstance(value, optim.Optimizer) and value is not optimizer:
            raise ValueError(
                f"zgraph.training_step: the step uses a second optimizer, {name}; use one with several parameter "
                "groups, or write a step for each."
            )
