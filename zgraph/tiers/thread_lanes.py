"""Copy lanes of a CPU: threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.disk.folder import DiskFolder, Transfer
from zgraph.tiers.host_pool import HostPool
from zgraph.tiers.stores import HostMemory, Stores, allocated, copied_in, copied_out
from zgraph.tiers.tier import Copy
from zgraph.torch_compat.fake_values import is_fake


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A finished copy of a fake tensor."""

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
    write: Transfer[None]
    copied: Tensor

    def wait(self) -> Tensor:
        self.write.wait()
        return self.copied


class ThreadLanes:
    """Copy lanes of a CPU: a thread for each direction, an update thread, and the threads of disk folders.

    Attributes:
        pool: the host memory.
        stores: memory of every tier except the host.
    """

    def __init__(self) -> None:
        self.pool, self.stores = HostPool(), Stores()
        self.host = HostMemory(self.pool)
        self.updates, self.out, self.back = thread("update"), thread("offload"), thread("reload")

    def offload(self, tensor: Tensor) -> Copy:
        return self.to_host(tensor.detach(), self.stores.checked(self.pool.empty_like(tensor), "an activation"))

    def reload(self, kept: Tensor) -> Copy:
        return copied_in(self.stores.of(kept) or self.host, kept, self)

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        return copied_out(self.stores.of(kept) or self.host, source.detach(), kept, self)

    def spill(self, tensor: Tensor, key: str) -> Copy:
        store, tensor = self.stores.by_key[key], tensor.detach().contiguous()
        kept = self.stores.checked(allocated(store, tensor, "new state"), "new state", store)
        return copied_out(store, tensor, kept, self)

    def from_host(self, kept: Tensor) -> Copy:
        return self._start(self.back, kept, torch.empty_like(kept))

    def to_host(self, source: Tensor, kept: Tensor) -> Copy:
        return self._start(self.out, source, kept)

    def from_disk(self, disk: DiskFolder, kept: Tensor) -> Copy:
        return disk.start_read(kept)

    def to_disk(self, disk: DiskFolder, source: Tensor, kept: Tensor) -> Copy:
        return _Written(disk.start_write(source, kept), kept)

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        return self._start(self.back, kept, tensor.detach())

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        return self.updates.submit(operator, *args, **kwargs)

    def drain(self) -> None:
        for lane in (self.updates, self.out, self.back):
            lane.submit(int).result()
        for store in [*self.stores.by_key.values()]:
            store.finish()

    def _start(self, lane: ThreadPoolExecutor, source: Tensor, copied: Tensor) -> Copy:
        if is_fake(source):
            # A fake mode keeps its kernels' flags in one place for all threads: a second one would meet them set.
            return OnPaper(copied)
        return _InThread(source, copied, lane.submit(_copy, source, copied))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def thread(name: str) -> ThreadPoolExecutor:
    """Return an executor with one thread, which ends when the executor is freed."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"zgraph-{name}")
