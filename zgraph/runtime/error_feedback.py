"""Error feedback: what compression loses of a parameter's gradients is kept, and added at the next reduction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.errors import ZgraphError
from zgraph.runtime.host_copies import Arrival, HostCopies


@dataclass(eq=False)
class Feedback:
    """Error feedback of one parameter, for one of its reductions.

    Attributes:
        method: compression method as text; state of another method cannot be used.
        numel, chunks: elements per chunk, and number of chunks, into which gradient and error are cut.
        kept: the compression method's tensors by name; if they are kept on the host, a copy to them may be under way.
        reductions: compressed reductions so far; seeds the random numbers.
        steps: closing backward passes so far, one for each optimizer step.
        open: whether an accumulation window is open: the last reduction was not the closing one.
        before: copies of the tensors from before the current step; None unless losses are scaled, so that the step may
            still be dropped.
        fetched: event after which the tensors for the next reduction are on the device.
        stored: event after which the tensors of the last reduction are on the host.
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
        """Wait until copies to the kept tensors have ended, and return the tensors. The host may then read them."""
        if self.stored is not None:
            self.stored.synchronize()
            self.stored = None
        return self.kept

    def begin(self, *, reset_interval: int, keep_before: bool) -> None:
        """Prepare for a reduction: copy the error if `keep_before`, then zero it every `reset_interval` steps."""
        if self.open:
            return
        # A copy, because kernels work in place and the old error cannot be recomputed from the new one. Taken before
        # the reset, so that a dropped step undoes that too.
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()} if keep_before else None
        if reset_interval and self.steps and self.steps % reset_interval == 0:
            for tensor in self.tensors.values():
                tensor.zero_()

    def end(self, *, closing: bool) -> None:
        """Count a reduction that has updated the error."""
        self.reductions += 1
        self.steps += closing
        self.open = not closing

    def scale(self, factor: float) -> None:
        """Multiply the error by the factor by which the loss scale, and so future gradients, have changed."""
        scaled = self.tensors.get("error_scale", self.tensors.get("error"))
        if scaled is not None:
            scaled.mul_(factor)

    def fits(self, spec: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
        """Whether the kept tensors have the names, shapes and dtypes that a compression method needs."""
        return spec.keys() == self.kept.keys() and all(
            (tuple(self.kept[name].shape), self.kept[name].dtype) == wanted for name, wanted in spec.items()
        )

    def move_to(self, device: torch.device) -> None:
        """Move the kept tensors to a device; after loading a checkpoint they are on the host."""
        for name, tensor in self.kept.items():
            if tensor.device != device:
                self.kept[name] = tensor.to(device)

    def fetch(self, copies: HostCopies) -> list[Tensor]:
        """Start copying the tensors from the host to the device, and return the device's copies."""
        for name, tensor in self.kept.items():
            self.kept[name] = copies.kept(tensor)
        fetched, self.fetched = copies.fetch([*self.kept.values()], self.stored)
        return fetched

    def store(self, copies: HostCopies, computed: Mapping[str, Tensor]) -> None:
        """Start copying the tensors computed by a reduction back to the host."""
        self.stored = copies.store([computed[name] for name in self.kept], [*self.kept.values()])

    def rollback(self) -> None:
        """Undo the changes of the current step to the error, because the step is dropped."""
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
    """Error feedback of all reductions of one parameter.

    Attributes:
        by_slot: feedback of each reduction, by the name of the reduction, its slot.
        loss_scale: scale of future gradients; None if losses are not scaled.
        warmed_steps: optimizer steps so far that were not compressed because of the warm-up.
    """

    by_slot: dict[str, Feedback] = field(default_factory=dict[str, Feedback])
    loss_scale: float | None = None
    warmed_steps: int = 0

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
        """Return the feedback of `slot`, the name of a reduction. The first call makes the feedback, of zeros.

        Raises:
            ZgraphError: the slot holds state of another compression method, or of a gradient that was cut differently.
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
        """Adapt the error to a new loss scale; if the last step was dropped, undo what the step changed in the error.

        Args:
            scale: scale of future gradients; None if losses are no longer scaled.
            dropped: whether the last step was dropped; None: it was dropped if the scale has become smaller.
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
