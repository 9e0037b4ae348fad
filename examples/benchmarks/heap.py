"""How many bytes this process has allocated, and the highest point they reach during a stretch of code.

On CPU every tensor comes from the C library's heap, whose own count is exact and sees all threads. torch.profiler's
memory events are not enough for distributed training: a buffer freed by a communication thread is never seen to go.
Python's small objects live elsewhere and do not disturb the count. Needs glibc 2.33 or later.
"""

import ctypes
import threading
from typing import Self

# Far shorter than a step; a buffer that lives for less can be missed.
_SAMPLING_PERIOD_S = 0.0003


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Heap:
    """The C library's count, in bytes.

    Raises:
        RuntimeError: the C library does not have it.
    """

    def __init__(self) -> None:
        # The library that is already loaded, so that it is this process's heap that is counted.
        library = ctypes.CDLL(None)
        if not hasattr(library, "mallinfo2"):
            raise RuntimeError("counting allocated bytes needs glibc 2.33 or later; this C library has no mallinfo2")
        self._mallinfo2 = library.mallinfo2
        self._mallinfo2.restype = _Mallinfo2

    def used_bytes(self) -> int:
        """Bytes in use: in the arenas, and in blocks large enough to be mapped on their own."""
        info = self._mallinfo2()
        return info.uordblks + info.hblkhd


class HeapPeak:
    """Samples the heap from a thread while the with-block runs; `rise_bytes` is the peak above where it began."""

    def __init__(self, heap: Heap) -> None:
        self.rise_bytes = 0
        self._heap = heap
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._start_bytes = self._heap.used_bytes()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLING_PERIOD_S):
            self.rise_bytes = max(self.rise_bytes, self._heap.used_bytes() - self._start_bytes)
