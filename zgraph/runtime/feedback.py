"""Error feedback: what a parameter keeps of what compression did not send, and when that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.compression import from_text
from zgraph.errors import ZgraphError


@dataclass(eq=False)
class Feedback:
    """Of one parameter and one of its reductions.

    Attributes:
        method: as text; what another method has kept is of no use.
        numel, chunks: elements of a chunk, and chunks of the gradient: how the error is cut.
        tensors: what the method keeps, by name.
        reductions: compressed so far; draws random numbers.
        steps: closing backwards so far, which are optimizer steps.
        open: the last reduction was followed by others of its window.
        before: the tensors as they were before the step at hand; None unless losses are scaled.
    """

    method: str
    numel: int
    chunks: int
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    reductions: int = 0
    steps: int = 0
    open: bool = False
    before: dict[str, Tensor] | None = None

    def begin(self, *, forgets_every: int, keep_before: bool) -> None:
        """A reduction is about to read the error: forget it where its time is up, and keep a copy if one is wanted."""
        if self.open:
            return
        if forgets_every and self.steps and self.steps % forgets_every == 0:
            for tensor in self.tensors.values():
                tensor.zero_()
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()} if keep_before else None

    def end(self, *, closing: bool) -> None:
        """The reduction has updated the error."""
        self.reductions += 1
        self.steps += closing
        self.open = not closing

    def scale(self, factor: float) -> None:
        """Gradients will come larger by this factor, and so must the error."""
        scaled = self.tensors.get("error_scale", self.tensors.get("error"))
        if scaled is not None:
            scaled.mul_(factor)

    def take_back(self) -> None:
        """The step at hand is not taken: what it did to the error did not happen."""
        if self.before is not None:
            for name, tensor in self.before.items():
                self.tensors[name].copy_(tensor)
            self.before = None


@dataclass(eq=False)
class Feedbacks:
    """Of one parameter.

    Attributes:
        by_slot: one for each of its reductions, by name.
        loss_scale: of the gradients that come next; None: losses are not scaled.
        warmed_steps: optimizer steps so far before which nothing was compressed, though a pipeline says so.
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
        """The feedback of a slot, zeros where there was none.

        Raises:
            ZgraphError: what is there was kept by another method, or for another division of the gradient.
        """
        found = self.by_slot.get(slot)
        if found is None:
            tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in spec.items()}
            found = self.by_slot[slot] = Feedback(method, numel, chunks, tensors)
        elif (found.method, found.numel, found.chunks) != (method, numel, chunks):
            raise ZgraphError(
                f"zgraph: {parameter} keeps the error of {from_text(found.method)} in {found.chunks} chunks of "
                f"{found.numel} elements, and is now compressed by {from_text(method)} in {chunks} of {numel}. "
                "Compile with the method that the state was saved with, or call zgraph.forget_errors(model) to begin "
                "with zeros."
            )
        return found

    def set_loss_scale(self, scale: float) -> None:
        """Gradients will come with this loss scale; a smaller one than before says that the last step was dropped."""
        last, self.loss_scale = self.loss_scale, scale
        for feedback in self.by_slot.values():
            if last is not None and scale < last:
                feedback.take_back()
            feedback.before = None
            if last is not None and scale != last:
                feedback.scale(scale / last)
