"""`zgraph.no_sync`: gradient accumulation with a single reduction at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import nn

from zgraph.sharding.scope import Scope, scopes_of, state_of
from zgraph.torch_compat.dynamo import without_compile


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Generator[None]:
    """Defer the reduction of gradients to the backward of the first forward outside this context.

        for batch in batches[:-1]:
            with zgraph.no_sync(model):
                loss(model(batch)).backward()
        loss(model(batches[-1])).backward()     # reduces the gradients of all batches
        optimizer.step()

    The forwards under `no_sync` and the next forward outside form a window. The closing backward is the backward of
    that last forward.

    - Stage 0 sums gradients on each rank in `.grad`, and reduces them once, in the closing backward.
    - Stage 1 sums gradients on each rank outside of `.grad`, and reduces them once; parameters are gathered once and
      kept until the closing backward ends. Until then, `.grad` is a placeholder: each element is
      `runtime.window_state.PLACEHOLDER` times the number of backwards so far.
    - Stage 2 reduces gradients in every backward; parameters are gathered once and kept.
    - Stage 3 is not changed by `no_sync`.

    Only the place of a forward counts; its backward may run inside or outside the context. All other backwards of
    the window must run before the closing one. Each parameter closes its own window, so the parts of a model may be
    called separately and in any order. `zero_grad()` discards pending gradients, even with `set_to_none=False`. Scaling
    `.grad` in place scales the pending gradient.

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
            # Parameters that are 0-d or optional are replicated at every stage.
            if layout.shape and not (param.spec.ignored or param.spec.is_optional):
                stages.setdefault(layout.zero_stage, param.name)
    if len(stages) > 1:
        found = ", ".join(f"{name} at stage {stage}" for stage, name in sorted(stages.items()))
        raise ValueError(
            f"zgraph.no_sync: the module mixes ZeRO stages ({found}), whose gradients would be reduced at different "
            "times; use no_sync on the parts of one stage each, or shard all at one stage."
        )
