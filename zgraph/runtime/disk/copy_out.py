"""Copy a part of a slot into another file, such as a checkpoint's: by shared blocks where these can be, else in pieces.

Not by os.copy_file_range: where blocks cannot be shared it goes through the page cache, for both files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from zgraph.errors import DiskError
from zgraph.runtime.disk.access import reopen_direct
from zgraph.runtime.disk.system_calls import BLOCK, blocks, drop_pages, reflink
from zgraph.runtime.disk.transfer import Mover, Part, repeat, steps


def copy_to_path(mover: Mover, part: Part, path: Path) -> None:
    """Write a part as a file of its own, which is whole or absent whenever the process ends.

    Raises:
        DiskError: it cannot be written; a file of this name stays as it was.
    """
    try:
        fd, name = _open_beside(path)
        try:
            _copy(mover, part, fd, 0)
            os.fsync(fd)
            _publish(fd, name, path)
        except BaseException:
            if name is not None:
                name.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise _failed(mover, part, str(path), error) from error


def copy_to_open(mover: Mover, part: Part, file: BinaryIO) -> None:
    """Write a part to an open file, from its position on.

    Raises:
        DiskError: it cannot be written.
        ValueError: it is not a file of the system's, or was opened for appending.
    """
    try:
        fd, offset = file.fileno(), file.tell()
    except io.UnsupportedOperation as error:
        raise ValueError(f"copy_to: {file} is not a file on a disk; give one, or a path") from error
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:  # the kernel would write at its end, whatever the position
        raise ValueError(f"copy_to: {file} was opened for appending; open it with 'wb' or 'r+b'")
    try:
        file.flush()
        _copy(mover, part, fd, offset)
        file.seek(offset + part.nbytes)
    except OSError as error:
        raise _failed(mover, part, str(getattr(file, "name", file)), error) from error


def _copy(mover: Mover, part: Part, target: int, offset: int) -> None:
    source = mover.access.buffered
    whole = part.nbytes // BLOCK * BLOCK
    shared = 0
    if whole > 0 and part.start % BLOCK == 0 and offset % BLOCK == 0:
        shared = whole if reflink(source, part.offset, whole, target, offset) else 0
    if shared == 0 and part.nbytes > 0:
        os.posix_fallocate(target, offset, part.nbytes)  # before anything is copied
    staging = mover.staging(part.nbytes - shared)
    with _writer(target, offset) as write:
        for start, nbytes in steps(shared, part.nbytes, mover.staging_bytes):
            piece = Part(part.slot, part.start + start, nbytes)
            mover.read(piece, staging, blocks(nbytes))
            write(staging, nbytes, offset + start)


@contextlib.contextmanager
def _writer(target: int, offset: int) -> Generator[Callable[[int, int, int], None]]:
    """Give a function that writes memory to a file, directly where it can."""
    direct = reopen_direct(target) if offset % BLOCK == 0 else None

    def write(address: int, nbytes: int, at: int) -> None:
        whole = nbytes // BLOCK * BLOCK if direct is not None else 0
        if direct is not None and whole > 0:
            repeat(os.pwritev, direct, address, whole, at)
        if whole < nbytes:
            repeat(os.pwritev, target, address + whole, nbytes - whole, at + whole)
            drop_pages(target, at + whole, nbytes - whole)

    try:
        yield write
    finally:
        if direct is not None:
            os.close(direct)


def _open_beside(path: Path) -> tuple[int, Path | None]:
    """Open a file in the folder of a path: one without a name where that can be, else one with a name to be removed."""
    with contextlib.suppress(OSError):
        return os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
    name = _temporary(path)
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), name


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _publish(fd: int, name: Path | None, path: Path) -> None:
    """Give a written file its name, in place of one that has it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if name is None:
            try:
                _link(fd, path, folder)
            except FileExistsError:  # which a link cannot replace
                name = _temporary(path)
                _link(fd, name, folder)
        if name is not None:
            os.rename(name, path)
        os.fsync(folder)
    finally:
        os.close(folder)


def _link(fd: int, path: Path, folder: int) -> None:
    # With a descriptor of a folder Python calls linkat, which follows the symbolic link in /proc; without, link.
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=folder, follow_symlinks=True)


def _failed(mover: Mover, part: Part, target: str, error: OSError) -> DiskError:
    hint = "free space on its disk" if error.errno == errno.ENOSPC else "see that the folder exists and can be written"
    return DiskError(
        f"{mover.space.who}: copying {part.slot.name} ({part.nbytes} bytes) to {target} failed: {error.strerror}; "
        f"{hint}"
    )
