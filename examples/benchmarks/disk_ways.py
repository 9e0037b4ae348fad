"""Ways to move tensors between memory and disk in the background, for disk_io.py: zgraph's, and those of libraries.

Tensors are known by number. `read` and `write` start, and return what waits. Memory is a page-aligned uint8 tensor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zgraph.runtime.disk.folder import DiskFolder
from zgraph.runtime.disk.system_calls import drop_pages, view

Waiting = Callable[[], object]


class Way(Protocol):
    """Transfers of `count` tensors of `nbytes` each, in a folder of its own."""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None: ...

    def read(self, number: int, memory: Tensor) -> Waiting:
        """Start to read a tensor and return a function that waits until it is in memory."""
        ...

    def write(self, number: int, memory: Tensor) -> Waiting:
        """Start to write a tensor and return a function that waits until memory may be used again."""
        ...

    def drop(self) -> None:
        """Drop what the page cache has of its tensors, all of which has been written."""
        ...

    def close(self) -> None: ...


class OfZgraph:
    """DiskFolder: preadv and pwritev with O_DIRECT, a thread for each."""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.disk = DiskFolder(folder)
        self.tensors = [self.disk.empty((nbytes,), torch.uint8, str(number)) for number in range(count)]

    def read(self, number: int, memory: Tensor) -> Waiting:
        return self.disk.start_read(self.tensors[number], memory).wait

    def write(self, number: int, memory: Tensor) -> Waiting:
        return self.disk.start_write(memory, self.tensors[number]).wait

    def drop(self) -> None:
        for tensor in self.tensors:
            self.disk.drop_pages(tensor)

    def close(self) -> None:
        self.disk.close()


class InThreads:
    """What blocks, in one thread for reads and one for writes."""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        self.paths = [folder / str(number) for number in range(count)]
        self.nbytes = nbytes
        for path in self.paths:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        self.threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.prepare()

    def prepare(self) -> None: ...

    def read(self, number: int, memory: Tensor) -> Waiting:
        return self.threads[0].submit(self.read_now, number, memory).result

    def write(self, number: int, memory: Tensor) -> Waiting:
        return self.threads[1].submit(self.write_now, number, memory).result

    def read_now(self, number: int, memory: Tensor) -> None:
        raise NotImplementedError

    def write_now(self, number: int, memory: Tensor) -> None:
        raise NotImplementedError

    def addresses(self) -> list[int | None]:
        """Where the files are mapped."""
        return [None] * len(self.paths)

    def drop(self) -> None:
        for path, address in zip(self.paths, self.addresses(), strict=True):
            fd = os.open(path, os.O_RDWR)
            drop_pages(fd, 0, os.fstat(fd).st_size, address)
            os.close(fd)

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


def bytes_of(memory: Tensor) -> ctypes.Array[ctypes.c_char]:
    return view(memory.data_ptr(), memory.nbytes)


class Buffered(InThreads):
    """preadv and pwritev through the page cache."""

    def prepare(self) -> None:
        self.files = [os.open(path, os.O_RDWR) for path in self.paths]

    def read_now(self, number: int, memory: Tensor) -> None:
        os.preadv(self.files[number], [bytes_of(memory)], 0)

    def write_now(self, number: int, memory: Tensor) -> None:
        os.pwritev(self.files[number], [bytes_of(memory)], 0)


class FromFile(InThreads):
    """torch.from_file(shared=True), copied with copy_."""

    def prepare(self) -> None:
        self.mapped = [
            torch.from_file(str(path), shared=True, size=self.nbytes, dtype=torch.uint8) for path in self.paths
        ]

    def addresses(self) -> list[int | None]:
        return [tensor.data_ptr() for tensor in self.mapped]

    def read_now(self, number: int, memory: Tensor) -> None:
        memory.copy_(self.mapped[number])

    def write_now(self, number: int, memory: Tensor) -> None:
        self.mapped[number].copy_(memory)


class NumpyMemmap(InThreads):
    """numpy.memmap, which is the same mapping, copied by numpy."""

    def prepare(self) -> None:
        import numpy

        self.copy: Any = numpy.copyto
        self.arrays: list[Any] = [numpy.memmap(path, numpy.uint8, "r+", 0, (self.nbytes,)) for path in self.paths]

    def addresses(self) -> list[int | None]:
        return [array.ctypes.data for array in self.arrays]

    def read_now(self, number: int, memory: Tensor) -> None:
        self.copy(memory.numpy(), self.arrays[number])

    def write_now(self, number: int, memory: Tensor) -> None:
        self.copy(self.arrays[number], memory.numpy())


class Safetensors(InThreads):
    """safetensors.torch: load_file, copied into memory, and save_file."""

    def prepare(self) -> None:
        from safetensors.torch import load_file, save_file

        self.load, self.save = load_file, save_file
        for path in self.paths:
            save_file({"tensor": torch.zeros(self.nbytes, dtype=torch.uint8)}, path)

    def read_now(self, number: int, memory: Tensor) -> None:
        memory.copy_(self.load(self.paths[number])["tensor"])

    def write_now(self, number: int, memory: Tensor) -> None:
        self.save({"tensor": memory}, self.paths[number])


class Caio(InThreads):
    """caio, on which aiofile rests: Linux AIO; it takes and gives Python's bytes only, so that it is buffered."""

    def prepare(self) -> None:
        from caio import linux_aio  # pyright: ignore[reportMissingImports]

        self.aio: Any = linux_aio
        self.contexts: list[Any] = [linux_aio.Context(max_requests=4), linux_aio.Context(max_requests=4)]
        self.files = [os.open(path, os.O_RDWR) for path in self.paths]

    def read_now(self, number: int, memory: Tensor) -> None:
        operation = self.aio.Operation.read(self.nbytes, self.files[number], 0)
        self._do(self.contexts[0], operation)
        memory.copy_(torch.frombuffer(bytearray(operation.get_value()), dtype=torch.uint8))

    def write_now(self, number: int, memory: Tensor) -> None:
        self._do(self.contexts[1], self.aio.Operation.write(bytes(bytes_of(memory)), self.files[number], 0))

    def _do(self, context: Any, operation: Any) -> None:
        context.submit(operation)
        while context.process_events(1, 1, 1) == 0:
            pass


