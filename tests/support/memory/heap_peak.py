"""The highest point of the heap over a stretch of code, looked at before and after every operator."""

from __future__ import annotations

from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

from examples.benchmarks.heap import Heap

WIDTH = 768  # a weight of WIDTH x WIDTH has 2.25 MiB
# gloo notes each collective, about 1 KiB, and its tables grow by 64 KiB at once: 300 KiB over some hundred of them.
SLACK_BYTES = 512 * 1024


class Peak(TorchDispatchMode):
    """`rise_bytes` is the peak above where the with-block began."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap()
        self.rise_bytes = 0

    def __enter__(self) -> Self:
        self.start_bytes = self.heap.used_bytes()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look()
        result = func(*args, **(kwargs or {}))
        self._look()
        return result

    def _look(self) -> None:
        self.rise_bytes = max(self.rise_bytes, self.heap.used_bytes() - self.start_bytes)
