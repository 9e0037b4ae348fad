"""An exact count of the bytes that tensors take, and poison in those that they no longer take.

Nothing is sampled, and no thread or library goes unseen.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def _library() -> Any:
    """allocations.cpp, compiled once for each torch and each version of the file."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir(), f"zgraph_allocations_{os.getuid()}_{key}.so")
    if not built.exists():
        torch_folder = Path(torch.__file__).parent
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *(os.environ.get("CXX", "g++"), "-O1", "-shared", "-fPIC", "-std=c++20"),
                *(str(_SOURCE), "-o", str(unfinished)),
                *(f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"),
            ],
            check=True,
        )
        unfinished.rename(built)  # another process may be building it too
    library = ctypes.CDLL(str(built))
    for name in ("live_bytes", "take_peak_bytes", "stop_poisoning"):
        getattr(library, name).restype = ctypes.c_longlong
    return library


@dataclass
class Count:
    """Of a with-block of `counted`, known when it has ended.

    Attributes:
        start_bytes: what earlier blocks made and nobody has freed since.
        rise_bytes: highest point above where the block began.
        end_bytes: what is there at the end and was not at the beginning.
    """

    start_bytes: int = 0
    rise_bytes: int = 0
    end_bytes: int = 0

    @property
    def above_end_bytes(self) -> int:
        return self.rise_bytes - self.end_bytes


@contextmanager
def counted() -> Generator[Count]:
    """Count what happens inside; blocks do not nest."""
    library, count = _library(), Count()
    library.install()
    try:
        library.take_peak_bytes()
        count.start_bytes = library.live_bytes()
        yield count
        count.rise_bytes = library.take_peak_bytes() - count.start_bytes
        count.end_bytes = library.live_bytes() - count.start_bytes
    finally:
        library.uninstall()


def steady_rise(counts: Sequence[Count]) -> int:
    """Bytes that equal steps take at their highest point.

    A thread of gloo may hold a buffer a moment too long, at the start of one step or at the highest point of another.
    """
    lowest = min(count.start_bytes for count in counts)
    return min(count.start_bytes + count.rise_bytes for count in counts) - lowest


@contextmanager
def poisoned() -> Generator[None]:
    """New memory holds NaNs; so does what is freed, and nobody gets it again inside. Not inside `counted`.

    Raises:
        AssertionError: freed memory was written.
    """
    library = _library()
    library.install()
    library.poison()
    try:
        yield
    finally:
        written = library.stop_poisoning()
        library.uninstall()
    assert not written, f"{written} bytes were written after they had been freed"
