"""Host memory for a GPU device: pinned, so that copies can run concurrently with compute."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes that torch's pinned-memory allocator uses for a tensor: the next power of two.

    CachingHostAllocator.h of torch 2.11 - 2.13: `roundSize = c10::llvm::PowerOf2Ceil(size)`.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class PinnedPool:
    """Pinned memory from torch's allocator, which reuses a freed block after all copies from or to it have ended."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised pinned tensor, with the shape and dtype of `tensor`; if dense, also its strides."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the host, pinned or not."""
        return tensor.device.type == "cpu"
