"""Norm of the error-feedback state, that is, of the compression errors not yet added to a gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zgraph.runtime.error_feedback import Feedback


@torch.no_grad()
def error_norm(feedbacks: Iterable[Feedback]) -> Tensor | None:
    """Return the 2-norm of this rank's compression errors as a 0-d tensor, without communication or waiting.

    None if there are no errors, or if a copy of an error from the device to the host may still be running.

    Args:
        feedbacks: error feedback of all parameters.
    """
    norms: list[Tensor] = []
    for feedback in feedbacks:
        if feedback.stored is not None:
            return None
        error, scale = (feedback.kept.get(name) for name in ("error", "error_scale"))
        if error is None:
            continue
        norm = torch.linalg.vector_norm(error.float(), dim=None if scale is None else -1)
        norms.append(norm if scale is None else torch.linalg.vector_norm(norm * scale))
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else None
