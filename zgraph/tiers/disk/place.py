"""Unnamed files in the user's folder: however the process ends, the kernel frees their space.

Named files must be removed by a later run, and that run cannot easily tell files of dead processes from files of live
ones. An unnamed file needs no cleaning, cannot be opened by a second process, and is not removed or truncated by
mistake. `df`, `lsof +L1` and `ls -l /proc/PID/fd` show the space that a run uses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import stat
from pathlib import Path

from zgraph.errors import DiskError

_PREFIX = ".zgraph-disk"


def open_anonymous(folder: Path, who: str) -> int:
    """Open a new unnamed file in a folder, for reading and writing; make the folder if it is missing.

    Raises:
        DiskError: the path is not a writable folder, or its parent folder is missing.
    """
    ensure(folder, who)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: to a kernel or filesystem without O_TMPFILE this opens a directory for writing.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise refused(error, folder, who) from error
    return _open_and_remove(folder, who)


def ensure(folder: Path, who: str) -> None:
    """Make a folder if it is missing, but not its parents: missing parents mean that the disk is not mounted.

    Raises:
        DiskError: the path is not a folder, or the folder cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):  # perhaps another rank has just made it
            folder.mkdir()
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        above = folder.resolve() if folder.is_symlink() else folder.absolute().parent
        if isinstance(error, FileNotFoundError) and not above.exists():  # /proc, which exists, says ENOENT as well
            raise DiskError(
                f"{who}: {folder} cannot be made: there is no folder {above}; make that, or mount the disk"
            ) from error
        raise DiskError(
            f"{who}: {folder} cannot be used: {error.strerror}; give a folder, or the path of a new one in a folder, "
            f"which this process (user id {os.geteuid()}) may write to"
        ) from error
    if not is_folder:
        raise DiskError(f"{who}: {folder} is not a directory; give a folder on the disk to use")


def refused(error: OSError, folder: Path, who: str) -> DiskError:
    return DiskError(
        f"{who}: cannot create a file in {folder}: {error.strerror}; give a folder on a disk with room, which this "
        f"process (user id {os.geteuid()}) may write to"
    )


def _open_and_remove(folder: Path, who: str) -> int:
    """Open a new named file and remove its name, on a filesystem without unnamed files; return its descriptor.

    If the process is killed in between, an empty file stays in the folder.
    """
    # A host removes only its own names: on a network filesystem another host's file may not survive it.
    own = f"{_PREFIX}-{platform.node()}-"
    path = folder / f"{own}{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise refused(error, folder, who) from error
    # Also removes leftovers, and perhaps the new name of another process, which was about to remove it itself.
    for name in [path, *folder.glob(f"{own}*")]:
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
    return fd


def filesystem_of(fd: int) -> str:
    """Type of the filesystem of a file, such as "ext4"; "" if /proc does not say."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""


def free_bytes(fd: int) -> int:
    """Free bytes that this user may use on the filesystem of an open file."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize
