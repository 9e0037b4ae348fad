"""Copy lanes of a CUDA device: streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zgraph.tiers.disk.folder import DiskFolder, Transfer
from zgraph.tiers.pinned_pool import PinnedPool
from zgraph.tiers.staging import PIECE_BYTES, Staging
from zgraph.tiers.stores import HostMemory, Stores, allocated, copied_in, copied_out
from zgraph.tiers.thread_lanes import OnPaper, thread
from zgraph.tiers.tier import Copy
from zgraph.torch_compat.fake_values import is_fake
from zgraph.torch_compat.modules import tree_flatten


class _OnStream:
    """A copy on a stream. The copy's source is kept alive until the compute stream waits for the copy."""

    __slots__ = ("copied", "end", "lanes", "source")

    def __init__(self, source: Tensor, copied: Tensor, end: Any, lanes: StreamLanes) -> None:
        self.source, self.copied, self.lanes = source, copied, lanes
        self.end: Any = end

    def wait(self) -> Tensor:
        self._order_compute()
        return self.copied

    def __del__(self) -> None:
        """Make the compute stream wait for the copy, if no caller has: the copy's memory must not be freed earlier."""
        self._order_compute()

    def _order_compute(self) -> None:
        end, self.end = self.end, None
        if end is not None:
            self.lanes.cuda.current_stream(self.lanes.device).wait_event(end)  # the host goes on


class _FromDisk:
    """A copy of a tensor from disk to the device: a thread reads the file, and a stream copies to the device."""

    __slots__ = ("copied", "ends", "lanes", "read")

    def __init__(self, read: Transfer[Tensor], copied: Tensor, ends: list[Any], lanes: StreamLanes) -> None:
        self.read, self.copied, self.ends, self.lanes = read, copied, ends, lanes

    def wait(self) -> Tensor:
        """Block until the file is read, make the compute stream wait for the copies, and return the new tensor.

        Raises:
            DiskError: the tensor could not be read.
        """
        try:
            self.read.wait()
        finally:
            self._order_compute()
        return self.copied

    def __del__(self) -> None:
        """Wait for the copies, if no caller has: the copies' memory must not be freed earlier."""
        with contextlib.suppress(Exception):
            self.read.wait()
        self._order_compute()

    def _order_compute(self) -> None:
        while self.ends:
            self.lanes.cuda.current_stream(self.lanes.device).wait_event(self.ends.pop())


@dataclass(frozen=True, slots=True)
class _ToDisk:
    """A copy of a tensor from the device to disk. The writing thread keeps the source alive."""

    write: Transfer[None]
    copied: Tensor
    lanes: StreamLanes

    def wait(self) -> Tensor:
        """Block until the whole tensor is in the file; then the source may be freed or overwritten.

        Raises:
            DiskError: the tensor could not be written.
        """
        self.lanes.writes.pop(self.write, None)
        self.write.wait()
        return self.copied


