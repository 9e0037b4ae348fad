"""A judge of order among threads and streams: vector clocks, by which no two accesses may race.

Each thread and each stream is an actor with a clock. What a thread puts on a stream comes behind what the thread has
seen; events, and results of other threads, are what else orders actors. Two accesses of one buffer by two actors, of
which one writes, are a race unless one of them is behind the other, whatever ran first.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zgraph.tiers.host_pool import HostPool
from zgraph.tiers.staging import Staging
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.tiers.tier import Copy

COMPUTE, OUT, BACK = "compute", "out", "back"
PROGRAM = "MainThread"


class Clocks:
    """What each actor has seen of each other, and who has accessed what.

    Attributes:
        races: in words.
        looked: accesses that were judged.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self.looked = 0
        self._lock = threading.RLock()
        self._seen: dict[str, Counter[str]] = {}
        self._accesses: dict[int, list[tuple[str, int, bool]]] = {}

    def now(self, actor: str) -> Counter[str]:
        with self._lock:
            return self._seen.setdefault(actor, Counter()).copy()

    def join(self, actor: str, clock: Counter[str]) -> None:
        with self._lock:
            self._seen[actor] = self.now(actor) | clock

    def access(self, actor: str, tensor: Tensor, writes: bool) -> None:
        with self._lock:
            self.looked += 1
            seen = self._seen.setdefault(actor, Counter())
            seen[actor] += 1
            self._judge(actor, seen, self._accesses.setdefault(tensor.untyped_storage().data_ptr(), []), writes)
            self._accesses[tensor.untyped_storage().data_ptr()].append((actor, seen[actor], writes))

    def watch(self, tensor: Tensor) -> None:
        """Judge the end of a tensor's memory, too: who gets it next writes to it, in the order of compute.

        A copy that any thread has waited for has ended by then, whichever thread drops the last reference.
        """
        key = tensor.untyped_storage().data_ptr()

        def freed() -> None:
            with self._lock:
                known = self.now(COMPUTE)
                for thread in self._seen.keys() - {COMPUTE, OUT, BACK}:
                    known |= self._seen[thread]
                self._judge("what is allocated next", known, self._accesses.pop(key, []), True)

        weakref.finalize(tensor.untyped_storage(), freed).atexit = False

    def _judge(self, actor: str, seen: Counter[str], accesses: list[tuple[str, int, bool]], writes: bool) -> None:
        for other, moment, wrote in accesses:
            if other != actor and (writes or wrote) and seen[other] < moment:
                verbs = [("writes" if one else "reads") for one in (writes, wrote)]
                self.races.append(f"{actor} {verbs[0]} what {other} {verbs[1]}")


class ClockedStream:
    def __init__(self, clocks: Clocks, name: str) -> None:
        self.clocks, self.name = clocks, name

    def wait_stream(self, other: ClockedStream) -> None:
        self.clocks.join(self.name, self.clocks.now(other.name))

    def wait_event(self, event: ClockedEvent) -> None:
        self.clocks.join(self.name, event.clock)

    def record_event(self) -> ClockedEvent:
        event = ClockedEvent(self.clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.clocks.join(threading.current_thread().name, self.clocks.now(self.name))

    def run(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Access tensors as an operator does that this thread has put here."""
        self.clocks.join(self.name, self.clocks.now(threading.current_thread().name))
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.clocks.access(self.name, tensor, writing)


class ClockedEvent:
    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def record(self, stream: ClockedStream) -> None:
        self.clock = self.clocks.now(stream.name)

    def synchronize(self) -> None:
        self.clocks.join(threading.current_thread().name, self.clock)


class ClockedCuda:
    """In place of `torch.cuda`, for tensors of the CPU; copies are made at once."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.compute = ClockedStream(self.clocks, COMPUTE)
        self.names = iter((OUT, BACK))

    def Stream(self, device: torch.device) -> ClockedStream:
        return ClockedStream(self.clocks, next(self.names))

    def Event(self, *, blocking: bool) -> ClockedEvent:
        return ClockedEvent(self.clocks)

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: torch.device) -> ClockedStream:
        return self.compute

    def stream(self, lane: ClockedStream) -> _Copies:
        return _Copies(lane)


class _Copies(TorchFunctionMode):
    """Not a TorchDispatchMode, which a disk's thread could leave behind: see `lazy_streams`."""

    def __init__(self, lane: ClockedStream) -> None:
        super().__init__()
        self.lane = lane

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.lane.run(reads=[args[1]], writes=[args[0]])
        return func(*args, **(kwargs or {}))


class _Allocations(TorchDispatchMode):
    """Takes what is allocated for memory of the device, which compute may have been writing to until then."""

    def __init__(self, lanes: ClockedLanes) -> None:
        super().__init__()
        self.lanes = lanes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:
            self.lanes.compute(writes=[found])
            self.lanes.clocks.watch(found)
        return found


class _ClockedStaging(Staging):
    """Also sees what the disk's threads do with buffers between two copies."""

    clocks: Clocks

    def to_device(self, target: Tensor, reached: Any, ends: list[Any]) -> Generator[Tensor]:
        with contextlib.closing(super().to_device(target, reached, ends)) as pieces:
            for buffer in pieces:
                yield buffer
                self.clocks.access(threading.current_thread().name, buffer, True)

    def from_device(self, source: Tensor, reached: Any) -> Generator[Tensor]:
        with contextlib.closing(super().from_device(source, reached)) as pieces:
            for buffer in pieces:
                yield buffer
                self.clocks.access(threading.current_thread().name, buffer, False)


class ClockedLanes(StreamLanes):
    """The lanes of a GPU whose every access is judged; what a program computes it tells itself, by `compute`."""

    def __init__(self, piece_bytes: int) -> None:
        self.memory = HostPool()
        cuda = ClockedCuda()
        self.clocks, self.stream = cuda.clocks, cuda.compute
        super().__init__(torch.device("cpu"), cuda, piece_bytes)

    def compute(self, *, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        self.stream.run(reads, writes)

    def made(self, values: Tensor) -> Tensor:
        """Values that compute has made on the device."""
        self.compute(writes=[values])
        self.clocks.watch(values)
        return values

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return self.memory.empty_like(tensor)

    def reload(self, kept: Tensor) -> Copy:
        with _Allocations(self):
            return super().reload(kept)

    def staging_on(self, lane: Any) -> Staging:
        made = _ClockedStaging(self.device, lane, self.cuda, self._pinned, self.piece_bytes)
        made.clocks = self.clocks
        return made

    def stored(self, copy: Any) -> Tensor:
        """Wait for a store as the program does, which has then seen what the thread that wrote has."""
        clocks, ends = self.clocks, list[Counter[str]]()
        copy.write._future.add_done_callback(lambda _: ends.append(clocks.now("zgraph-disk-write-0_0")))
        kept = copy.wait()
        while not ends:  # the callback runs in the other thread, right behind
            time.sleep(0.001)
        clocks.join(PROGRAM, ends[0])
        return kept
