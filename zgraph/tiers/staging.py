"""Staging: small pinned buffers through which tensors are copied between a disk and a GPU, piece by piece.

    disk        [read 1][read 2][read 3]              the thread that reads or writes files
    pinned       buffer A   B       A                 a buffer is reused after its copy, or its write, has ended
    GPU                 [copy 1][copy 2][copy 3]      a stream

Only copies of pinned memory overlap with compute on a GPU, and files can be read only into host memory. There are two
buffers for each direction: one is copied from or to the GPU while the other is read from or written to the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zgraph.tiers.disk.system_calls import blocks

BUFFERS = 2  # each way
PIECE_BYTES = 16 * 2**20  # a multiple of blocks; a disk is fast with requests of half this size

MOST_STAGING_BYTES = 2 * BUFFERS * PIECE_BYTES


def buffer_bytes(nbytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the bytes of a buffer for a transfer of `nbytes`: a power of two, at most `piece_bytes`.

    Blocks of torch's pinned-memory allocator are powers of two, too.
    """
    return min(piece_bytes, 1 << (blocks(nbytes) - 1).bit_length())


def staging_bytes(reads: Iterable[int], writes: Iterable[int], piece_bytes: int = PIECE_BYTES) -> int:
    """Return the bytes of pinned memory needed for transfers of these sizes.

    Args:
        reads: bytes of each tensor that is read from the disk.
        writes: bytes of each tensor that is written to the disk.
        piece_bytes: maximum size of a buffer.
    """
    each_way = (max(sizes, default=0) for sizes in (reads, writes))
    return sum(BUFFERS * buffer_bytes(largest, piece_bytes) for largest in each_way if largest)


class Staging:
    """Pinned buffers of one direction, used only by the thread that reads or writes the disk.

    Args:
        device: the GPU that tensors are copied from or to.
        lane: the stream on which the copies run.
        cuda: module with streams and events, such as `torch.cuda`.
        allocate: function that returns a 1-d pinned uint8 tensor of a number of bytes.
        piece_bytes: maximum size of a buffer.
    """

    def __init__(
        self, device: torch.device, lane: Any, cuda: Any, allocate: Callable[[int], Tensor], piece_bytes: int
    ) -> None:
        self.device, self.lane, self.cuda = device, lane, cuda
        self.allocate, self.piece_bytes = allocate, piece_bytes
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._ends: list[Any] = [None] * BUFFERS  # events after the copies that read or fill them
        self._turn = 0

    def to_device(self, target: Tensor, reached: Any, ends: list[Any]) -> Generator[Tensor]:
        """Yield pinned buffers, which the caller fills in order; each is then copied to its part of `target`.

        Args:
            target: contiguous tensor on the device.
            reached: event of the compute stream after which the memory of `target` may be overwritten.
            ends: list to which an event after the last copy is appended, even if the caller fails.
        """
        bytes_of_target = target.view(-1).view(torch.uint8)
        try:
            with self._on_device():
                self.lane.wait_event(reached)
            for begin, end in self._pieces(target.nbytes):
                with self._on_device():
                    turn, buffer = self._take(end - begin, target.nbytes)
                yield buffer
                with self._on_device(), torch.inference_mode(target.is_inference()), self.cuda.stream(self.lane):
                    bytes_of_target[begin:end].copy_(buffer, non_blocking=True)
                    self._ends[turn] = self._record()
        finally:
            with self._on_device():
                ends.append(self._record())

    def from_device(self, source: Tensor, reached: Any) -> Generator[Tensor]:
        """Yield pinned buffers with the parts of `source`, in order; the next part is copied at the same time.

        Args:
            source: contiguous tensor on the device.
            reached: event of the compute stream after which the source has its values.
        """
        with self._on_device():
            self.lane.wait_event(reached)
        bytes_of_source = source.view(-1).view(torch.uint8)
        copied: tuple[int, Tensor] | None = None
        for begin, end in self._pieces(source.nbytes):
            with self._on_device():
                turn, buffer = self._take(end - begin, source.nbytes)
                with self.cuda.stream(self.lane):
                    buffer.copy_(bytes_of_source[begin:end], non_blocking=True)
                    self._ends[turn] = self._record()
            if copied is not None:
                yield self._landed(*copied)
            copied = turn, buffer
        if copied is not None:
            yield self._landed(*copied)

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        return ((begin, min(begin + self.piece_bytes, nbytes)) for begin in range(0, nbytes, self.piece_bytes))

    def _take(self, nbytes: int, of: int) -> tuple[int, Tensor]:
        """Wait until the next buffer's last copy has ended; return the buffer's index and its first `nbytes` bytes.

        Args:
            nbytes: bytes of this piece.
            of: bytes of the whole transfer, which determine the size of a new buffer.
        """
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        if self._ends[turn] is not None:
            self._ends[turn].synchronize()
        buffer, size = self._buffers[turn], buffer_bytes(of, self.piece_bytes)
        if buffer is None or buffer.nbytes < size:
            self._buffers[turn] = buffer = None  # freed before the new one is allocated
            self._buffers[turn] = buffer = self.allocate(size)
        return turn, buffer[:nbytes]

    def _landed(self, turn: int, buffer: Tensor) -> Tensor:
        with self._on_device():
            self._ends[turn].synchronize()
        return buffer

    def _record(self) -> Any:
        event = self.cuda.Event(blocking=True)  # a spinning thread would occupy a core that compute needs
        event.record(self.lane)
        return event

    def _on_device(self) -> Any:
        return self.cuda.device(self.device)  # a new thread's default is GPU 0, which may be another rank's
