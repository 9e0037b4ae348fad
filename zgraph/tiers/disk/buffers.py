"""Memory for large reads: made of huge pages, and reused after the tensor in it has died.

A direct read into fresh memory faults the pages in one by one, and one request holds a few hundred pages at most. With
pages of 4 KiB the faults took longer than the disk; with huge pages they took a fifth of a read's time. Reads in
requests of 64 MiB reached 1.5 GiB/s into fresh memory. Into reused memory they reached 1.9 GiB/s, in a fortieth of the
processor time.
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
    """Memory inside `mapped`, aligned to a huge page; it is unmapped when the object `mapped` dies."""

    mapped: mmap.mmap
    address: int
    span: int


@dataclass(frozen=True)
class Buffers:
    """Buffers of one folder. Any thread may take a buffer; it becomes free again when the last tensor in it dies."""

    # Finalizers run at any point of any thread: single calls on a list are atomic, but a separate counter would not be.
    _free: list[_Pages] = field(default_factory=list[_Pages])

    @property
    def free_bytes(self) -> int:
        """Bytes that are allocated and waiting to be reused."""
        return sum(pages.span for pages in list(self._free))

    def take(self, nbytes: int) -> Tensor:
        """Make a uint8 tensor of `nbytes` bytes, aligned to a huge page. Its storage has room for whole blocks."""
        span = blocks(nbytes)
        pages = self._found(span) or _made(span)
        array = view(pages.address, span)
        weakref.finalize(array, self._give_back, pages).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)[:nbytes]

    def _found(self, span: int) -> _Pages | None:
        """Take the smallest free memory that has `span` to `MOST_SPARE * span` bytes; return None if there is none."""
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
        while self.free_bytes > KEPT_BYTES:
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
