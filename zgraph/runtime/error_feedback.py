"""Error feedback: keeps the compression error of each gradient and adds it to the next gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.host_copies import Arrival, HostCopies


@dataclass(eq=False)
class Feedback:
    """Error-feedback state of one reduction of one parameter's gradient.

    The gradient and its error are cut into chunks of equal length.

    Attributes:
        method: compression method as text.
        numel, chunks: number of elements per chunk, and number of chunks.
        kept: the compression method's state tensors by name, such as "error". On the host they may be the target of an
            unfinished copy; read them through `tensors`.
        reductions: number of compressed reductions so far, which seeds the random numbers of rounding.
        steps: number of closing reductions so far: one for each optimizer step.
        open: whether an accumulation window is open, so that the current step has further reductions.
        before: copies of the state tensors from before the current step, for a rollback; None if losses are not scaled.
        fetched: event at the end of the copy to the device, for the next reduction.
        stored: event at the end of the copy to the host, after the last reduction.
    """

    method: str
    numel: int
    chunks: int
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    reductions: int = 0
    steps: int = 0
    open: bool = False
    before: dict[str, Tensor] | None = None
    fetched: Arrival | None = None
    stored: Arrival | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """State tensors, safe to read on the host: waits until copies to them have ended."""
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None
        return self.kept

    def begin(self, *, reset_interval: int, keep_before: bool) -> None:
        """Prepare the error for the first reduction of a step; for later reductions of the step, do nothing.

        Args:
            reset_interval: number of steps after which the error is set to zero; 0: never.
            keep_before: whether to save a copy of the error, so that `rollback` can restore it.
        """
        if self.open:
            return
        # A copy, because kernels work in place and the old error cannot be recomputed from the new one. Taken before
        # the reset, so that a dropped step undoes that too.
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()} if keep_before else None
        if reset_interval and self.steps and self.steps % reset_interval == 0:
            for tensor in self.tensors.values():
                tensor.zero_()

    def end(self, *, closing: bool) -> None:
        """Count a finished reduction; `closing` tells whether it was the last of its step."""
        self.reductions += 1
        self.steps += closing
        self.open = not closing

    def scale(self, factor: float) -> None:
        """Multiply error and momentum by `factor`, the ratio of the new loss scale to the old."""
        for scaled in (self.tensors.get("error_scale", self.tensors.get("error")), self.tensors.get("momentum")):
            if scaled is not None:
                scaled.mul_(factor)

    def fits(self, spec: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
        """Return whether the state tensors have the given names, shapes and dtypes."""
        return spec.keys() == self.kept.keys() and all(
            (tuple(self.kept[name].shape), self.kept[name].dtype) == wanted for name, wanted in spec.items()
        )

    def move_to(self, device: torch.device) -> None:
        """Move the state tensors to a device; after a checkpoint is loaded they are on the host."""
        for name, tensor in self.kept.items():
            if tensor.device != device:
                self.kept[name] = tensor.to(device)

    def fetch(self, copies: HostCopies) -> list[Tensor]:
        """Start copying the state tensors from the host to the device; return the device tensors."""
        for name, tensor in self.kept.items():
            self.kept[name] = copies.kept(tensor)
        fetched, self.fetched = copies.fetch([*self.kept.values()], self.stored)
        return fetched

    def store(self, copies: HostCopies, computed: Mapping[str, Tensor]) -> None:
        """Start copying to the host the state tensors that a reduction has computed on the device."""
        self.stored = copies.store([computed[name] for name in self.kept], [*self.kept.values()])

    def rollback(self) -> None:
        """Restore the error from before the current step, because the step is dropped."""
        if self.before is not None:
            for name, tensor in self.before.items():
                self.tensors[name].copy_(tensor)
            self.steps -= not self.open
            self.before = None

    @property
    def kept_bytes(self) -> int:
        held = [*self.kept.values(), *(self.before or {}).values()]
        return sum(tensor.nbytes for tensor in held)


@dataclass(eq=False)
class Feedbacks:
    """Error-feedback state of all reductions of one parameter's gradient.

    Attributes:
        by_slot: state of each reduction, by the name of the reduction (the slot).
        loss_scale: scale of the next gradients; None if losses are not scaled.
        warmed_steps: number of optimizer steps so far that were not compressed because of the warm-up.
        second_moment: for a warm-up that ends once second moments are stable: their sum, and the
            learning rate, when last looked at.
    """

    by_slot: dict[str, Feedback] = field(default_factory=dict[str, Feedback])
    loss_scale: float | None = None
    warmed_steps: int = 0
    second_moment: tuple[float, float] | None = None

    def of(
        self,
        slot: str,
        method: str,
        numel: int,
        chunks: int,
        spec: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        parameter: str,
    ) -> Feedback:
        """Return the state of the reduction named `slot`; the first call creates it with zeros.

        Args:
            slot: name of the reduction.
            method: compression method as text.
            numel, chunks: number of elements per chunk, and number of chunks.
            spec: shape and dtype of each state tensor, by name.
            device: device of the state tensors.
            parameter: name of the parameter, for error messages.

        Raises:
            ZgraphError: the existing state belongs to another compression method, or to other chunks.
        """
        found = self.by_slot.get(slot)
        if found is None:
            tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in spec.items()}
            found = self.by_slot[slot] = Feedback(method, numel, chunks, tensors)
        elif (found.method, found.numel, found.chunks) != (method, numel, chunks):
            raise ZgraphError(
                f"zgraph: {parameter} keeps the error of {found.method} in {found.chunks} chunks of {found.numel} "
                f"elements, and is now compressed by {method} in {chunks} of {numel}. Compile with the method that the "
                "state was saved with, or call zgraph.reset_error_feedback(model) on every rank to begin with zeros."
            )
        elif not found.fits(spec):
            shown = {name: (list(tensor.shape), tensor.dtype) for name, tensor in found.tensors.items()}
            raise ZgraphError(
                f"zgraph: {parameter} keeps {shown} for {method}, which needs {dict(spec)}: it was saved "
                "by another version of the method. Load it with that one, or call zgraph.reset_error_feedback(model) "
                "on every rank to begin with zeros."
            )
        found.move_to(device)
        return found

    @property
    def kept_bytes(self) -> int:
        return sum(feedback.kept_bytes for feedback in self.by_slot.values())

    def set_loss_scale(self, scale: float | None, *, dropped: bool | None = None) -> None:
        """Adapt all errors to a new loss scale; if the last step was dropped, first restore the errors from before it.

        Args:
            scale: scale of the next gradients; None if losses are no longer scaled.
            dropped: whether the last step was dropped; None: yes if the scale has become smaller.
        """
        last, self.loss_scale = self.loss_scale, scale
        if dropped is None:
            dropped = last is not None and scale is not None and scale < last
        # The first scale multiplies nothing: earlier gradients may have been scaled, too.
        factor = 1.0 if last is None else (scale or 1.0) / last
        for feedback in self.by_slot.values():
            if dropped:
                feedback.rollback()
            feedback.before = None
            if factor != 1.0:
                feedback.scale(factor)
