"""Gradients that wait in an optimizer's state for the next call of a training step, which applies them.

They are entries of the state like any other: state dicts and checkpoints carry them, and they rest where it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, optim

from zgraph.errors import ZgraphError
from zgraph.torch_compat.modules import step_hooks

GRADIENT = "pending_grad"  # like its parameter
SKIP = "pending_skip"  # [], of one parameter: not 0 where a GradScaler has found an inf in the gradients of all
KEYS = (GRADIENT, SKIP)


def has_pending(optimizer: optim.Optimizer) -> bool:
    """Whether gradients wait to be applied."""
    return any(GRADIENT in entries for entries in optimizer.state.values())


def refuse_pending(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before `step()`: a plain step would apply later gradients before those that wait.

    Raises:
        ZgraphError: says what to call first.
    """
    if has_pending(optimizer):
        raise ZgraphError(
            f"zgraph: a plain step of {type(optimizer).__name__} while gradients of the last call of the training step "
            "wait to be applied (zgraph.Offload, delayed_update_after); call flush() of the training step first."
        )


def guard(optimizer: optim.Optimizer) -> None:
    """Let plain steps of an optimizer be refused while gradients wait, and loads bring gradients that do."""
    if refuse_pending in step_hooks(optimizer):
        return
    optimizer.register_step_pre_hook(refuse_pending)
    load = _Load()
    optimizer.register_load_state_dict_pre_hook(load.take)
    optimizer.register_load_state_dict_post_hook(load.give)


class _Load:
    """Loads what waits for parameters that have no other state yet: torch's Adam would look for its own entries."""

    def __init__(self) -> None:
        self.alone: dict[int, dict[str, Tensor]] = {}
        self.indices: list[int] = []

    def take(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict without these entries."""
        state: dict[int, dict[str, Any]] = state_dict["state"]
        self.alone = {index: own for index, own in state.items() if own and all(key in KEYS for key in own)}
        self.indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        return {**state_dict, "state": {index: own for index, own in state.items() if index not in self.alone}}

    def give(self, optimizer: optim.Optimizer) -> None:
        """Put them where they belong."""
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in zip(self.indices, own, strict=True):
            if index in self.alone:
                optimizer.state[parameter].update(self.alone[index])
        self.alone = {}


def apply_pending(optimizer: optim.Optimizer) -> bool:
    """Step on the gradients that wait, unless a GradScaler has found an inf in them; `.grad` stays as it is.

    A step that raises leaves them waiting.

    Returns:
        Whether any were waiting.
    """
    taken = {parameter: _take(optimizer, parameter) for parameter in list(optimizer.state)}
    gradients = {parameter: entries[GRADIENT] for parameter, entries in taken.items() if GRADIENT in entries}
    if not gradients:
        return False
    try:
        if not any(bool(entries[SKIP]) for entries in taken.values() if SKIP in entries):
            _step_on(optimizer, gradients)
    except BaseException:
        for parameter, entries in taken.items():
            if entries:
                optimizer.state[parameter].update(entries)
        raise
    return True


def _take(optimizer: optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Remove what waits for a parameter from the state, and the state if that was all."""
    state = optimizer.state[parameter]
    found = {key: state.pop(key) for key in KEYS if key in state}
    if found and not state:
        del optimizer.state[parameter]
    return found


def _step_on(optimizer: optim.Optimizer, gradients: dict[Tensor, Tensor]) -> None:
    own: Iterable[Tensor] = (one for group in optimizer.param_groups for one in group["params"])
    before = {parameter: parameter.grad for parameter in own}
    try:
        for parameter in before:
            parameter.grad = gradients.get(parameter)
        optimizer.step()
    finally:
        for parameter, grad in before.items():
            parameter.grad = grad
