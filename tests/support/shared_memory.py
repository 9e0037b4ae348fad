"""A tier of one's own: files in /dev/shm, whose copies run on a lane of theirs. Nothing in zgraph knows of it."""

from __future__ import annotations

import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.lanes import Lane
from zgraph.tiers.tier import Store, Tier

LANE = Lane("shared_memory")


@dataclass(frozen=True)
class Copied:
    done: Future[Tensor]

    def wait(self) -> Tensor:
        return self.done.result()


@dataclass(eq=False)
class SharedFiles:
    """The files of one rank."""

    begins: set[int] = field(default_factory=set[int])
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    copies: int = 0

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.begins

    def empty(self, like: Tensor, name: str) -> Tensor:
        if not like.numel():
            return torch.empty_like(like)
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
        self.begins.add(flat.data_ptr())
        # Memory of another kind can get the address.
        weakref.finalize(flat.untyped_storage(), self.begins.discard, flat.data_ptr()).atexit = False
        return flat.view(like.shape)

    def start_in(self, kept: Tensor, lanes: Any) -> Copied:
        return self._start(kept, torch.empty_like(kept))

    def start_out(self, source: Tensor, kept: Tensor, lanes: Any) -> Copied:
        return self._start(source, kept)

    def finish(self) -> None:
        self.thread.submit(int).result()

    def _start(self, source: Tensor, target: Tensor) -> Copied:
        self.copies += 1
        return Copied(self.thread.submit(target.copy_, source))


@dataclass(frozen=True, kw_only=True)
class SharedMemory(Tier):
    name: str = "shared memory"
    to_device: Lane | None = LANE
    from_device: Lane | None = LANE

    def open(self, lanes: Any, rank: int) -> Store:
        return SharedFiles()
