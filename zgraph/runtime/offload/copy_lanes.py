"""Copy lanes: asynchronous copies of whole tensors between a device's memory and the host's, one lane each way.

    compute         [mm][mm][mm]......[mm][mm]
    device_to_host   [=== a ===]                      a may be freed on the device once its copy has ended
    host_to_device              [=== a ===]           a may be read there again once it has come back

On CUDA a lane is a stream, and host memory is pinned. If the device is a CPU, a lane is a thread, and host memory is a
pool that is not used for compute: the copies are real, so that everything but their speed can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zgraph.runtime.disk.folder import DiskFolder, Read, Write
from zgraph.runtime.disk.folders import DiskFolders
from zgraph.runtime.offload.host_pool import HostPool
from zgraph.runtime.offload.pinned_pool import PinnedPool
from zgraph.runtime.offload.staging import PIECE_BYTES, Staging
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.modules import tree_flatten


class Copy(Protocol):
    """A copy that has been started."""

    def wait(self) -> Tensor:
        """The copied tensor, usable by all later compute of the caller.

        Raises:
            RuntimeError: the copy has failed.
        """
        ...


class CopyLanes(Protocol):
    """The two lanes of one device. Copies of one lane end in the order in which they were started.

    Copies from the device, copies over its tensors, and updates start after everything computed so far.
    """

    def offload(self, tensor: Tensor) -> Copy:
        """Start copying a device tensor to new host memory."""
        ...

    def reload(self, kept: Tensor) -> Copy:
        """Start copying a tensor on the host or on disk, whose own copy has been waited for, to new device memory."""
        ...

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        """Start copying a device tensor over one on the host or on disk."""
        ...

    def spill(self, tensor: Tensor, folder: str) -> Copy:
        """Start copying a device tensor to a new tensor on disk."""
        ...

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        """Start copying a host tensor over a device tensor."""
        ...

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Start an update of host tensors, after everything computed so far and after earlier updates.

        The host waits for its end. The caller must already have waited for copies that bring its inputs.
        """
        ...

    def drain(self) -> None:
        """Let the host wait for all started copies and updates, after which it may access the tensors stored there.

        For example after a program that failed, whose copies and updates go on.

        Raises:
            DiskError: on a GPU, a write failed that has not been waited for.
        """
        ...


@dataclass(frozen=True, slots=True)
class _InThread:
    source: Tensor  # kept alive until the copy is waited for
    copied: Tensor
    done: Future[None]

    def wait(self) -> Tensor:
        self.done.result()
        return self.copied


