"""Files of saved plans."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from zgraph.torch_compat.inductor import inductor_cache_directory

_MAGIC = b"zgraph plan 1\n"
_LARGEST_BYTES = 2 << 30  # of all files; the oldest are removed


@dataclass(frozen=True)
class PlanFolder:
    """A folder with one file for each plan, named by the plan's key."""

    path: Path

    @classmethod
    def default(cls) -> PlanFolder | None:
        """Return `$ZGRAPH_CACHE_DIR`, or else a folder in Inductor's cache directory.

        None if the variable is empty, or if torch's caches are off.
        """
        given = os.environ.get("ZGRAPH_CACHE_DIR")
        if given == "" or torch.compiler.config.force_disable_caches:
            return None
        return cls(Path(given or Path(inductor_cache_directory()) / "zgraph").expanduser().absolute())

    def read(self, key: str) -> bytes | None:
        """Return what `write` was given under a key; None if there is no such file, or it is not what was written."""
        file = self.path / key
        try:
            number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait for the other end of a pipe
            with os.fdopen(number, "rb") as stream:
                about = os.fstat(number)
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
                    return None  # another user can have written it, and unpickling runs code
                found = stream.read()
            os.utime(file)  # what is used stays
        except OSError:
            return None
        content = found[len(_head(key, b"")) :]
        return content if found.startswith(_head(key, content)) else None

    def write(self, key: str, content: bytes) -> None:
        """Write a plan; readers see the whole file or none.

        Raises:
            OSError: the file cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=".", dir=self.path)
        try:
            with os.fdopen(number, "wb") as stream:
                stream.write(_head(key, content) + content)
            os.replace(name, self.path / key)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        with contextlib.suppress(OSError):
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        files: list[tuple[float, int, str]] = []
        for entry in os.scandir(self.path):
            try:
                about = entry.stat()
            except OSError:  # another rank has removed it
                continue
            if not entry.name.startswith("."):  # which another rank is writing
                files.append((about.st_mtime, about.st_size, entry.path))
        size = sum(one[1] for one in files)
        for _, bytes_of_file, path in sorted(files):
            if size <= _LARGEST_BYTES:
                return
            Path(path).unlink(missing_ok=True)
            size -= bytes_of_file


def _head(key: str, content: bytes) -> bytes:
    """Return the first bytes of a file: a digest of its key and its content."""
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + content).digest()
