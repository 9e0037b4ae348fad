"""The norm of error-feedback state: the total error of compression that has not been sent yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zgraph.runtime.error_feedback import Feedback


@torch.no_grad()
def error_norm(feedbacks: Iterable[Feedback]) -> Tensor | None:
    """Return the 2-norm of all errors of this rank as a 0-d tensor, without communication or waiting.

    The result is None if there are no errors, or if an error kept on the host may still be in flight from a device.

    Args:
        feedbacks: feedbacks of all parameters.
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
