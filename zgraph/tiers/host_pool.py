"""Host memory for a CPU device: a pool separate from torch's allocators."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor


class HostPool:
    """Pool of memory blocks for tensors. When a tensor is freed, its block is reused for a tensor of equal size."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}  # by size
        self._held: set[int] = set()  # addresses of blocks in use

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor in the pool, with shape and dtype of `tensor`; if dense, also its strides."""
        layout = torch.empty_like(tensor, device="meta")
        nbytes = layout.untyped_storage().nbytes()
        if not nbytes:
            return torch.empty_like(tensor, device="cpu")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:  # another thread may take the last block between a test and a pop
            block = self._free.setdefault(size, []).pop()
        except IndexError:
            block = mmap.mmap(-1, size)
        # Only the tensor holds this view, so it dies with the storage.
        view = memoryview(block)
        begin = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        weakref.finalize(view, self._give_back, block, size, begin).atexit = False
        self._held.add(begin)
        flat = torch.frombuffer(view, dtype=tensor.dtype, count=nbytes // tensor.dtype.itemsize)
        return flat.as_strided(layout.shape, layout.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a CPU tensor is stored in the pool."""
        return tensor.untyped_storage().data_ptr() in self._held

    def _give_back(self, block: mmap.mmap, size: int, begin: int) -> None:
        self._held.discard(begin)
        self._free[size].append(block)
