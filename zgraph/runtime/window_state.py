"""State of a parameter while a window is open: its gathered copy, and the gradients that are not reduced yet.

A window is the forwards under `no_sync` and the next synchronising backward, the closing one. The state is attached to
the parameter's handle, the one object that reaches a marker's kernel both in eager mode and in every compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.error_feedback import Feedbacks
from zgraph.runtime.handle import name_of
from zgraph.runtime.weight_copy import WeightCopy
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.modules import local_parameters

_STATE = "zgraph_state"

Gradients = Sequence[Tensor | None]
# Of gradients that a backward has computed, and of a function that computes the others; in the order of the tensors
# that the compiled function was given.
Defer = Callable[[Gradients, Callable[[], Gradients]], None]


# Position of a forward in its window; an argument of the markers of the forward and of its backward.
ALONE: Final = "alone"  # a window of its own: nothing is kept
OPEN: Final = "open"  # under no_sync: its gathers are kept, its gradients wait
CLOSING: Final = "closing"  # the last one: uses what was kept; its backward reduces what has waited


@dataclass(eq=False)
class ParameterState:
    """State of one parameter between calls of compiled graphs.

    Attributes:
        owner, attribute: where the sharded parameter is found.
        kept: gathered copies by dtype, [N * chunk, ...], padding included.
        waiting: whether a backward of the open window has left gradients.
        accumulated: stage 1: sum of this rank's own unsharded gradients, [*shape].
        earlier: stage 0: the `.grad` from before the window, already reduced; what waits is in `.grad` meanwhile.
        tensors: this rank's own tensors, kept from step to step by name; checkpoints store and restore them.
        feedbacks: error feedback of its compressed reductions.
        ahead: the gathered bucket that begins with the parameter, as the last training step has left it.
        weight_copy: the unsharded parameter as the last forward read it; None: gathers do not send differences.
        defer: takes what yields gradients of weights out of a compiled backward; None: the backward runs whole.
    """

    owner: nn.Module
    attribute: str
    kept: dict[torch.dtype, Tensor] = field(default_factory=dict[torch.dtype, Tensor])
    waiting: bool = False
    accumulated: Tensor | None = None
    earlier: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    feedbacks: Feedbacks = field(default_factory=Feedbacks)
    weight_copy: WeightCopy | None = None
    ahead: Tensor | None = None
    defer: Defer | None = None

    def add(self, grad: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
        """Let a gradient wait for the closing backward.

        Args:
            grad: [*shape], of this rank alone.
            dtype: dtype of the sum, the parameter's own.
            zero_stage: 0 or 1.

        Returns:
            What autograd adds to `.grad`: the gradient itself at stage 0, zeros of the shard's shape at stage 1.
        """
        if zero_stage == 0:
            self.wait_in_grad()
            return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self._sharded().grad is None:
            self._forget()
        self.waiting = True
        if self.accumulated is None:
            self.accumulated = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            self.accumulated += grad
        return torch.zeros_like(_local(self._sharded()), device=grad.device)

    def wait_in_grad(self) -> None:
        """At stage 0, let `.grad` hold nothing but what waits; a gradient of the window is about to be added to it."""
        sharded = self._sharded()
        if sharded.grad is None:
            self._forget()  # the user has cleared the gradients, and with them the open window
        elif not self.waiting:
            # Zeros, not None: should autograd add nothing (it broke off, or was asked for other gradients), what was
            # there before must not look as if the user had cleared it.
            self.earlier, sharded.grad = sharded.grad, torch.zeros_like(sharded.grad)
        self.waiting = True

    def take(self, grad: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
        """Return the sum of all gradients of the window, `grad` being the last; nothing waits afterwards."""
        sharded = self._sharded()
        if sharded.grad is None:
            self._forget()
        if not self.waiting:
            return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if zero_stage == 0:
            assert sharded.grad is not None
            total = _local(sharded.grad).to(grad.device)  # from the host where the parameter rests there
            sharded.grad = self.earlier  # to which autograd adds the mean
        else:
            assert self.accumulated is not None
            total = self.accumulated
        total += grad
        self._forget()
        return total

    def _forget(self) -> None:
        self.waiting = False
        self.accumulated = self.earlier = None

    def _sharded(self) -> Tensor:
        return cast(Tensor, local_parameters(self.owner)[self.attribute])


def _local(tensor: Tensor) -> Tensor:
    return local_of(cast(DTensor, tensor))


def attach_state(handle: Tensor, owner: nn.Module, attribute: str) -> None:
    """Give a handle the state of its parameter, `owner.attribute`."""
    setattr(handle, _STATE, ParameterState(owner, attribute))


def state_behind(handle: Tensor) -> ParameterState:
    """State of the parameter that a handle stands for.

    Raises:
        ZgraphError: the handle is a copy, which has no state.
    """
    state = getattr(handle, _STATE, None)
    if state is None:
        raise ZgraphError(
            f"zgraph: the handle of {name_of(handle)} has lost its state on the way to a window's operation; pass the "
            "handle that zgraph.shard made, not a copy of it."
        )
    return state
