"""Host memory for a CPU device: a separate pool that torch's allocators do not know."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor


class HostPool:
    """Blocks of pages for tensors. When a tensor's storage is freed, its block is reused for a tensor of equal size."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._held: set[int] = set()  # addresses of blocks in use

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Make an uninitialised tensor in the pool like `tensor`: same shape and dtype; same strides if it is dense."""
        layout = torch.empty_like(tensor, device="meta")
        nbytes = layout.untyped_storage().nbytes()
        if not nbytes:
            return torch.empty_like(tensor, device="cpu")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free.setdefault(size, [])
        block = free.pop() if free else mmap.mmap(-1, size)
        # Only the tensor holds this view, so it dies with the storage.
        view = memoryview(block)
        begin = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        weakref.finalize(view, self._give_back, block, size, begin).atexit = False
        self._held.add(begin)
        flat = torch.frombuffer(view, dtype=tensor.dtype, count=nbytes // tensor.dtype.itemsize)
        return flat.as_strided(layout.shape, layout.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is stored in one of the blocks."""
        return tensor.untyped_storage().data_ptr() in self._held

    def _give_back(self, block: mmap.mmap, size: int, begin: int) -> None:
        self._held.discard(begin)
        self._free[size].append(block)
