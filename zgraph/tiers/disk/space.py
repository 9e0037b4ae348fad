"""One file per rank, cut into slots: a slot is reserved when a tensor is made, and freed when the tensor dies.

One file per tensor needs two descriptors for each tensor (the usual limit is 1024), and is no faster.
Slots are multiples of 4 KiB; a freed slot is reused for a tensor of the same size.
"""

from __future__ import annotations

import collections
import ctypes
import os
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zgraph.errors import DiskError
from zgraph.tiers.disk.place import free_bytes, open_anonymous
from zgraph.tiers.disk.system_calls import blocks, map_shared, punch_hole, unmap, view


@dataclass(eq=False)
class Slot:
    """The range of the file that holds one tensor, and the tensor's transfers under way.

    Attributes:
        name: name of the tensor, for errors.
        offset, nbytes: range in the file, without padding.
        address: memory address at which the range is mapped.
        error: error of a failed write, after which the slot's bytes cannot be trusted; None if there is none.
        writing, reading: transfers under way, for which later ones must wait.
    """

    name: str
    offset: int
    nbytes: int
    address: int
    error: DiskError | None = None
    writing: Future[Any] | None = None
    reading: list[Future[Any]] = field(default_factory=list[Future[Any]])

    @property
    def span(self) -> int:
        """Bytes of the slot on disk: `nbytes` rounded up to whole blocks."""
        return blocks(self.nbytes)


class Space:
    """An unnamed file, its slots and their mappings. Only one thread may allocate at a time.

    Attributes:
        fd: descriptor for buffered transfers.
        path: the folder, for errors.
        lost: error with which the kernel failed to write pages of the file; None: no such error so far.
    """

    def __init__(self, path: Path, who: str) -> None:
        self.fd = open_anonymous(path, who)
        self.path, self.who = path, who
        self.lost: OSError | None = None
        self._slots: dict[int, Slot] = {}  # by address
        self._end = 0
        self._freed: collections.deque[tuple[int, int]] = collections.deque()  # (span, offset) of reusable slots
        self._used_bytes = 0
        # Spans of dead tensors, not yet subtracted: their finalizers may nest, so they do not update the count.
        self._gone: collections.deque[int] = collections.deque()
        self._counting = threading.RLock()
        self._process = os.getpid()
        # The slots' finalizers keep a Space, and so its descriptor, alive until the last tensor is gone.
        weakref.finalize(self, os.close, self.fd)

    @property
    def used_bytes(self) -> int:
        """Bytes on disk, with padding to blocks."""
        with self._counting:
            while self._gone:
                self._used_bytes -= self._gone.popleft()
            return self._used_bytes

    def slot_at(self, address: int) -> Slot | None:
        """The slot whose mapping starts at an address."""
        return self._slots.get(address)

    def allocate(self, name: str, nbytes: int) -> tuple[Slot, ctypes.Array[ctypes.c_char]]:
        """Reserve and map a slot, and return it with its memory as an array.

        The slot is freed when the array dies; a tensor that torch.frombuffer made of the array keeps the array alive.

        Raises:
            DiskError: there is not enough space; nothing stays reserved.
        """
        span = blocks(nbytes)
        offset = self._find(span)
        try:
            os.posix_fallocate(self.fd, offset, span)
        except OSError as error:
            self._give_back(offset, span)
            raise self._no_space(name, span, error) from error
        try:
            address = map_shared(self.fd, offset, span)
        except OSError as error:
            self._give_back(offset, span)
            raise DiskError(
                f"{self.who}: {name} ({span} bytes in {self.path}) cannot be mapped: {error.strerror}; see "
                f"vm.max_map_count and ulimit -v"
            ) from error
        self._end = max(self._end, offset + span)
        slot = Slot(name, offset, nbytes, address)
        self._slots[address] = slot
        with self._counting:
            self._used_bytes += span
        array = view(address, max(1, nbytes))
        weakref.finalize(array, self._free, address, span, offset).atexit = False
        return slot, array

    def check(self, slot: Slot) -> None:
        """Raise a DiskError if the file has become too short for `slot`: access to the slot would kill the process."""
        size = os.fstat(self.fd).st_size
        if size < slot.offset + slot.span:
            raise DiskError(
                f"{self.who}: the file of {slot.name} in {self.path} was truncated to {size} bytes, and the tensor "
                f"is at {slot.offset} to {slot.offset + slot.span}; it is lost: resume from a checkpoint"
            )

    def _find(self, span: int) -> int:
        """Offset of a freed slot of `span` bytes; the end of the file if there is none."""
        for found in list(self._freed):  # finalizers add to it meanwhile
            if found[0] == span:
                self._freed.remove(found)
                return found[1]
        return self._end

    def _give_back(self, offset: int, span: int) -> None:
        if offset == self._end:
            os.ftruncate(self.fd, self._end)  # also frees space reserved beyond the file's size
        else:
            punch_hole(self.fd, offset, span)
            self._freed.append((span, offset))

    def _free(self, address: int, span: int, offset: int) -> None:
        # In a forked process only the child's tensor has died: the file is still the parent's.
        if os.getpid() != self._process:
            return
        del self._slots[address]  # before another mapping can get this address
        unmap(address, span)
        self._gone.append(span)
        punch_hole(self.fd, offset, span)
        self._freed.append((span, offset))

    def _no_space(self, name: str, span: int, error: OSError) -> DiskError:
        free = free_bytes(self.fd)
        lacking = f"{span - free} are lacking" if free < span else "a file size limit or a quota prevents it"
        return DiskError(
            f"{self.who}: no space for {name} in {self.path}: it needs {span} bytes in addition to the "
            f"{self.used_bytes} of the tensors stored there, {free} are free, {lacking} ({error.strerror}); free space "
            f"or give another path"
        )
