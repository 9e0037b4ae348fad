"""Tensors on disk: mapped into memory, and read and written in the background during compute.

    disk = DiskFolder("/nvme/scratch", rank)
    moment = disk.empty((4096, 4096), torch.float32, "layers.0.weight.exp_avg")   # a CPU tensor over a mapped file
    reading = disk.start_read(moment)                                             # starts; compute meanwhile
    values = reading.wait()                                                       # in memory
    disk.start_write(values.mul_(0.9), moment).wait()

A few threads read (preadv), one writes (pwritev), and one reads the second halves of large reads, which run one by
one. Transfers of large tensors bypass the page cache; small tensors stay in it. DeepSpeed's aio bypasses the page
cache, too, but reserves no space and keeps no order.

Rule: from `start_read` or `start_write` until the end of `wait`, do not access the tensor through its mapping, nor the
buffer that is being filled or written. Transfers of one tensor keep their order: its mapping and later transfers see
everything that earlier transfers have written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zgraph.errors import DiskError, ZgraphWarning
from zgraph.tiers.disk.access import open_access
from zgraph.tiers.disk.place import filesystem_of
from zgraph.tiers.disk.space import Slot, Space
from zgraph.tiers.disk.transfer import Mover, Part

READERS = 4  # concurrent reads of small tensors, such as codes: a disk idles between single requests

Result = TypeVar("Result")


class Transfer(Generic[Result]):
    """A read or a write under way."""

    def __init__(self, future: Future[Result | DiskError]) -> None:
        self._future = future

    def wait(self) -> Result:
        """Wait for the end, and return the buffer that was read.

        Afterwards the bytes of a write are in the file, but not synced: the file does not outlive the process.

        Raises:
            DiskError: the transfer failed, or it is a read and an earlier write of this tensor failed.
        """
        found = self._future.result()
        if isinstance(found, DiskError):
            raise found
        return found


class DiskFolder:
    """Tensors of one rank in an unnamed file in the user's folder.

    The file disappears with the process, however the process ends: a run leaves nothing in the folder. Several ranks
    and runs may use the same folder concurrently. A forked process can access the tensors, but start no transfers.

    Args:
        path: a folder on a disk with enough space; it is made if only the last part of the path is missing.
        rank: rank to name in errors.

    Raises:
        DiskError: the folder cannot be made, is not a directory or not writable, or its disk is full.

    Warns:
        ZgraphWarning: the folder is in memory (tmpfs or ramfs), not on a disk.
    """

    def __init__(self, path: str, rank: int) -> None:
        if sys.platform != "linux":
            raise DiskError(f"DiskFolder: tensors on disk need Linux; this is {sys.platform}: keep them in memory")
        self._who = f"DiskFolder of rank {rank}"
        self._space = Space(Path(path), self._who)
        self._access = open_access(self._space)
        if filesystem_of(self._space.fd) in ("tmpfs", "ramfs"):
            text = f"{self._who}: {path} is in memory (tmpfs), so that nothing is saved; give a folder on a disk"
            warnings.warn(text, ZgraphWarning, stacklevel=2)
        self._reads = Mover(self._space, self._access)
        self._writes = Mover(self._space, self._access)
        self._reader = ThreadPoolExecutor(READERS, f"zgraph-disk-read-{rank}")
        self._piece_reader = ThreadPoolExecutor(1, f"zgraph-disk-pieces-{rank}")  # buffers of pieces are of one thread
        self._writer = ThreadPoolExecutor(1, f"zgraph-disk-write-{rank}")
        self._process = os.getpid()
        # Held while a transfer is submitted, so that both workers see one order; and by a transfer's done callback,
        # which runs inside the submission if the transfer has already ended.
        self._lock = threading.RLock()
        self._under_way: dict[Future[Any], None] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
        """Make a contiguous CPU tensor whose storage is a mapped range of the file, with its disk space reserved.

        Optimizers, `state_dict` and checkpoints treat it as an ordinary tensor; copies of it are in memory. The disk
        space is freed when the tensor's storage dies.

        Args:
            shape: any shape, including () and shapes with zeros.
            dtype: any dtype.
            name: name of the parameter or state, for errors.

        Raises:
            DiskError: there is not enough space; the message says how many bytes are lacking. Nothing stays reserved.
        """
        plan = torch.empty(tuple(shape), dtype=dtype, device="meta")
        with self._lock:
            self._check_process("empty")
            _, array = self._space.allocate(name, plan.numel() * plan.itemsize)
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, plan.shape, plan.stride())

    def is_on_disk(self, tensor: Tensor) -> bool:
        """Whether a tensor, or the tensor that it is a view of, was made by `empty` of this folder."""
        return self._slot(tensor) is not None

    def start_read(self, tensor: Tensor) -> Transfer[Tensor]:
        """Start reading a tensor of this folder into new memory, after all started writes of the tensor.

        Every started read holds memory for its result; up to 128 MiB of earlier results are kept for reuse.

        Args:
            tensor: a tensor made by `empty`, or a contiguous view; a view that starts at a multiple of 4 KiB is read
                as fast as a whole tensor.

        Raises:
            DiskError: this process was forked from the folder's. Later errors are raised by `Transfer.wait`.
            ValueError: the tensor is not one of this folder, or not contiguous.
        """
        part = self._part("start_read", tensor)

        def read() -> Tensor:
            memory = self._access.buffer(part.nbytes)  # aligned: nothing is copied on the way
            self._reads.read(part, memory.data_ptr(), _room_in(memory))
            return memory.view(tensor.dtype).view(tensor.shape)

        return Transfer(self._start_reading(self._reader, "start_read", part, read))

    def start_read_in_pieces(self, tensor: Tensor, pieces: Generator[Tensor]) -> Transfer[Tensor]:
        """Start reading a tensor of this folder that does not fit into memory: into one buffer after the other.

        Args:
            tensor: as for `start_read`; `Transfer.wait` returns this tensor itself.
            pieces: generator of the buffers: flat uint8 CPU tensors that together have the tensor's size. The reading
                thread fills a buffer, then fetches the next one. `Transfer.wait` raises the generator's errors. The
                generator is closed at the end, even if the read fails.

        Raises:
            DiskError: this process was forked from the folder's. Later errors are raised by `Transfer.wait`.
            ValueError: the tensor is not one of this folder, or not contiguous.
        """
        part = self._part("start_read_in_pieces", tensor)

        def read() -> Tensor:
            with contextlib.closing(pieces):
                for piece, buffer in _pieces_of(part, pieces):
                    self._reads.read(piece, buffer.data_ptr(), _room_in(buffer))
            return tensor

        return Transfer(self._start_reading(self._piece_reader, "start_read_in_pieces", part, read))

    def start_write(self, source: Tensor, tensor: Tensor) -> Transfer[None]:
        """Start writing to a tensor of this folder, after all started transfers of the tensor.

        If a failed write is not waited for, the next read of the tensor raises the write's error.

        Args:
            source: contiguous CPU tensor of the shape and dtype of `tensor`; kept alive until it is written.
            tensor: the tensor to overwrite, as for `start_read`.

        Raises:
            DiskError: this process was forked from the folder's. Later errors are raised by `Transfer.wait`.
            ValueError: `tensor` is not a contiguous tensor of this folder, or `source` does not match it.
        """
        part = self._part("start_write", tensor)
        _check_source(source, tensor)
        return self._start_writing("start_write", part, tensor, lambda: self._writes.write(part, source.data_ptr()))

    def start_write_in_pieces(self, pieces: Generator[Tensor], tensor: Tensor) -> Transfer[None]:
        """Start writing one buffer after the other to a tensor of this folder, after its started transfers.

        Args:
            pieces: generator of the buffers, as for `start_read_in_pieces`; the next buffer is fetched once one has
                been written.
            tensor: the tensor to overwrite, as for `start_read`.

        Raises:
            DiskError: this process was forked from the folder's. Later errors are raised by `Transfer.wait`.
            ValueError: the tensor is not one of this folder, or not contiguous.
        """
        part = self._part("start_write_in_pieces", tensor)

        def write() -> None:
            with contextlib.closing(pieces):
                for piece, buffer in _pieces_of(part, pieces):
                    self._writes.write(piece, buffer.data_ptr())

        return self._start_writing("start_write_in_pieces", part, tensor, write)

    def finish(self) -> None:
        """Wait for all started transfers. Raise none of their errors: `Transfer.wait` still does that."""
        with self._lock:
            ends = [*self._under_way, self._writer.submit(int)]  # by then the writer has let go of what it wrote
        wait(ends)

    def _start_reading(
        self, threads: ThreadPoolExecutor, doing: str, part: Part, job: Callable[[], Result]
    ) -> Future[Result | DiskError]:
        slot = part.slot

        def run() -> Result | DiskError:
            if before is not None:
                wait([before])
            if slot.error is not None:
                return DiskError(
                    f"{self._who}: {doing} of {slot.name}: its last write failed, so that its bytes cannot be trusted; "
                    f"write it again, or resume from a checkpoint ({slot.error})"
                )
            try:
                return job()
            except DiskError as error:
                return _without_frames(error)

        with self._lock:
            self._check_process(doing)
            before = slot.writing
            future = threads.submit(run)
            slot.reading.append(future)
            self._under_way[future] = None
            future.add_done_callback(lambda future: self._have_read(slot, future))
        return future

    def _start_writing(self, doing: str, part: Part, tensor: Tensor, job: Callable[[], None]) -> Transfer[None]:
        slot = part.slot

        def write(kept_alive: Tensor) -> DiskError | None:
            wait(before)
            try:
                job()
            except DiskError as error:
                slot.error = _without_frames(error)
                return slot.error
            except BaseException as error:  # raised by the generator of pieces
                slot.error = DiskError(f"{self._who}: {doing} of {slot.name} was given up: {error}")
                raise
            if part.nbytes == slot.nbytes:
                slot.error = None

        with self._lock:
            self._check_process(doing)
            before = [*slot.reading]
            future = slot.writing = self._writer.submit(write, tensor)
            self._under_way[future] = None
            future.add_done_callback(lambda future: self._have_written(slot, future))
        return Transfer(future)

    def _have_read(self, slot: Slot, future: Future[Any]) -> None:
        with self._lock:
            slot.reading.remove(future)
            del self._under_way[future]

    def _have_written(self, slot: Slot, future: Future[None]) -> None:
        with self._lock:
            del self._under_way[future]
            if slot.writing is future:
                slot.writing = None

    def _slot(self, tensor: Tensor) -> Slot | None:
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # a fake tensor's is "meta"
            return None
        try:
            return self._space.slot_at(storage.data_ptr())
        except RuntimeError:  # a DTensor's storage has no address; only its local part can be on disk
            return None

    def _part(self, doing: str, tensor: Tensor) -> Part:
        slot = self._slot(tensor)
        if slot is None:
            raise ValueError(
                f"{doing}: a tensor of shape {list(tensor.shape)} on {tensor.device} is not stored in "
                f"{self._space.path}; give one that `empty` of this folder made, or a view, not a copy"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{doing}: a view of {slot.name} with shape {list(tensor.shape)} and strides {tensor.stride()} is not "
                f"contiguous; transfer the whole tensor"
            )
        return Part(slot, int(tensor.storage_offset()) * tensor.itemsize, tensor.numel() * tensor.itemsize)

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._process:
            raise DiskError(
                f"{self._who}: {doing} in process {os.getpid()}, which was forked from the folder's process "
                f"{self._process}; make a folder in each process"
            )


def _room_in(memory: Tensor) -> int:
    """Bytes from the start of a uint8 tensor to the end of its storage."""
    return int(memory.untyped_storage().nbytes() - memory.storage_offset())


def _pieces_of(part: Part, buffers: Iterable[Tensor]) -> Iterator[tuple[Part, Tensor]]:
    """Yield (part of the tensor, buffer) for each buffer: the parts are consecutive, each as long as its buffer."""
    done = 0
    for buffer in buffers:
        yield Part(part.slot, part.start + done, buffer.nbytes), buffer
        done += buffer.nbytes
    assert done == part.nbytes, f"pieces have {done} bytes, and {part.slot.name} {part.nbytes}"


def _check_source(source: Tensor, tensor: Tensor) -> None:
    expected, found = (tensor.shape, tensor.dtype), (source.shape, source.dtype)
    if expected != found or source.device.type != "cpu" or not source.is_contiguous():
        layout = "contiguous" if source.is_contiguous() else f"strides {source.stride()}"
        raise ValueError(
            f"start_write: source must be a contiguous CPU tensor of shape {list(tensor.shape)} and {tensor.dtype}; "
            f"got {list(source.shape)} and {source.dtype} on {source.device}, {layout}"
        )


def _without_frames(error: DiskError) -> DiskError:
    """Drop an error's traceback, whose frames would keep tensors alive as long as the error."""
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None
    return error.with_traceback(None)
