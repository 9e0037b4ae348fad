"""A process that writes tensors to disk until it is killed: test_disk_kills.py."""

from __future__ import annotations

import itertools
import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from zgraph.tiers.disk.folder import DiskFolder

NUMEL = 100_000


def write_until_killed(scratch: str, nameless: bool, begun: Connection) -> None:
    """Send the files in the folder, before and after it is opened, then write one number after another."""
    if not nameless:
        os.open = _refusing_nameless_files(os.open)
    left = sorted(os.listdir(scratch))
    disk = DiskFolder(scratch, 0)
    tensors = [disk.empty((NUMEL,), torch.float32, f"state {number}") for number in range(3)]
    begun.send((left, sorted(os.listdir(scratch))))
    for value in itertools.count():
        writes = [disk.start_write(torch.full((NUMEL,), float(value)), tensor) for tensor in tensors]
        for write in writes:
            write.wait()


def _refusing_nameless_files(real: Any) -> Any:
    """os.open of a filesystem that has none."""

    def refusing(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)

    return refusing