class TensorStore(InThreads):
    """tensorstore's KvStore on files: it has threads of its own, and takes and gives Python's bytes."""

    def prepare(self) -> None:
        import tensorstore  # pyright: ignore[reportMissingImports]

        place = {"driver": "file", "path": f"{self.paths[0].parent}/"}
        self.store: Any = tensorstore.KvStore.open(place).result()

    def read_now(self, number: int, memory: Tensor) -> None:
        memory.copy_(torch.frombuffer(bytearray(self.store.read(str(number)).result().value), dtype=torch.uint8))

    def write_now(self, number: int, memory: Tensor) -> None:
        self.store.write(str(number), bytes(bytes_of(memory))).result()


class IoUring(InThreads):
    """liburing: a ring for each thread; its binding takes bytes and bytearrays only, so that it is buffered."""

    def prepare(self) -> None:
        import liburing  # pyright: ignore[reportMissingImports]

        self.uring: Any = liburing
        self.rings: list[Any] = [liburing.Ring(), liburing.Ring()]
        for ring in self.rings:
            liburing.io_uring_queue_init(4, ring, 0)
        self.files = [os.open(path, os.O_RDWR) for path in self.paths]
        self.space = bytearray(self.nbytes)

    def read_now(self, number: int, memory: Tensor) -> None:
        self._do(self.rings[0], self.uring.io_uring_prep_read, self.files[number], self.space)
        memory.copy_(torch.frombuffer(self.space, dtype=torch.uint8))

    def write_now(self, number: int, memory: Tensor) -> None:
        self._do(self.rings[1], self.uring.io_uring_prep_write, self.files[number], bytes(bytes_of(memory)))

    def _do(self, ring: Any, prepare: Any, fd: int, buffer: Any) -> None:
        prepare(self.uring.io_uring_get_sqe(ring), fd, buffer, 0)
        self.uring.io_uring_submit(ring)
        done = self.uring.Cqe()
        self.uring.io_uring_wait_cqe(ring, done)
        moved = done[0].res
        self.uring.io_uring_cq_advance(ring, 1)
        assert moved == self.nbytes, moved


class DeepSpeedAio(InThreads):
    """DeepSpeed's aio_handle, on which ZeRO-Infinity and DeepNVMe rest: libaio with O_DIRECT and threads of its own."""

    def prepare(self) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]

        library: Any = AsyncIOBuilder().load(verbose=False)
        # Block and queue of DeepSpeed's documentation; "overlap_events" is its default, too.
        self.handles: list[Any] = [library.aio_handle(1 << 20, 128, False, True, 1) for _ in range(2)]

    def read(self, number: int, memory: Tensor) -> Waiting:
        self.handles[0].async_pread(memory, str(self.paths[number]), 0)
        return self.handles[0].wait

    def write(self, number: int, memory: Tensor) -> Waiting:
        self.handles[1].async_pwrite(memory, str(self.paths[number]), 0)
        return self.handles[1].wait

    def close(self) -> None:
        super().close()
        self.handles.clear()


class KvikIo(InThreads):
    """KvikIO without GPUDirect: POSIX reads and writes in its pool of threads."""

    def prepare(self) -> None:
        import rapids_logger  # pyright: ignore[reportMissingImports]

        rapids_logger.load_library()
        import kvikio  # pyright: ignore[reportMissingImports]

        self.files: list[Any] = [kvikio.CuFile(path, "r+") for path in self.paths]

    def read(self, number: int, memory: Tensor) -> Waiting:
        return self.files[number].pread(memory.numpy()).get

    def write(self, number: int, memory: Tensor) -> Waiting:
        return self.files[number].pwrite(memory.numpy()).get


WAYS: tuple[tuple[str, type[Way]], ...] = (
    ("zgraph", OfZgraph),
    ("preadv, pwritev, buffered", Buffered),
    ("torch.from_file", FromFile),
    ("numpy.memmap", NumpyMemmap),
    ("safetensors", Safetensors),
    ("caio (aiofile)", Caio),
    ("tensorstore", TensorStore),
    ("liburing", IoUring),
    ("DeepSpeed aio", DeepSpeedAio),
    ("KvikIO", KvikIo),
)
