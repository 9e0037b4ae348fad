"""Memory for large reads: of huge pages, and used again once the tensor that came into it is gone.

A direct read into fresh memory makes its pages one by one, and a request holds a few hundred of them at most: with
pages of 4 KiB that took longer than the disk, and with huge ones still a fifth of a read (64 MiB at a time: 1.5 GiB/s
into fresh memory, 1.9 into memory that had been read into before, and a fortieth of the processor's time).
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.tiers.disk.system_calls import HUGE_PAGE, address_of, blocks, take_huge_pages, view

KEPT_BYTES = 2**27  # of memory that nobody uses: an update's three tensors of 11 M elements
MOST_SPARE = 1.5  # times the memory that a tensor needs may be used again for it


@dataclass(frozen=True, eq=False)
class _Pages:
    """Memory at a multiple of a huge page, in `mapped`, which takes it back from the process when it is gone."""

    mapped: mmap.mmap
    address: int
    span: int


@dataclass(frozen=True)
class Buffers:
    """Buffers of one folder. Taken by any thread, and given back by whichever drops the last tensor in one.

    Args:
        kept_bytes: most bytes that stay allocated while no tensor lies in them.
    """

    kept_bytes: int = KEPT_BYTES
    # Finalizers run at any point of any thread: single calls on a list are atomic, counts beside it would not be.
    _free: list[_Pages] = field(default_factory=list[_Pages])

    @property
    def free_bytes(self) -> int:
        """Bytes that are allocated and wait to be used again."""
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
                self._free.pop(0)  # what has waited longest: sizes that are not asked for any more go first
            except IndexError:
                return


def _made(span: int) -> _Pages:
    # Huge pages where they fit in whole: one that a tensor fills in part would take more than the tensor does.
    mapped = mmap.mmap(-1, span + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = address_of(mapped)
    address = start + -start % HUGE_PAGE
    take_huge_pages(address, span)
    return _Pages(mapped, address, span)
