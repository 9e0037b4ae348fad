"""The oracle of delayed updates: an optimizer that keeps a list of gradients and applies them one call late."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LateSteps:
    """Takes the place of an optimizer's `step` in plain lines.

    Args:
        optimizer: of torch.
        after: calls that step at once.

    Attributes:
        calls: so far.
        kept: the gradients of the last call, which wait for the next one; None: none do.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, after: int) -> None:
        self.optimizer, self.after, self.calls = optimizer, after, 0
        self.kept: list[Tensor | None] | None = None
        self.plain: Any = optimizer.step
        optimizer.__dict__["step"] = self.step

    def step(self) -> None:
        self.calls += 1
        if self.calls <= self.after:
            self.plain()
            return
        # A GradScaler lets fused optimizers divide by its scale, and skip.
        scale, found_inf = (getattr(self.optimizer, name, None) for name in ("grad_scale", "found_inf"))
        fresh = [None if one.grad is None else one.grad.clone() for one in self._parameters()]
        if scale is not None:
            fresh = [None if grad is None else grad / scale for grad in fresh]
        self.flush()
        self.kept = None if found_inf is not None and found_inf.item() else fresh

    def skip(self) -> None:
        """Count a call whose gradients a GradScaler has dropped."""
        self.calls += 1
        self.flush()

    def flush(self) -> None:
        """Apply what waits; `.grad` stays as it is."""
        if self.kept is None:
            return
        before = [one.grad for one in self._parameters()]
        own = self.optimizer.__dict__
        scaling = {name: own.pop(name) for name in ("grad_scale", "found_inf") if name in own}
        self._set(self.kept)
        self.plain()
        self._set(before)
        own |= scaling
        self.kept = None

    def _parameters(self) -> list[Tensor]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _set(self, grads: list[Tensor | None]) -> None:
        for parameter, grad in zip(self._parameters(), grads, strict=True):
            parameter.grad = grad
