"""Copy lanes of a CPU: threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.disk.folder import DiskFolder, Write
from zgraph.tiers.host_pool import HostPool
from zgraph.tiers.stores import HostMemory, Stores, allocated, copied_in, copied_out
from zgraph.tiers.tier import Copy
from zgraph.torch_compat.fake_values import is_fake


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A copy of a fake tensor, one without values: there is nothing to wait for."""

    copied: Tensor

    def wait(self) -> Tensor:
        return self.copied


@dataclass(frozen=True, slots=True)
class _InThread:
    source: Tensor  # what a copy reads lives until it is waited for
    copied: Tensor
    done: Future[None]

    def wait(self) -> Tensor:
        self.done.result()
        return self.copied


@dataclass(frozen=True, slots=True)
class _Written:
    write: Write
    copied: Tensor

    def wait(self) -> Tensor:
        self.write.wait()
        return self.copied


@dataclass
class ThreadLanes:
    """Lanes of a CPU: a thread for each direction, the threads of folders on disk, and a thread for updates.

    Attributes:
        bytes_per_us: maximum rate of copies; None: unlimited.
        waits_at_once: whether to wait for each copy as soon as it starts, as a baseline for overlapped copies.
        pool: the host memory.
        stores: memory of every tier except the host.
    """

    bytes_per_us: float | None = None
    waits_at_once: bool = False
    pool: HostPool = field(default_factory=HostPool)
    stores: Stores = field(default_factory=Stores)
    _updates: ThreadPoolExecutor = field(default_factory=lambda: thread("update"))
    _out: ThreadPoolExecutor = field(default_factory=lambda: thread("offload"))
    _back: ThreadPoolExecutor = field(default_factory=lambda: thread("reload"))

    def __post_init__(self) -> None:
        self.host = HostMemory(self.pool)

    def offload(self, tensor: Tensor) -> Copy:
        return self.to_host(tensor.detach(), self.pool.empty_like(tensor))

    def reload(self, kept: Tensor) -> Copy:
        return copied_in(self.stores.of(kept) or self.host, kept, self)

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        return copied_out(self.stores.of(kept) or self.host, source.detach(), kept, self)

    def spill(self, tensor: Tensor, key: str) -> Copy:
        store, tensor = self.stores.by_key[key], tensor.detach().contiguous()
        return copied_out(store, tensor, allocated(store, tensor, "new state"), self)

    def from_host(self, kept: Tensor) -> Copy:
        return self._start(self._back, kept, torch.empty_like(kept))

    def to_host(self, source: Tensor, kept: Tensor) -> Copy:
        return self._start(self._out, source, kept)

    def from_disk(self, disk: DiskFolder, kept: Tensor) -> Copy:
        return disk.start_read(kept)

    def to_disk(self, disk: DiskFolder, source: Tensor, kept: Tensor) -> Copy:
        return _Written(disk.start_write(source, kept), kept)

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        return self._start(self._back, kept, tensor.detach())

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        return self._updates.submit(operator, *args, **kwargs)

    def drain(self) -> None:
        for lane in (self._updates, self._out, self._back):
            lane.submit(int).result()
        for store in [*self.stores.by_key.values()]:
            store.finish()

    @contextlib.contextmanager
    def limited(self, bytes_per_us: float) -> Generator[None]:
        """Limit the rate of copies inside a `with` block, for example to check predictions for a slower link."""
        before, self.bytes_per_us = self.bytes_per_us, bytes_per_us
        try:
            yield
        finally:
            self.bytes_per_us = before

    def _start(self, lane: ThreadPoolExecutor, source: Tensor, copied: Tensor) -> Copy:
        if is_fake(source):
            # A fake mode keeps its kernels' flags in one place for all threads: a second one would meet them set.
            return OnPaper(copied)
        copy = _InThread(source, copied, lane.submit(self._copy, source, copied))
        if self.waits_at_once:
            copy.wait()
        return copy

    def _copy(self, source: Tensor, target: Tensor) -> None:
        begin = time.perf_counter()
        target.copy_(source)
        if self.bytes_per_us is not None:
            end = begin + source.nbytes / self.bytes_per_us / 1e6
            time.sleep(max(0.0, end - time.perf_counter()))


def thread(name: str) -> ThreadPoolExecutor:
    """An executor with one thread; the thread ends when the executor dies."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"zgraph-{name}")
