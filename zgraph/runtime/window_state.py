"""State of a parameter during gradient accumulation: its gathered copies, and gradients that are not reduced yet.

An accumulation window consists of the forwards under `no_sync` and the next forward outside of it, with their backward
passes. The last of these backward passes is the closing one: it reduces the gradients. The state is an attribute of the
parameter's handle, a tensor that reaches every operator working for the parameter, eager or compiled.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zgraph.errors import ZgraphError
from zgraph.runtime.error_feedback import Feedbacks
from zgraph.runtime.handle import name_of
from zgraph.torch_compat.autograd import current_node, hooks_of, leaves_below, running_backward, use_of
from zgraph.torch_compat.dtensor import local_of
from zgraph.torch_compat.modules import local_parameters

_STATE = "zgraph_state"

Gradients = Sequence[Tensor | None]
# Receives the gradients that a backward has computed, and a function that computes the others; both in the order of
# the compiled function's input tensors.
Defer = Callable[[Gradients, Callable[[], Gradients]], None]


# Position of a forward in its window; an argument of the markers of the forward and of its backward.
ALONE: Final = "alone"  # the only forward of its window: nothing is kept
OPEN: Final = "open"  # under no_sync: its gathered copies are kept, and its gradients wait for the closing backward
CLOSING: Final = "closing"  # the last forward: uses the kept copies; its backward reduces the waiting gradients

# The value that each waiting gradient adds to each element of `.grad` at stage 1. Not zero, which clearing leaves; a
# power of two, so that its sums are exact; small, so as not to distort logged norms; and a normal number in each dtype.
PLACEHOLDER: Final = 2.0**-14


@dataclass(eq=False)
class Accumulation:
    """Accumulation window shared by all parameters of one `zgraph.shard` scope.

    Attributes:
        opened: whether a window may be open; read by guards of compiled frames.
        pending: parameters that have gathered copies or unreduced gradients.
        leaves: (number of a backward pass, AccumulateGrad nodes found so far in the pass, by id of their leaf).
        adds_returned: whether the caller of `torch.autograd.grad` adds the returned gradients to `.grad`, as pipeline
            stages do.
    """

    opened: bool = False
    pending: dict[ParameterState, None] = field(default_factory=dict["ParameterState", None])
    leaves: tuple[int, dict[int, Any]] = (-1, {})
    adds_returned: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulation:
        memo[id(self)] = copied = Accumulation(self.opened)
        copied.pending = copy.deepcopy(self.pending, memo)
        return copied

    def note(self, state: ParameterState) -> None:
        """Update `pending` after a change to a parameter's gathered copies or unreduced gradients."""
        if state.waiting or state.kept:
            self.pending[state] = None
            self.opened = True  # a parameter whose gradients were cleared may just have closed it
        elif self.pending.pop(state, state) is None and not self.pending:
            self.opened = False

    def check_step(self, stepping: Container[int]) -> None:
        """Check that the gradients of all stepped parameters are reduced, and drop the parameters' gathered copies.

        Args:
            stepping: ids of the parameters that the optimizer steps.

        Raises:
            ZgraphError: the gradient of such a parameter has not been reduced.
        """
        for state in [one for one in self.pending if one.is_among(stepping)]:
            if state.has_waiting_gradients:
                raise ZgraphError(
                    f"zgraph.no_sync: optimizer.step() on {state.name}, whose gradients from forwards under no_sync "
                    "are not reduced: no backward of a forward outside of no_sync has reached it since. Run the last "
                    "micro-batch outside of no_sync, through all parts that the others went through; or clear the "
                    "gradients by zero_grad()."
                )
            state.forget()
            state.release()
        self.settle()

    def use_of(self, parameter: Tensor) -> str:
        """Return how the running backward uses a parameter's gradient.

        Returns:
            "added" (to `.grad`, also if unknown), "returned" (by `torch.autograd.grad`) or "unused" (not requested).
        """
        number = running_backward()
        if number == -1:
            return "added"
        if self.leaves[0] != number:
            self.leaves = number, {}
        if id(parameter) not in self.leaves[1]:
            self.leaves[1].update(leaves_below(current_node()))
        node = self.leaves[1].get(id(parameter))
        use = "added" if node is None else use_of(node)
        return "added" if self.adds_returned and use == "returned" else use

    def settle(self) -> None:
        """Close the window if no parameter has gathered copies or unreduced gradients."""
        self.opened = bool(self.pending)


