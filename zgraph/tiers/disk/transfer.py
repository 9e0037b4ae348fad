"""Transfers between a slot of the file and memory: in place if the memory is aligned, else through a small buffer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from zgraph.errors import DiskError
from zgraph.tiers.disk.access import Access
from zgraph.tiers.disk.space import Slot, Space
from zgraph.tiers.disk.system_calls import BLOCK, HUGE_PAGE, address_of, blocks, check_written, drop_pages, view

MIB = 2**20
REQUEST_BYTES = 64 * MIB  # for transfers in place, which need no extra memory: the larger the faster
STAGING_BYTES = 8 * MIB  # for each direction; more gains nothing
# In-place reads from this size on run as two concurrent halves: with one request at a time a disk idles in between.
HALVED_BYTES = 8 * MIB
# Tensors up to this size, such as biases, stay in the page cache, which evicts them when memory is short: a separate
# request for each would wait for the large ones before it.
SMALL_BYTES = 2**18
_HINTS = MappingProxyType(
    {
        errno.ENOSPC: "free space on it",
        errno.EDQUOT: "raise the quota",
        errno.EIO: "the disk may be failing: see the kernel's log",
        errno.ENODATA: "the file was truncated: resume from a checkpoint",
    }
)


@dataclass(frozen=True)
class Part:
    """A byte range of a slot of the file: a whole tensor, or a contiguous view of a tensor."""

    slot: Slot
    start: int
    nbytes: int

    @property
    def offset(self) -> int:
        """Byte offset in the file at which this transfer starts."""
        return self.slot.offset + self.start

    @property
    def in_blocks(self) -> bool:
        """Whether whole blocks can be transferred: the part begins at a block, and ends with a block or with its slot.

        The slot's padding is unused, so it may be transferred along.
        """
        ends_slot = self.start + self.nbytes == self.slot.nbytes
        return self.start % BLOCK == 0 and (ends_slot or self.nbytes % BLOCK == 0)


class Mover:
    """Transfers in one direction, started by any thread; a helper thread reads the second halves of large reads.

    Large reads run one by one, so that the first one ends early. The staging memory serves one transfer at a time.

    Args:
        space: the file.
        access: the file's descriptors.
    """

    def __init__(self, space: Space, access: Access) -> None:
        self.space, self.access = space, access
        self._staging: mmap.mmap | None = None
        self._reaches_pinned = True  # False once the disk could not reach memory that it was given
        self._large, self._staged = threading.Lock(), threading.Lock()
        self._beside = ThreadPoolExecutor(1, "zgraph-disk-half")  # starts its thread at the first large read

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory held: the buffer for transfers that cannot run in place."""
        return 0 if self._staging is None else len(self._staging)

    def read(self, part: Part, address: int, room: int) -> None:
        """Read `part` into the memory at `address`. The read may overwrite up to `room` bytes there.

        Raises:
            DiskError: the file cannot be read, or has become shorter than the part.
        """
        try:
            self.space.check(part.slot)
            if part.nbytes == 0:  # has no address
                return
            if _is_small(part):
                self._check_written(part)
            if self._is_direct(part):
                self._read_directly(part, address, room)
            else:
                repeat(os.preadv, self.access.buffered, address, part.nbytes, part.offset)
            if not _is_small(part):
                self.drop(part)
        except OSError as error:
            raise self._failed("reading", part, error) from error

    def write(self, part: Part, address: int) -> None:
        """Write memory at an address to a part of the file.

        Raises:
            DiskError: the part could not be written, or not all of it.
        """
        try:
            self.space.check(part.slot)
            if part.nbytes == 0:
                return
            if self._is_direct(part):
                self._write_directly(part, address)
            else:
                repeat(os.pwritev, self.access.buffered, address, part.nbytes, part.offset)
            if not _is_small(part):
                self.drop(part)
        except OSError as error:
            raise self._failed("writing", part, error) from error

    def drop(self, part: Part) -> None:
        """Write the dirty pages of a part to disk, then drop the part from the page cache."""
        first = part.start // BLOCK * BLOCK
        nbytes = blocks(part.start + part.nbytes - first)
        with self._noting_lost():
            drop_pages(self.access.buffered, part.slot.offset + first, nbytes, part.slot.address + first)

    def _check_written(self, part: Part) -> None:
        """Raise an OSError if the kernel may have failed to write a part: a read might then return old bytes.

        The kernel reports a failure only once, for the whole file: from then on no small tensor can be trusted.
        """
        if self.space.lost is not None:
            raise self.space.lost
        with self._noting_lost():
            check_written(self.access.buffered, part.offset, part.nbytes)

    @contextlib.contextmanager
    def _noting_lost(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.space.lost = OSError(error.errno, error.strerror)
            raise

    def staging(self, nbytes: int) -> int:
        """Allocate staging memory for a transfer of `nbytes`, `STAGING_BYTES` at most, and return its address."""
        wanted = min(STAGING_BYTES, blocks(nbytes))
        if self._staging is None or len(self._staging) < wanted:
            self._staging = None  # freed first, so that there are never two
            self._staging = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return address_of(self._staging)

    def _is_direct(self, part: Part) -> bool:
        return self.access.direct is not None and part.in_blocks and not _is_small(part)

    def _read_directly(self, part: Part, address: int, room: int) -> None:
        assert self.access.direct is not None
        whole = min(room // BLOCK * BLOCK, blocks(part.nbytes)) if self._in_place(address) else 0
        if not self._reached(partial(self._read_in_place, self.access.direct, address, whole, part.offset)):
            whole = 0
        if whole >= part.nbytes:
            return
        with self._staged:
            staging = self.staging(part.nbytes - whole)
            for start, nbytes in steps(whole, part.nbytes, self.staging_bytes):
                repeat(os.preadv, self.access.direct, staging, blocks(nbytes), part.offset + start)
                ctypes.memmove(address + start, staging, nbytes)

    def _read_in_place(self, fd: int, address: int, whole: int, offset: int) -> None:
        def read(start: int, end: int) -> None:
            for first, nbytes in steps(start, end, REQUEST_BYTES):
                repeat(os.preadv, fd, address + first, nbytes, offset + first)

        if whole < HALVED_BYTES:
            read(0, whole)
            return
        middle = whole // 2 // HUGE_PAGE * HUGE_PAGE
        with self._large:
            second = self._beside.submit(read, middle, whole)
            try:
                read(0, middle)
            finally:
                wait([second])  # also if the first half fails: until then the second reads into memory to be freed
            second.result()

    def _write_directly(self, part: Part, address: int) -> None:
        assert self.access.direct is not None
        whole = part.nbytes // BLOCK * BLOCK if self._in_place(address) else 0
        if not self._reached(partial(self._write_in_place, self.access.direct, address, whole, part.offset)):
            whole = 0
        staging = self.staging(part.nbytes - whole) if whole < part.nbytes else 0
        for start, nbytes in steps(whole, part.nbytes, self.staging_bytes):
            ctypes.memmove(staging, address + start, nbytes)
            ctypes.memset(staging + nbytes, 0, blocks(nbytes) - nbytes)
            repeat(os.pwritev, self.access.direct, staging, blocks(nbytes), part.offset + start)

    def _write_in_place(self, fd: int, address: int, whole: int, offset: int) -> None:
        for start, nbytes in steps(0, whole, REQUEST_BYTES):
            repeat(os.pwritev, fd, address + start, nbytes, offset + start)

    def _in_place(self, address: int) -> bool:
        return self._reaches_pinned and address % self.access.alignment == 0

    def _reached(self, transfer: Callable[[], None]) -> bool:
        """Run a transfer in place, and return whether the disk could reach the memory.

        Pinned memory may be mapped by a device's driver, and the kernel then refuses to pass it to a disk (EFAULT).
        No system call tells this beforehand. After the first refusal all transfers go through staging memory.
        """
        try:
            transfer()
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            self._reaches_pinned = False
        return self._reaches_pinned

    def _failed(self, doing: str, part: Part, error: OSError) -> DiskError:
        hint = _HINTS.get(error.errno or 0, "see the system's log for this disk")
        return DiskError(
            f"{self.space.who}: {doing} {part.slot.name} ({part.nbytes} bytes at {part.offset} of the file in "
            f"{self.space.path}) failed: {error.strerror}; {hint}"
        )


def _is_small(part: Part) -> bool:
    return part.slot.nbytes <= SMALL_BYTES


def steps(start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Split the range from `start` to `end` into steps of at most `most` bytes; yield each step's start and length."""
    while start < end:
        yield start, min(most, end - start)
        start += most


def repeat(call: Callable[..., int], fd: int, address: int, nbytes: int, offset: int) -> None:
    """Repeat a system call until a whole range is transferred: one call may stop early, at 2 GiB or at a signal.

    Raises:
        OSError: a call failed, or transferred nothing.
    """
    done = 0
    while done < nbytes:
        count = call(fd, [view(address + done, nbytes - done)], offset + done)
        if count == 0:
            raise OSError(errno.ENODATA, f"it ended after {done} of {nbytes} bytes")
        done += count
