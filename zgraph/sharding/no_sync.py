"""`zgraph.no_sync`: gradient accumulation that gathers and reduces once per window."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from zgraph.sharding.scope import Scope, scopes_of, state_of
from zgraph.torch_compat.dynamo import without_compile


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Defer the reduction of gradients to the first backward whose forward ran outside this context.

        for batch in batches[:-1]:
            with zgraph.no_sync(model):
                loss(model(batch)).backward()
        loss(model(batches[-1])).backward()     # reduces the gradients of all batches
        optimizer.step()

    These forwards and the next one without `no_sync` form a window. The savings depend on the stage: at stages 0 and 1
    gradients are summed on each rank and reduced once; at stages 1 and 2 parameters are gathered once, and the copies
    are kept until the closing backward ends; at stage 3 nothing is kept, and nothing changes. Only the place of the
    forward counts; its backward may run outside. Each parameter closes its own window, in the first backward of a
    closing forward that reaches it, so parts of a model may be called one by one, in any order. All other backward
    passes of the window must run earlier. Until then `.grad` holds this rank's own sum at stage 0, and a placeholder at
    stage 1: each element is the sum of one `runtime.window_state.PLACEHOLDER` per backward. `zero_grad()` discards the
    pending gradients, also if called with `set_to_none=False`; scaling a `.grad` in place scales its pending gradient.

    Args:
        module: a model sharded by `zgraph.shard`, compiled or not.

    Raises:
        ValueError: nothing in the module is sharded, or its parameters are at different stages.
        ZgraphError: from `optimizer.step()`, if gradients of one of its parameters are still pending.
    """
    module = without_compile(module)
    scopes = _scopes(module)
    _check_one_stage(module)
    before = [scope.accumulating for scope in scopes]
    for scope in scopes:
        scope.accumulating = True
    try:
        yield
    finally:
        for scope, accumulating in zip(scopes, before, strict=True):
            scope.accumulating = accumulating


def _scopes(module: nn.Module) -> list[Scope]:
    scopes = scopes_of(module)
    if not scopes:
        raise ValueError(
            f"zgraph.no_sync: nothing in this {type(module).__name__} is sharded, so nothing is reduced; call "
            "zgraph.shard first, or leave no_sync out."
        )
    return scopes


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
