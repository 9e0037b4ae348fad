"""Hooks on plain `optimizer.step()` calls: they move new optimizer state to the tier chosen for optimizer state.

A captured step calls no hook: its graph contains the copies.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import optim

from zgraph.tiers.placement.resting import Resting
from zgraph.torch_compat.dynamo import never_compiled
from zgraph.torch_compat.modules import hook_steps


def follow_steps(resting: Resting) -> None:
    """Register hooks on all optimizers' steps, for as long as `resting` exists, if steps make or read offloaded state.

    Before a step, state of parameters on a GPU is moved to the GPU. After the step, state is moved to the tier of
    optimizer state.
    """
    if resting.options.optimizer is None and not resting.computes_elsewhere:
        return
    watched = weakref.ref(resting)

    # The hooks must not be compiled if the optimizer's step is.
    @never_compiled
    def before(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (resting := watched()) is not None and resting.computes_elsewhere:
            resting.join_parameters(optimizer, resting.names())

    @never_compiled
    def after(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (resting := watched()) is not None:
            resting.settle(optimizer, resting.names())

    hook_steps(resting, before=before, after=after)
