"""Files without a name in a folder of the user's: however the process ends, the kernel frees their space.

A name would have to be removed by the next run, which must tell files of the dead from those of the living. Without one
there is nothing to clean, no second process opens the file, and nobody removes or truncates it by mistake. What a run
takes is seen by `df`, `lsof +L1` and `ls -l /proc/PID/fd`.
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
    """Open a new file without a name in a folder, for reading and writing; makes the folder if it is missing.

    Raises:
        DiskError: the path is not a folder, or not one to write to, or the folder that it is to lie in is missing.
    """
    ensure(folder, who)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: a kernel or filesystem that does not know O_TMPFILE sees a directory opened for writing.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise refused(error, folder, who) from error
    return _open_and_remove(folder, who)


def ensure(folder: Path, who: str) -> None:
    """Make a folder unless it is there. Not those above it: of a disk that is not mounted they are missing.

    Raises:
        DiskError: the path is something else, or its folder cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):  # another rank's, perhaps of this moment
            folder.mkdir()
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        above = folder.resolve() if folder.is_symlink() else folder.absolute().parent
        if isinstance(error, FileNotFoundError) and not above.exists():  # /proc, which exists, says ENOENT as well
            raise DiskError(
                f"{who}: {folder} cannot be made: there is no folder {above}; make that, or mount the disk that is to "
                "be used"
            ) from error
        raise DiskError(
            f"{who}: {folder} cannot be used: {error.strerror}; give a folder, or the path of a new one in a folder, "
            f"which this process (user id {os.geteuid()}) may write to"
        ) from error
    if not is_folder:
        raise DiskError(f"{who}: {folder} is not a directory; give a folder on the disk that is to be used")


def refused(error: OSError, folder: Path, who: str) -> DiskError:
    return DiskError(
        f"{who}: cannot create a file in {folder}: {error.strerror}; give a folder on a disk with room, which this "
        f"process (user id {os.geteuid()}) may write to"
    )


def _open_and_remove(folder: Path, who: str) -> int:
    """For filesystems without nameless files: a name for a moment; a kill in this moment leaves it, without bytes."""
    # A host removes its own names alone: on a network filesystem another host's file may not survive it.
    own = f"{_PREFIX}-{platform.node()}-"
    path = folder / f"{own}{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise refused(error, folder, who) from error
    # Removes leftovers, too, and perhaps the new name of a neighbour, who was about to do the same.
    for name in [path, *folder.glob(f"{own}*")]:
        with contextlib.suppress(FileNotFoundError):
            name.unlink()
    return fd


def filesystem_of(fd: int) -> str:
    """Type of the filesystem that a file lies on, such as "ext4"; "" where /proc does not say."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""


def free_bytes(fd: int) -> int:
    """Bytes that the filesystem of a file has for this user."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize
