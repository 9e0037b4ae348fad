"""Host memory for a CPU device: a pool separate from torch's allocators."""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class HostPool:
    """Pool of memory blocks for tensors. When a tensor is freed, its block is reused for tensors of equal size.

    Attributes:
        in_use_bytes, peak_bytes: bytes of all blocks in use, now and at most so far.
    """

    in_use_bytes: int = 0
    peak_bytes: int = 0
    _free: dict[int, list[mmap.mmap]] = field(default_factory=dict[int, "list[mmap.mmap]"])
    _held: set[int] = field(default_factory=set[int])  # addresses of blocks in use

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialised tensor in the pool, with shape and dtype of `tensor`; if dense, also its strides."""
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
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        flat = torch.frombuffer(view, dtype=tensor.dtype, count=nbytes // tensor.dtype.itemsize)
        return flat.as_strided(layout.shape, layout.stride())

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a CPU tensor is stored in the pool."""
        return tensor.untyped_storage().data_ptr() in self._held

    def _give_back(self, block: mmap.mmap, size: int, begin: int) -> None:
        self._held.discard(begin)
        self.in_use_bytes -= size
        self._free[size].append(block)
