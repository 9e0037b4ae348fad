"""`zgraph.no_sync`: gradient accumulation that gathers and reduces once per window."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zgraph.errors import ZgraphError
from zgraph.sharding.scope import Scope, state_of
from zgraph.torch_compat.dynamo import without_compile


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Defer the reduction of gradients to the first backward of a forward outside this context.

        for batch in batches[:-1]:
            with zgraph.no_sync(model):
                loss(model(batch)).backward()
        loss(model(batches[-1])).backward()     # reduces the gradients of all
        optimizer.step()

    These forwards and the next one without `no_sync` form a window. What it saves depends on the stage: at stages 0
    and 1 gradients are summed on each rank and reduced once; at stages 1 and 2 parameters are gathered once, and the
    copies are kept until the closing backward ends; at stage 3 nothing is kept, and nothing changes. What counts is
    where the forward runs; its backward may run outside. All backwards of a window run before the closing one. Until
    then `.grad` holds this rank's own sum at stage 0, and zeros at stage 1. `optimizer.zero_grad()` discards the
    gradients that wait.

    Args:
        module: what `zgraph.shard` returned, compiled or not.

    Raises:
        ValueError: nothing in the module is sharded, or its parameters are of several stages.
        ZgraphError: from `optimizer.step()`, when the window has not been closed.
    """
    module = without_compile(module)
    scopes = _scopes(module)
    _check_one_stage(module)
    before = [scope.accumulating for scope in scopes]
    for scope in scopes:
        scope.accumulating = True
        refuse_early_steps(scope, module)
    try:
        yield
    finally:
        for scope, accumulating in zip(scopes, before, strict=True):
            scope.accumulating = accumulating


def _scopes(module: nn.Module) -> list[Scope]:
    scopes = [state.scope for part in module.modules() if (state := state_of(part)) is not None]
    if not scopes:
        raise ValueError(
            f"zgraph.no_sync: nothing in this {type(module).__name__} is sharded, so nothing is reduced; call "
            "zgraph.shard first, or leave no_sync out."
        )
    return list(dict.fromkeys(scopes))


def _check_one_stage(module: nn.Module) -> None:
    stages: dict[int, str] = {}
    for part in module.modules():
        state = state_of(part)
        for param in state.by_attribute.values() if state is not None else ():
            layout = param.spec.layout
            if layout.shape and not param.spec.ignored:  # 0-d parameters are replicated at every stage
                stages.setdefault(layout.zero_stage, param.name)
    if len(stages) > 1:
        found = ", ".join(f"{name} at stage {stage}" for stage, name in sorted(stages.items()))
        raise ValueError(
            f"zgraph.no_sync: the module mixes ZeRO stages ({found}), whose gradients would be reduced at different "
            "times; use no_sync on the parts of one stage each, or shard all at one stage."
        )


def refuse_early_steps(scope: Scope, module: nn.Module) -> None:
    """Refuse an optimizer step while the window is open, which would use unreduced gradients; once per scope."""
    if scope.guards_steps:
        return
    scope.guards_steps = True
    watched_scope, watched_module = weakref.ref(scope), weakref.ref(module)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        open_scope, owner = watched_scope(), watched_module()
        if open_scope is None or owner is None or not open_scope.opened:
            return
        own = {id(parameter): name for name, parameter in owner.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in own:
                    raise ZgraphError(
                        f"zgraph.no_sync: optimizer.step() on {own[id(parameter)]} while its window is open, so its "
                        "gradient is not reduced; run the last forward and backward outside of no_sync first, or the "
                        "pipeline's step again after zero_grad() if it has failed."
                    )

    weakref.finalize(scope, register_optimizer_step_pre_hook(check).remove)