@dataclass(eq=False)
class ParameterState:
    """State of one parameter between calls of compiled graphs.

    During an accumulation window, gradients wait: they are summed on this rank, and reduced by the window's last
    backward. At stage 0 the sum is in `.grad`. At stage 1 it is in `accumulated`, and each element of `.grad` has a
    placeholder value by which zeroing or scaling of `.grad` is detected.

    Attributes:
        owner, attribute: module that has the parameter, and the attribute's name.
        name: name of the parameter, for error messages.
        accumulation: accumulation window of the parameter's scope.
        kept: gathered copies by dtype, [world * chunk, ...], padding included.
        version: autograd version of the sharded parameter when the copies were gathered.
        waiting: whether gradients wait to be reduced.
        accumulated: at stage 1, sum of this rank's unsharded gradients, [*shape].
        placeholder: at stage 1, expected value of each element of `.grad`, 0-d.
        earlier: reduced gradient that `.grad` had before the window.
        begun: tensor that has replaced `earlier` in `.grad`.
        writes: expected version of `begun`; a higher version means that the user has written to it.
        backward: number of the last backward pass counted in `writes`.
        tensors: further tensors of this rank by name, saved in checkpoints.
        feedbacks: error feedback of the parameter's compressed reductions.
        is_optional: whether its gradients always wait, see `zgraph.sharding.model.optional_parameters`.
        defer: callback that receives the part of a compiled backward that computes weight gradients; None: this part
            runs with the rest.
    """

    owner: nn.Module
    attribute: str
    name: str = "?"
    accumulation: Accumulation = field(default_factory=Accumulation)
    kept: dict[torch.dtype, Tensor] = field(default_factory=dict[torch.dtype, Tensor])
    version: int = 0
    waiting: bool = False
    accumulated: Tensor | None = None
    placeholder: Tensor | None = None
    earlier: Tensor | None = None
    begun: weakref.ref[Tensor] | None = None
    writes: int = 0
    backward: int = -1
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    feedbacks: Feedbacks = field(default_factory=Feedbacks)
    is_optional: bool = False
    defer: Defer | None = None

    def keep(self, unsharded: Tensor) -> None:
        """Keep a gathered copy for the other forwards of the window."""
        self.kept[unsharded.dtype] = unsharded
        self.version = _version(self.parameter)
        self.accumulation.note(self)

    def gathered(self, dtype: torch.dtype) -> Tensor | None:
        """Return the window's gathered copy in `dtype`; None without a copy, or if the parameter has changed since."""
        if self.kept and self.version != _version(self.parameter):
            self.kept.clear()
        return self.kept.get(dtype)

    def release(self) -> None:
        """Drop the gathered copies."""
        self.kept.clear()
        self.accumulation.note(self)

    def add(self, grad: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
        """Add a gradient to the sum that the window's last backward reduces.

        Args:
            grad: [*shape], gradient of this rank.
            dtype: dtype of the sum: the parameter's dtype.
            zero_stage: 0 or 1.

        Returns:
            Tensor that autograd then adds to `.grad`: the gradient at stage 0, zeros of the shard's shape at stage 1.
        """
        if zero_stage == 0:
            self.wait_in_grad()
            return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self._is_unused():
            return torch.zeros_like(_local(self.parameter), device=grad.device)
        if self._is_cleared():
            self.forget()
        if not self.waiting:
            self._put_aside(torch.zeros_like(self.parameter))
            self.placeholder = _local(self.parameter).new_zeros(())
        self._follow_edits()
        self._wait()
        if self.accumulated is None:
            self.accumulated = grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            self.accumulated += grad
        assert self.placeholder is not None and self.parameter.grad is not None
        # Added here, not by autograd, which adds to `.grad` only after all readers of a tied parameter.
        _local(self.parameter.grad).add_(PLACEHOLDER)
        self.placeholder = self.placeholder + PLACEHOLDER
        return torch.zeros_like(_local(self.parameter), device=grad.device)

    def wait_in_grad(self) -> None:
        """Prepare `.grad` for summing gradients at stage 0: move the gradient from before the window to `earlier`."""
        if self._is_unused():
            return
        grad = self.parameter.grad
        if grad is None:
            # The user has cleared the gradients, or an earlier forward belongs to the same backward, in which autograd
            # adds both gradients together. Not `forget`: the last parameter to hold anything would close the window.
            self.earlier = self.begun = None
        elif not self.waiting:
            # Zeros, not None: if autograd adds nothing (it failed, or only other gradients were requested), the
            # earlier gradient must not look as if the user had cleared it.
            self._put_aside(torch.zeros_like(grad))
        self._follow_clearing()
        self._wait()

    def take(self, grad: Tensor, dtype: torch.dtype, zero_stage: int) -> Tensor:
        """Close the window: return the sum of the waiting gradients and the last one, `grad`.

        If autograd does not add the gradient to `.grad`, as for `torch.autograd.grad`, return only `grad` and leave the
        window open.
        """
        if self.waiting and self.accumulation.use_of(self.parameter) != "added":
            return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if self._is_cleared():
            self.forget()
        self._follow_clearing() if zero_stage == 0 else self._follow_edits()
        if not self.waiting:
            return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)
        if zero_stage == 0:
            self._check_hooks()
            total = _local(cast(Tensor, self.parameter.grad)).to(grad.device)  # it may be kept on the host
        else:
            assert self.accumulated is not None
            total = self.accumulated
        self.parameter.grad = self.earlier  # autograd adds the mean to it
        total += grad
        self.forget()
        return total

    def follow_edits(self) -> None:
        """At stage 0, forget the waiting gradients, and the earlier one, that the user has cleared.

        Raises:
            ZgraphError: the user has changed `.grad` in another way.
        """
        if self._is_cleared():
            self.forget()
        if self.waiting:
            self._follow_clearing()

    def _check_hooks(self) -> None:
        """Refuse gradient hooks at stage 0, because they would run a second time on gradients summed in `.grad`.

        Raises:
            ZgraphError: the parameter has a hook from `register_hook`.
        """
        (hooks,), _ = hooks_of([self.parameter])
        if hooks:
            raise ZgraphError(
                f"zgraph.no_sync: {self.name} has a hook from register_hook, which at stage 0 would run again on the "
                "gradients of forwards under no_sync; use zero_stage=1, or change .grad before optimizer.step()."
            )

    def _is_unused(self) -> bool:
        """Return whether the caller of the running backward has not requested the parameter's gradient.

        Raises:
            ZgraphError: `torch.autograd.grad` requests a gradient that is not reduced, under `no_sync` for example.
        """
        use = self.accumulation.use_of(self.parameter)
        if use == "returned" and self.is_optional:
            raise ZgraphError(
                f"zgraph.shard: torch.autograd.grad was asked for the gradient of {self.name}, which is optional and "
                "reduced at the end of backward(). Call backward(), and read .grad."
            )
        if use == "returned":
            raise ZgraphError(
                f"zgraph.no_sync: torch.autograd.grad was asked for the gradient of {self.name} in a forward under "
                "no_sync, where it is not reduced. Run that forward outside of no_sync, or call backward()."
            )
        return use == "unused"

    def _wait(self) -> None:
        self.waiting = True
        # A backward adds to `.grad` once, even if it reads the parameter several times.
        if self.backward != running_backward():
            self.backward, self.writes = running_backward(), self.writes + 1
        self.accumulation.note(self)

    def _is_cleared(self) -> bool:
        """Return whether the user has discarded the waiting gradients by setting `.grad` to None."""
        return self.waiting and self.parameter.grad is None

    def _put_aside(self, zeros: Tensor) -> None:
        """Move the gradient from before the window to `earlier`, and set `.grad` to zeros."""
        self.earlier, self.parameter.grad = self.parameter.grad, zeros
        self.begun, self.writes, self.backward = weakref.ref(zeros), zeros._version, -1

    def _is_edited(self, grad: Tensor) -> bool:
        """Return whether the user has replaced `.grad` or written to it in place; writes via `.data` go unnoticed."""
        return self.begun is None or self.begun() is not grad or grad._version > self.writes

    def _follow_clearing(self) -> None:
        """At stage 0, discard `earlier` if the user has zeroed `.grad` in place.

        Raises:
            ZgraphError: the user has changed `.grad` in another way.
        """
        grad = self.parameter.grad
        if self.earlier is None or grad is None or not self._is_edited(grad):
            return
        if bool(_local(grad).any()):
            raise _edited(self.name, "it was reduced before this window began, and that part of it was put aside")
        self.earlier = None

    def _follow_edits(self) -> None:
        """At stage 1, apply the user's zeroing or scaling of `.grad` to `accumulated` and `earlier`.

        Raises:
            ZgraphError: on the CPU, if the user has changed `.grad` in another way. On other devices the sums become
                NaN.
        """
        grad, held = self.parameter.grad, self.placeholder
        if not self.waiting or grad is None or held is None:
            return
        marks = _local(grad).detach()
        if not marks.numel():
            self._follow_others(grad)
            return
        found = marks.flatten()[0].clone()
        factor, is_even = found / held.to(found.device), (marks == found).all()
        self.placeholder = found
        if found.device.type == "cpu":
            if not is_even:
                raise _edited(self.name, "at stage 1 the sum itself is kept elsewhere")
            if factor == 1:
                return
        # On a device nothing is read, because that would block the host: an edit that cannot be followed becomes NaN.
        sums = [self.accumulated, None if self.earlier is None else _local(self.earlier)]
        for part in (one for one in sums if one is not None):
            scaled = torch.where(factor.to(part.device) == 0, 0, part * factor.to(part.device, part.dtype))
            part.copy_(torch.where(is_even.to(part.device), scaled, torch.nan))

    def _follow_others(self, grad: Tensor) -> None:
        """At stage 1, on a rank without rows of the parameter, discard waiting gradients after the user zeroes `.grad`.

        Such a rank has no elements that show how the user changed `.grad`. If all other waiting gradients are zero,
        the user is assumed to have zeroed this one, too.

        Raises:
            ZgraphError: the user has changed `.grad`, and another gradient is not zero.
        """
        if not self._is_edited(grad):
            return
        others = (_local(one.parameter.grad) for one in self.accumulation.pending if one.parameter.grad is not None)
        if any(bool(other.any()) for other in others):
            raise _edited(self.name, "this rank has no rows of it in which the edit could be seen")
        self.forget()
        self.parameter.grad = None

    @property
    def has_waiting_gradients(self) -> bool:
        """Whether there are waiting gradients that the user has not discarded."""
        return self.waiting and self.parameter.grad is not None

    @property
    def parameter(self) -> Tensor:
        """The sharded parameter."""
        return cast(Tensor, local_parameters(self.owner)[self.attribute])

    def is_among(self, ids: Container[int]) -> bool:
        """Return whether the parameter's id is in `ids`; False if its module no longer has the parameter."""
        return id(local_parameters(self.owner).get(self.attribute)) in ids

    def forget(self) -> None:
        """Discard the waiting gradients."""
        self.waiting = False
        self.accumulated = self.placeholder = self.earlier = self.begun = None
        self.accumulation.note(self)


def _local(tensor: Tensor) -> Tensor:
    return local_of(cast(DTensor, tensor))


def _version(tensor: Tensor) -> int:
    """Return a tensor's autograd version, which counts in-place writes except via `.data`; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def _edited(name: str, why: str) -> ZgraphError:
    return ZgraphError(
        f"zgraph.no_sync: the .grad of {name} was changed in place between the forwards of a window, which cannot be "
        f"followed: {why}. Change it after the backward of a forward outside of no_sync, when it has been reduced."
    )


def attach_state(handle: Tensor, owner: nn.Module, attribute: str, accumulation: Accumulation | None = None) -> None:
    """Attach a new `ParameterState` for the parameter `owner.attribute` to the parameter's handle."""
    state = ParameterState(owner, attribute, name_of(handle), accumulation or Accumulation())
    setattr(handle, _STATE, state)


def attach_state_of(handle: Tensor, other: Tensor) -> None:
    """Attach the state of the handle `other` to `handle`, a second handle of the same parameter."""
    setattr(handle, _STATE, state_behind(other))


def state_behind(handle: Tensor) -> ParameterState:
    """Return the `ParameterState` attached to a handle.

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