class StreamLanes:
    """Copy lanes of a CUDA device: a stream for each direction, an update thread, and the threads of disk folders.

    Order of operations:

    - Device memory is allocated and freed on the compute stream.
    - A copy begins after all compute that was queued before the copy was started.
    - A copy's source is kept until the compute stream waits for the copy, so its memory is not reused earlier.
    - Freed host memory is reused by torch's pinned-memory allocator after all streams that used it.
    - A reload runs after earlier offloads and stores of its tensor, because the compute stream has waited for these.
    - An update runs after all compute queued before the update, and after the copies that this compute has waited for.
    - The host blocks only in `finish`, for updates, and for the disk.

    Tensors on disk are copied through small pinned buffers, see `zgraph.tiers.staging`, by the threads of the disk
    folder, which keep the order of the transfers of each tensor.

    Args:
        device: device of the copies.
        cuda: module with streams and events, such as `torch.cuda`; a test without a GPU passes a replacement.
        piece_bytes: maximum size of a pinned buffer for the disk.

    Attributes:
        stores: memory of every tier except the host.
        writes: writes to disks that have not been waited for.
    """

    def __init__(self, device: torch.device, cuda: Any, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, self.cuda, self.piece_bytes = device, cuda, piece_bytes
        self.pool, self.stores = PinnedPool(), Stores()
        self.host = HostMemory(self.pool)
        self.out, self.back = cuda.Stream(device), cuda.Stream(device)
        self.updates: Executor = thread("update")
        self.writes: dict[Transfer[None], None] = {}
        self._staging = WeakKeyDictionary[DiskFolder, tuple[Staging, Staging]]()

    def offload(self, tensor: Tensor) -> Copy:
        return self.to_host(tensor.detach(), self.stores.checked(self.pinned_like(tensor), "an activation"))

    def store(self, source: Tensor, kept: Tensor) -> Copy:
        return copied_out(self.stores.of(kept) or self.host, source.detach(), kept, self)

    def reload(self, kept: Tensor) -> Copy:
        return copied_in(self.stores.of(kept) or self.host, kept, self)

    def from_host(self, kept: Tensor) -> Copy:
        return self._start(self.back, kept, torch.empty_like(kept, device=self.device))

    def to_host(self, source: Tensor, kept: Tensor) -> Copy:
        return self._start(self.out, source, kept)

    def from_disk(self, disk: DiskFolder, kept: Tensor) -> Copy:
        target = torch.empty_like(kept, device=self.device)
        ends: list[Any] = []
        pieces = self.staging(disk)[0].to_device(target, self._reached(), ends)
        return _FromDisk(disk.start_read_in_pieces(kept, pieces), target, ends, self)

    def to_disk(self, disk: DiskFolder, source: Tensor, kept: Tensor) -> Copy:
        pieces = self.staging(disk)[1].from_device(source.contiguous(), self._reached())
        write = disk.start_write_in_pieces(pieces, kept)
        self.writes[write] = None
        return _ToDisk(write, kept, self)

    def give_back(self, kept: Tensor, tensor: Tensor) -> Copy:
        return self._start(self.back, kept, tensor.detach())

    def spill(self, tensor: Tensor, key: str) -> Copy:
        if is_fake(tensor):
            return OnPaper(tensor.new_empty(tensor.shape, device="cpu"))
        store = self.stores.by_key[key]
        kept = self.stores.checked(allocated(store, tensor, "new state"), "new state", store)
        return copied_out(store, tensor.detach(), kept, self)

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        if any(isinstance(one, Tensor) and is_fake(one) for one in tree_flatten((args, kwargs))[0]):
            done = Future[Any]()  # a fake mode is of one thread
            done.set_result(operator(*args, **kwargs))
            return done
        reached = self._reached()

        def run() -> None:
            with self.cuda.device(self.device):  # a thread's own is the first GPU, which may be another rank's
                reached.synchronize()
            operator(*args, **kwargs)

        return self.updates.submit(run)

    def finish(self) -> None:
        """Block until all copies have ended; host tensors can then be read and written.

        Raises:
            DiskError: a write to disk has failed and was not waited for earlier.
        """
        while self.writes:
            write, _ = self.writes.popitem()
            write.wait()
        self.out.synchronize()
        self.back.synchronize()

    def drain(self) -> None:
        self.updates.submit(int).result()
        self.finish()
        for store in [*self.stores.by_key.values()]:
            store.finish()

    def staging(self, disk: DiskFolder) -> tuple[Staging, Staging]:
        """Return the pinned buffers for a disk folder: for reads, and for writes."""
        if disk not in self._staging:
            self._staging[disk] = self.staging_on(self.back), self.staging_on(self.out)
        return self._staging[disk]

    def staging_on(self, lane: Any) -> Staging:
        """Return new pinned buffers for copies on one stream; their memory is allocated on first use."""
        return Staging(self.device, lane, self.cuda, self._pinned, self.piece_bytes)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return self.pool.empty_like(tensor)

    def _pinned(self, nbytes: int) -> Tensor:
        return self.pinned_like(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def _reached(self) -> Any:
        """Return an event recorded at the present end of the compute stream."""
        event = self.cuda.Event(blocking=True)  # a thread that spins would take the core of one that updates
        event.record(self.cuda.current_stream(self.device))
        return event

    def _start(self, lane: Any, source: Tensor, copied: Tensor) -> Copy:
        if is_fake(source):
            return OnPaper(copied)
        lane.wait_stream(self.cuda.current_stream(self.device))
        with self.cuda.stream(lane):
            copied.copy_(source, non_blocking=True)
            return _OnStream(source, copied, lane.record_event(), self)
