"""Host memory where the device is a GPU: pinned, so that copies run beside compute."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned_bytes(nbytes: int) -> int:
    """Size of the block that torch's allocator of pinned memory gives for a tensor: the next power of two.

    CachingHostAllocator.h of torch 2.11 - 2.13: `roundSize = c10::llvm::PowerOf2Ceil(size)`.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class PinnedPool:
    """Tensors of torch's own allocator of pinned memory, which gives a block to others once no stream copies it."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of equal shape, dtype and, if dense, strides."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host, pinned or not: nothing of the model computes there."""
        return tensor.device.type == "cpu"
