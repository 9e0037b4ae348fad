"""Hooks on parameters in a captured step: they run while the step is traced, on the parameters' stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.sharding.model.optional_parameters import is_own_hook
from zgraph.step.capture.lifted import Held
from zgraph.torch_compat.autograd import hooks_of

Registered = tuple[tuple[int, Any], ...]  # handle ids and functions, in the order of registration


def conditions(parameters: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return (index, gradient hooks, post-accumulate-grad hooks) of each parameter that has hooks."""
    return tuple(
        (position, *(tuple((hooks or {}).values()) for hooks in pair))
        for position, pair in enumerate(zip(*hooks_of(parameters), strict=True))
        if pair[0] or pair[1]
    )


def functions(parameters: Sequence[Tensor]) -> list[Any]:
    """Return all hooks on parameters, without zgraph's own, which read nothing from outside."""
    found = [hook for _, *pair in conditions(parameters) for hooks in pair for hook in hooks]
    return [hook for hook in found if not is_own_hook(hook)]


@dataclass
class CarriedHooks:
    """Hooks of real parameters, registered on their stand-ins.

    Args:
        parameters: parameters of the model.
        stand_ins: stand-in of each parameter.
        redirected: context manager that replaces real tensors by traced ones; active while a hook or the step's own
            code runs, but not inside `backward`.
    """

    parameters: Sequence[Held]
    stand_ins: Sequence[Tensor]
    redirected: AbstractContextManager[Any]

    def __post_init__(self) -> None:
        self._real = _registered([one.tensor for one in self.parameters])
        for (on_grad, behind), one, stand_in in zip(self._real, self.parameters, self.stand_ins, strict=True):
            if stand_in.requires_grad:
                for _, hook in on_grad:
                    stand_in.register_hook(self._of_gradient(hook))
                for _, hook in behind:
                    # Pass the parameter itself, which the hook may use as a key; calls of torch are redirected.
                    stand_in.register_post_accumulate_grad_hook(self._behind(hook, one.tensor))
        self._carried = _registered(self.stand_ins)

    def _of_gradient(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        def call(grad: Tensor) -> Tensor | None:
            with self.redirected:
                return hook(grad)

        return call

    def _behind(self, hook: Callable[[Tensor], None], parameter: Tensor) -> Callable[[Tensor], None]:
        def call(stand_in: Tensor) -> None:
            with self.redirected:
                return hook(parameter)  # anything but None is torch's error

        return call

    def check(self) -> None:
        """Restore the parameters' original hooks, and refuse the step if it has registered or removed hooks.

        Raises:
            ZgraphError: the step has changed hooks; the message names the parameter.
        """
        real = _registered([one.tensor for one in self.parameters])
        carried = _registered(self.stand_ins)
        changed = [
            one
            for place, one in enumerate(self.parameters)
            if real[place] != self._real[place] or carried[place] != self._carried[place]
        ]
        for place, one in enumerate(self.parameters):
            if real[place] != self._real[place]:
                for hooks, kept in zip(_pair(one.tensor), self._real[place], strict=True):
                    if hooks is not None:
                        hooks.clear()
                        hooks.update(kept)
        if changed:
            raise ZgraphError(
                f"zgraph.training_step: the step registers or removes a hook on {changed[0].name}, which would happen "
                "only while it is captured; register hooks before the step, or register and remove them in it."
            )


def _registered(tensors: Sequence[Tensor]) -> list[tuple[Registered, Registered]]:
    on_grad, behind = hooks_of(tensors)
    return [
        (tuple((one or {}).items()), tuple((other or {}).items())) for one, other in zip(on_grad, behind, strict=True)
    ]


def _pair(tensor: Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    (on_grad,), (behind,) = hooks_of([tensor])
    return on_grad, behind
