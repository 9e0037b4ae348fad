"""A disk that is slower than the machine's."""

from __future__ import annotations

import threading
import time
from typing import Any

from zgraph.tiers.disk.folder import DiskFolder


def slow_down(disk: DiskFolder, bytes_per_s: float) -> None:
    """Let each transfer of a folder take as long as on a disk of that rate, at least."""
    for mover, name in ((disk._reads, "read"), (disk._writes, "write")):
        _delay(mover, name, bytes_per_s)


def _delay(mover: Any, name: str, bytes_per_s: float) -> None:
    transfer, one_by_one = getattr(mover, name), threading.Lock()  # several threads read

    def delayed(part: Any, *rest: int) -> None:
        with one_by_one:
            begun = time.monotonic()
            transfer(part, *rest)
            time.sleep(max(0.0, begun + part.nbytes / bytes_per_s - time.monotonic()))

    setattr(mover, name, delayed)
