"""Linux system calls that Python does not have, or has only with a file descriptor for each mapping.

Python's mmap duplicates its descriptor, so that a model with a thousand tensors would meet the usual limit of 1024 open
files; libc's keeps none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys

BLOCK = 4096  # bytes: what offsets, lengths and memory of direct transfers are multiples of
HUGE_PAGE = 2**21  # bytes, of x86 and of ARM with pages of 4 KiB
_PROT_READ_WRITE, _MAP_SHARED, _MADV_DONTNEED, _MADV_HUGEPAGE = 3, 1, 4, 14
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_SYNC_WAIT_BEFORE, _SYNC_WRITE_AND_WAIT = 1, 7
# A filesystem that lacks one of the calls below says so by one of these.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
if sys.platform == "linux":  # others lack them, and DiskFolder refuses these
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    _libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint)


def blocks(nbytes: int) -> int:
    """Bytes of the blocks that so many bytes need, one block at least."""
    return max(1, -(-nbytes // BLOCK)) * BLOCK


def map_shared(fd: int, offset: int, nbytes: int) -> int:
    """Map a range of a file for reading and writing and return its address.

    Raises:
        OSError: the kernel refuses, such as ENOMEM for more than `vm.max_map_count` mappings.
    """
    address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def unmap(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def view(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Memory as an object that Python reads into and writes from; it keeps nothing alive."""
    return (ctypes.c_char * nbytes).from_address(address)


def address_of(pages: mmap.mmap) -> int:
    """Address of memory that Python has mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def take_huge_pages(address: int, nbytes: int) -> None:
    """Let memory that has not been touched consist of huge pages, as far as whole ones fit; advice, which may fail."""
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    whole = (address + nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if whole > 0:
        _libc.madvise(first, whole, _MADV_HUGEPAGE)


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Give blocks of a file back to the filesystem, where it can; its size stays, and reads find zeros."""
    _libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, nbytes)


def drop_pages(fd: int, offset: int, nbytes: int, address: int) -> None:
    """Write the dirty pages of a range of a file that is mapped at an address, and drop all from the page cache.

    Raises:
        OSError: the kernel could not write them.
    """
    # Pages in use by a mapping stay in the cache; taking them out of the mapping also passes their dirtiness on.
    _libc.madvise(address, nbytes, _MADV_DONTNEED)
    _sync(fd, offset, nbytes, _SYNC_WRITE_AND_WAIT)
    with contextlib.suppress(OSError):  # advice
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def check_written(fd: int, offset: int, nbytes: int) -> None:
    """Wait for what the kernel is writing of a range of a file, and see whether it failed to write any of the file.

    Raises:
        OSError: it did, since this was last asked of this descriptor.
    """
    _sync(fd, offset, nbytes, _SYNC_WAIT_BEFORE)


def _sync(fd: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(fd, offset, nbytes, flags) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
