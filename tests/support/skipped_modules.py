"""A model with a tower for images, which ranks without an image skip."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.never_read = nn.Linear(3, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.leave(torch.relu(self.norm(self.enter(image))))


class Net(nn.Module):
    """Text, and an image that only some ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower, self.head = nn.Linear(4, 5), Tower(), nn.Linear(5, 3)
        self.recomputes = False

    def forward(self, text: Tensor, image: Tensor | None, share: Tensor | None, seen: Tensor | None = None) -> Tensor:
        """The loss. `share` multiplies what the tower returns: 0 for a rank that has no image, but has to run it."""
        found = self.embed(text)
        if image is not None:
            seen = checkpoint(self.tower, image, use_reentrant=False) if self.recomputes else self.tower(image)
        if seen is not None:
            found = found + (seen if share is None else seen * share)
        return self.head(torch.tanh(found)).float().square().mean()
