"""Choice between direct transfers of a file, which bypass the page cache, and buffered ones.

Linux keeps direct transfers and mappings of one file coherent: dirty pages are written before a direct read, and pages
are dropped around a direct write. This holds if a transfer and a mapped access do not overlap in time, as the rule in
`folder.py` demands. A network or FUSE filesystem may behave differently, so each folder is tested once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zgraph.tiers.disk.buffers import Buffers
from zgraph.tiers.disk.space import Space
from zgraph.tiers.disk.system_calls import BLOCK, HUGE_PAGE, address_of, blocks, view

# Memory alignments to try: torch allocates at multiples of 64 bytes; old kernels and many devices require 512.
_ALIGNMENTS = (64, 512, BLOCK)


@dataclass(frozen=True)
class Access:
    """File descriptors through which one file is read and written.

    Attributes:
        buffered: descriptor for transfers of any range from or to any memory.
        direct: descriptor for transfers of whole blocks from or to aligned memory; None if direct transfers fail here.
        alignment: alignment in bytes that direct transfers require of memory.
        buffers: memory for large reads.
    """

    buffered: int
    direct: int | None
    alignment: int = 1
    buffers: Buffers = field(default_factory=Buffers)

    def buffer(self, nbytes: int) -> Tensor:
        """Make a uint8 tensor of `nbytes` bytes to read into, aligned for direct transfers if they work here.

        The storage of an aligned tensor has room for whole blocks. Large buffers consist of huge pages if the system
        has them, and reuse the memory of earlier buffers.
        """
        if self.direct is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        if nbytes >= HUGE_PAGE:
            return self.buffers.take(nbytes)
        memory = torch.empty(blocks(nbytes) + self.alignment, dtype=torch.uint8)
        first = -memory.data_ptr() % self.alignment
        return memory[first : first + nbytes]


def open_access(space: Space) -> Access:
    """Return the access to a file. It includes direct transfers only if a test shows that they agree with a mapping."""
    direct = reopen_direct(space.fd)
    if direct is None:
        return Access(space.fd, None)
    try:
        slot, array = space.allocate("a trial of two blocks", 2 * BLOCK)
        alignment = _smallest_alignment(direct, slot.offset)
        if alignment is not None and _agrees_with_mapping(direct, slot.offset, array):
            access = Access(space.fd, direct, alignment)
            weakref.finalize(access, os.close, direct)
            return access
    except BaseException:
        os.close(direct)
        raise
    os.close(direct)
    return Access(space.fd, None)


def reopen_direct(fd: int) -> int | None:
    """Open a file once more, for direct transfers; return None if that is impossible."""
    with contextlib.suppress(OSError):
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return None


def _smallest_alignment(direct: int, offset: int) -> int | None:
    with mmap.mmap(-1, 3 * BLOCK) as pages:
        start = address_of(pages)
        for alignment in _ALIGNMENTS:
            # An offset of BLOCK itself would prove nothing: it is a multiple of every alignment tried.
            memory = [view(start + alignment % BLOCK, 2 * BLOCK)]
            with contextlib.suppress(OSError):
                if os.pwritev(direct, memory, offset) == os.preadv(direct, memory, offset) == 2 * BLOCK:
                    return alignment
    return None


def _agrees_with_mapping(direct: int, offset: int, mapped: ctypes.Array[ctypes.c_char]) -> bool:
    """Whether a direct read sees stores to the mapping, and the mapping sees a direct write."""
    with mmap.mmap(-1, 2 * BLOCK) as pages:
        mapped.raw = b"\1" * (2 * BLOCK)
        os.preadv(direct, [pages], offset)
        if pages[:] != mapped.raw:
            return False
        pages[:] = b"\2" * (2 * BLOCK)
        os.pwritev(direct, [pages], offset)
        return pages[:] == mapped.raw
