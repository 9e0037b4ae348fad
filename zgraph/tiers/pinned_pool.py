"""Host memory for a GPU device: pinned, so that copies run concurrently with compute."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned_bytes(nbytes: int) -> int:
    """Size of the block that torch's pinned-memory allocator uses for a tensor: the next power of two.

    CachingHostAllocator.h of torch 2.11 - 2.13: `roundSize = c10::llvm::PowerOf2Ceil(size)`.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class PinnedPool:
    """Tensors in pinned memory of torch's allocator, which reuses a freed block once no stream copies from or to it."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make an uninitialised pinned tensor like `tensor`: same shape and dtype; same strides if it is dense."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host, pinned or not: the model computes on the GPU only."""
        return tensor.device.type == "cpu"
