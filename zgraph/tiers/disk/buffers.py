"""Memory for large reads: made of huge pages, and reused once the tensor that was read into it is gone.

A direct read into fresh memory faults its pages in one by one, and a request holds a few hundred of them at most: with
pages of 4 KiB that took longer than the disk, and with huge ones still a fifth of a read (64 MiB at a time: 1.5 GiB/s
into fresh memory, 1.9 into memory that had been read into before, with a fortieth of the processor's time).
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.tiers.disk.system_calls import HUGE_PAGE, address_of, blocks, take_huge_pages, view

KEPT_BYTES = 2**27  # most unused memory kept: three tensors of 11 M elements, as an update has
MOST_SPARE = 1.5  # free memory is reused for a tensor if it is at most this many times as large


@dataclass(frozen=True, eq=False)
class _Pages:
    """Memory at a multiple of a huge page in `mapped`, which unmaps it when it dies."""

    mapped: mmap.mmap
    address: int
    span: int


@dataclass(frozen=True)
class Buffers:
    """Buffers of one folder. Any thread may take one; it returns here when the last tensor in it dies.

    Args:
        kept_bytes: most bytes that stay allocated while no tensor uses them.
    """

    kept_bytes: int = KEPT_BYTES
    # Finalizers run at any point of any thread: single calls on a list are atomic, but a separate counter would not be.
    _free: list[_Pages] = field(default_factory=list[_Pages])

    @property
    def free_bytes(self) -> int:
        """Bytes that are allocated and waiting to be reused."""
        return sum(pages.span for pages in list(self._free))

    def take(self, nbytes: int) -> Tensor:
        """Make a [nbytes] uint8 tensor in memory at a multiple of a huge page, with room up to the next block."""
        span = blocks(nbytes)
        pages = self._found(span) or _made(span)
        array = view(pages.address, span)
        weakref.finalize(array, self._give_back, pages).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)[:nbytes]

    def _found(self, span: int) -> _Pages | None:
        """The smallest free memory that is large enough, but not much larger."""
        fitting = [pages for pages in list(self._free) if span <= pages.span <= MOST_SPARE * span]
        for pages in sorted(fitting, key=lambda pages: pages.span):
            try:
                self._free.remove(pages)
            except ValueError:  # another thread has taken it
                continue
            return pages
        return None

    def _give_back(self, pages: _Pages) -> None:
        self._free.append(pages)
        while self.free_bytes > self.kept_bytes:
            try:
                self._free.pop(0)  # the one unused for longest: sizes no longer requested go first
            except IndexError:
                return


def _made(span: int) -> _Pages:
    # Huge pages only where whole ones fit: a partly filled one would use more memory than the tensor.
    mapped = mmap.mmap(-1, span + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(mapped)
    address = start + -start % HUGE_PAGE
    take_huge_pages(address, span)
    return _Pages(mapped, address, span)
