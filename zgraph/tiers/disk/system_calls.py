"""Linux system calls that Python lacks, or offers only with a file descriptor for each mapping.

Python's mmap duplicates the file descriptor for each mapping: a model with a thousand tensors reaches the usual limit
of 1024 open files. The mmap of libc keeps no descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys

BLOCK = 4096  # bytes; offsets, lengths and addresses of direct transfers are multiples of it
HUGE_PAGE = 2**21  # bytes, on x86 and on ARM with pages of 4 KiB
_PROT_READ_WRITE, _MAP_SHARED, _MADV_DONTNEED, _MADV_HUGEPAGE = 3, 1, 4, 14
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_SYNC_WAIT_BEFORE, _SYNC_WRITE_AND_WAIT = 1, 7
# Errors by which a filesystem says that it lacks one of the calls below.
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
if sys.platform == "linux":  # other systems lack them, and DiskFolder refuses to run there
    _libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    _libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_uint)


def blocks(nbytes: int) -> int:
    """Round bytes up to whole blocks, at least one."""
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
    """An array over the memory at `address`; the array does not keep the memory alive."""
    return (ctypes.c_char * nbytes).from_address(address)


def address_of(pages: mmap.mmap) -> int:
    """Address of memory that Python has mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def take_huge_pages(address: int, nbytes: int) -> None:
    """Advise the kernel to use huge pages for untouched memory, where whole huge pages fit; this may fail silently."""
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    whole = (address + nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if whole > 0:
        _libc.madvise(first, whole, _MADV_HUGEPAGE)


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Free the disk space of a file range where supported. The file keeps its size, and the range reads as zeros."""
    _libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, nbytes)


def drop_pages(fd: int, offset: int, nbytes: int, address: int) -> None:
    """Write the dirty pages of a file range that is mapped at an address, and drop the range from the page cache.

    Raises:
        OSError: the kernel could not write the dirty pages.
    """
    # Mapped pages would stay in the cache; unmapping them also transfers their dirty bits to the cache.
    _libc.madvise(address, nbytes, _MADV_DONTNEED)
    _sync(fd, offset, nbytes, _SYNC_WRITE_AND_WAIT)
    with contextlib.suppress(OSError):  # only advice
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def check_written(fd: int, offset: int, nbytes: int) -> None:
    """Wait until the kernel has written a range of a file, and check for failed writes anywhere in the file.

    Raises:
        OSError: a write has failed since the last check of this descriptor.
    """
    _sync(fd, offset, nbytes, _SYNC_WAIT_BEFORE)


def _sync(fd: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(fd, offset, nbytes, flags) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