@dataclass(frozen=True, slots=True)
class _OnPaper:
    copied: Tensor

    def wait(self) -> Tensor:
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
        waits_at_once: whether to wait for each copy where it starts, as a baseline for overlapped copies.
        pool: the host memory.
        disks: folders that store tensors.
    """

    bytes_per_us: float | None = None
    waits_at_once: bool = False
    pool: HostPool = field(default_factory=HostPool)
    disks: DiskFolders = field(default_factory=DiskFolders)
    _updates: ThreadPoolExecutor = field(default_factory=lambda: _thread("update"))
    _out: ThreadPoolExecutor = field(default_factory=lambda: _thread("offload"))
    _back: ThreadPoolExecutor = field(default_factory=lambda: _thread("reload"))

    def offload(self, tensor: Tensor) -> Copy:
        return self._start(self._out, tensor.detach(), self.pool.empty_like(tensor))

    def reload(self, kept: Tensor) -> Copy:
        disk = self.disks.of(kept)
        return self._start(self._back, kept, torch.empty_like(kept)) if disk is None else disk.start_read(kept)

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        disk = self.disks.of(kept)
        if disk is None:
            return self._start(self._out, source.detach(), kept)
        return _Written(disk.start_write(source.detach(), kept), kept)

    def spill(self, tensor: Tensor, folder: str) -> Copy:
        disk, tensor = self.disks.at(folder), tensor.detach().contiguous()
        kept = disk.empty(tensor.shape, tensor.dtype, "new state")
        return _Written(disk.start_write(tensor, kept), kept)

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        return self._start(self._back, kept, tensor.detach())

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        return self._updates.submit(operator, *args, **kwargs)

    def drain(self) -> None:
        for lane in (self._updates, self._out, self._back):
            lane.submit(int).result()
        for folder in [*self.disks.by_path.values()]:
            folder.finish()

    @contextlib.contextmanager
    def limited(self, bytes_per_us: float) -> Generator[None]:
        """Let copies run at the rate of a slower link, for example to check predictions for it."""
        before, self.bytes_per_us = self.bytes_per_us, bytes_per_us
        try:
            yield
        finally:
            self.bytes_per_us = before

    def _start(self, lane: ThreadPoolExecutor, source: Tensor, copied: Tensor) -> Copy:
        if is_fake(source):
            # A fake mode keeps its kernels' flags in one place for all threads: a second thread would find them set.
            return _OnPaper(copied)
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


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"zgraph-{name}")


class _OnStream:
    """A copy on a stream; its source is kept alive until compute is ordered after it."""

    __slots__ = ("copied", "end", "lanes", "source")

    def __init__(self, source: Tensor, copied: Tensor, end: Any, lanes: StreamLanes) -> None:
        self.source, self.copied, self.lanes = source, copied, lanes
        self.end: Any = end

    def wait(self) -> Tensor:
        self._order_compute()
        return self.copied

    def __del__(self) -> None:
        """A failing program drops copies under way: their memory must still be freed only after they end."""
        self._order_compute()

    def _order_compute(self) -> None:
        end, self.end = self.end, None
        if end is not None:
            self.lanes.cuda.current_stream(self.lanes.device).wait_event(end)  # the host goes on


class _FromDisk:
    """A tensor on its way from a disk to the device: a thread reads it, and a stream copies it."""

    __slots__ = ("copied", "ends", "lanes", "read")

    def __init__(self, read: Read, copied: Tensor, ends: list[Any], lanes: StreamLanes) -> None:
        self.read, self.copied, self.ends, self.lanes = read, copied, ends, lanes

    def wait(self) -> Tensor:
        """Wait on the host for the disk, and on the compute stream for the copies.

        Raises:
            DiskError: the tensor could not be read.
        """
        try:
            self.read.wait()
        finally:
            self._order_compute()
        return self.copied

    def __del__(self) -> None:
        """A failing program drops it: its memory must still be freed only after the copies end."""
        with contextlib.suppress(Exception):
            self.read.wait()
        self._order_compute()

    def _order_compute(self) -> None:
        while self.ends:
            self.lanes.cuda.current_stream(self.lanes.device).wait_event(self.ends.pop())


@dataclass(frozen=True, slots=True)
class _ToDisk:
    """A tensor on its way to a disk; the writing thread keeps its source alive."""

    write: Write
    copied: Tensor
    lanes: StreamLanes

    def wait(self) -> Tensor:
        """Wait on the host until the whole tensor is in the file; then the source may be freed or overwritten.

        Raises:
            DiskError: the tensor could not be written.
        """
        self.lanes.writes.pop(self.write, None)
        self.write.wait()
        return self.copied


class StreamLanes:
    """Lanes of a CUDA device: a stream for each direction, pinned host memory, folders on disk, and an update thread.

    Device memory is allocated and freed on the compute stream. A copy begins once that stream has reached the point at
    which the copy was started; its source is held until the compute stream waits for its end, so it cannot be reused
    before. Host memory is freed by torch's pinned-memory allocator, which checks the streams that used it. A reload
    follows an earlier offload or store of its tensor because it waits for the compute stream, which has waited for
    that copy. An update's thread waits until the compute stream has reached the point at which the update was started;
    by then all copies that the stream has waited for have ended. The host itself waits only in `finish`, for updates,
    and for the disk.

    Tensors on disk pass through pinned memory of a bounded size, see `zgraph.runtime.offload.staging`. The disk's own
    threads start those copies as they read and write; transfers of one tensor keep their order there.

    Args:
        device: device of the copies.
        cuda: module with streams, which a test without a GPU replaces.
        piece_bytes: most bytes of a tensor that pass between a disk and the device in one piece.

    Attributes:
        disks: folders that store tensors.
        writes: writes to disks that have not been waited for.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, self.cuda, self.piece_bytes = device, cuda, piece_bytes
        self.pool, self.disks = PinnedPool(), DiskFolders()
        self.out, self.back = cuda.Stream(device), cuda.Stream(device)
        self.updates: Executor = _thread("update")
        self.writes: dict[Write, None] = {}
        self._staging = WeakKeyDictionary[DiskFolder, tuple[Staging, Staging]]()

    def offload(self, tensor: Tensor) -> Copy:
        return self._start(self.out, tensor.detach(), self.pinned_like(tensor))

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        disk = self.disks.of(kept)
        return self._start(self.out, source.detach(), kept) if disk is None else self._write(disk, source, kept)

    def reload(self, kept: Tensor) -> Copy:
        disk, target = self.disks.of(kept), torch.empty_like(kept, device=self.device)
        if disk is None:
            return self._start(self.back, kept, target)
        ends: list[Any] = []
        pieces = self.staging(disk)[0].to_device(target, self._reached(), ends)
        return _FromDisk(disk.start_read_in_pieces(kept, pieces), target, ends, self)

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        return self._start(self.back, kept, tensor.detach())

    def spill(self, tensor: Tensor, folder: str) -> Copy:
        if is_fake(tensor):
            return _OnPaper(tensor.new_empty(tensor.shape, device="cpu"))
        disk = self.disks.at(folder)
        return self._write(disk, tensor, disk.empty(tensor.shape, tensor.dtype, "new state"))

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        if any(isinstance(one, Tensor) and is_fake(one) for one in tree_flatten((args, kwargs))[0]):
            done = Future[Any]()  # a fake mode belongs to one thread
            done.set_result(operator(*args, **kwargs))
            return done
        reached = self._reached()

        def run() -> None:
            with self.cuda.device(self.device):  # a new thread's default is GPU 0, which may be another rank's
                reached.synchronize()
            operator(*args, **kwargs)

        return self.updates.submit(run)

    def finish(self) -> None:
        """Let the host wait for all copies, after which it may access the tensors stored there.

        Raises:
            DiskError: a write failed that has not been waited for.
        """
        while self.writes:
            write, _ = self.writes.popitem()
            write.wait()
        self.out.synchronize()
        self.back.synchronize()

    def drain(self) -> None:
        self.updates.submit(int).result()
        self.finish()

    def staging(self, disk: DiskFolder) -> tuple[Staging, Staging]:
        """The pinned memory through which tensors pass from a folder, and to it."""
        if disk not in self._staging:
            self._staging[disk] = self.staging_on(self.back), self.staging_on(self.out)
        return self._staging[disk]

    def staging_on(self, lane: Any) -> Staging:
        """Pinned memory, not yet allocated, for copies on one of the streams."""
        return Staging(self.device, lane, self.cuda, self._pinned, self.piece_bytes)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return self.pool.empty_like(tensor)

    def _pinned(self, nbytes: int) -> Tensor:
        return self.pinned_like(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def _reached(self) -> Any:
        """Event at the current end of the compute stream."""
        event = self.cuda.Event(blocking=True)  # a spinning thread would occupy a core that updates need
        event.record(self.cuda.current_stream(self.device))
        return event

    def _write(self, disk: DiskFolder, source: Tensor, kept: Tensor) -> Copy:
        pieces = self.staging(disk)[1].from_device(source.detach().contiguous(), self._reached())
        write = disk.start_write_in_pieces(pieces, kept)
        self.writes[write] = None
        return _ToDisk(write, kept, self)

    def _start(self, lane: Any, source: Tensor, copied: Tensor) -> Copy:
        if is_fake(source):
            return _OnPaper(copied)
        lane.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(lane):
            copied.copy_(source, non_blocking=True)
            return _OnStream(source, copied, lane.record_event(), self)


@functools.cache
def lanes_of(device: torch.device) -> CopyLanes:
    """The copy lanes of a device, made on first use."""
    return ThreadLanes() if device.type == "cpu" else StreamLanes(device)
