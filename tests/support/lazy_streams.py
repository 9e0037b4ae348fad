"""Streams of a GPU that is not there, which copy as late as they may.

They notice memory that was freed too early, and memory that was read before anything was copied there.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zgraph.codegen import lower_fx
from zgraph.passes.memory import stream_states
from zgraph.tiers import copy_lanes
from zgraph.tiers.disk.system_calls import BLOCK
from zgraph.tiers.host_pool import HostPool
from zgraph.tiers.staging import PIECE_BYTES
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.tiers.thread_lanes import ThreadLanes
from zgraph.torch_compat.operators import written_tensors

_NOBODY_KNOWS = 255  # in each byte; in every floating dtype a NaN, but neither torch.nan nor the one of 0 / 0


@dataclass(frozen=True)
class _Late:
    """A copy that is due. It keeps neither of its tensors alive."""

    source: tuple[Any, Any, torch.dtype]
    target: tuple[Any, Any, torch.dtype]

    @classmethod
    def of(cls, target: Tensor, source: Tensor) -> _Late:
        # Until it has arrived nobody knows what is there.
        forget(target)
        return cls(_remembered(source), _remembered(target))

    def read(self) -> tuple[Tensor, Callable[[], None]] | None:
        """Copy from the source; returns the values and a function that puts them into the target.

        None if one of the two tensors was gone.
        """
        source, target = _found(*self.source), _found(*self.target)
        if source is None or target is None:
            return None
        values = source.clone()

        def land() -> None:
            target = _found(*self.target)
            if target is not None:
                target.copy_(values)

        return values, land


def forget(tensor: Tensor) -> None:
    """Fill memory in such a way that `is_forgotten` tells it from all values that a program computes."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.numel():
        _bytes_of(tensor).fill_(_NOBODY_KNOWS)


def is_forgotten(values: Tensor) -> bool:
    """Return whether these values are what `forget` has left; bytes are taken for those of floats.

    False for other integers and bools, which may be -1 and True.
    """
    if not values.numel() or not (values.is_floating_point() or values.dtype == torch.uint8):
        return False
    return bool((_bytes_of(values) == _NOBODY_KNOWS).all())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().unsqueeze(-1).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class _Landing:
    """A copy to the host that it does not see yet.

    Attributes:
        storage: reference to what is copied to.
        address: where that is in memory, which another storage may share.
        land: puts the values there.
        number: place among the copies of its stream.
    """

    storage: Any
    address: int
    land: Callable[[], None]
    number: int


def _remembered(tensor: Tensor) -> tuple[Any, Any, torch.dtype]:
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    return weakref.ref(tensor.untyped_storage()), layout, tensor.dtype


def _address_of(reference: Any) -> int:
    """Return the address of a storage; 0 if it is gone."""
    storage = reference()
    return 0 if storage is None else storage.data_ptr()


def _found(reference: Any, layout: Any, dtype: torch.dtype) -> Tensor | None:
    storage = reference()
    return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *layout)


class LazyStream:
    """A queue of copies, which run when the program, or the host, waits for them.

    What has been copied to the host is seen by other copies, and by the host once that has waited. Threads of a disk
    put copies on it, too.
    """

    def __init__(self, cuda: LazyCuda, *, to_host: bool = False) -> None:
        self.cuda, self.to_host = cuda, to_host
        self.due: list[_Late] = []
        self.begun = self.done = 0

    def wait_stream(self, other: LazyStream) -> None:
        assert other is self.cuda.compute and not other.due, "compute runs at once"

    def record_event(self) -> tuple[LazyStream, int]:
        return self, self.begun

    def wait_event(self, event: tuple[LazyStream, int] | LazyEvent) -> None:
        if isinstance(event, LazyEvent):
            event = event.stream, event.until
        lane, until = event
        assert self is self.cuda.compute or lane is self.cuda.compute, "lanes do not wait for each other"
        lane.run(until)

    def synchronize(self) -> None:
        self.cuda.host_waits += 1
        self.run(self.begun)
        self.cuda.land()

    def put(self, target: Tensor, source: Tensor) -> None:
        with self.cuda.lock:
            self.due.append(_Late.of(target, source))
            self.begun += 1

    def run(self, until: int) -> None:
        with self.cuda.lock:
            while self.done < until:
                # Counted at once: a finalizer may run copies in between.
                copy, number = self.due.pop(0), self.done
                self.done += 1
                if not self.to_host:
                    self.cuda.land(of=_address_of(copy.source[0]))
                found = copy.read()
                if found is None:
                    self.cuda.freed.append(number)
                    continue
                values, land = found
                if is_forgotten(values):
                    self.cuda.unwritten.append(number)
                if self.to_host:
                    target = copy.target[0]
                    self.cuda.landing.append(_Landing(target, _address_of(target), land, number))
                else:
                    land()


class LazyEvent:
    """Where a stream was when it was recorded: behind its copies; compute, behind those that it has waited for."""

    def record(self, stream: LazyStream) -> None:
        self.stream, self.until = stream, stream.begun
        with stream.cuda.lock:
            self.waited = list(stream.cuda.landing) if stream is stream.cuda.compute else None

    def synchronize(self) -> None:
        cuda = self.stream.cuda
        with cuda.lock:
            self.stream.run(self.until)
            # Whoever ran them: the program may have waited for what a thread of a disk has put here.
            reached = [one for one in cuda.landing if self.stream.to_host and one.number < self.until]
            for one in reached if self.waited is None else self.waited:
                cuda.land(one)


class LateUpdates(Executor):
    """A thread that begins when somebody waits for it."""

    def __init__(self) -> None:
        self.due: list[tuple[LateUpdate, Callable[[], None]]] = []
        self.done = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.due.append((LateUpdate(self), fn))
        return self.due[-1][0]

    def run(self, until: LateUpdate) -> None:
        while any(one is until for one, _ in self.due):
            _, update = self.due.pop(0)
            update()
            self.done += 1


@dataclass(frozen=True, eq=False)
class LateUpdate:
    """What `LateUpdates.submit` returns."""

    thread: LateUpdates

    def result(self) -> None:
        self.thread.run(self)


@dataclass(eq=False)
class LazyCuda:
    """In place of `torch.cuda`, for tensors of the CPU.

    Attributes:
        compute: what the program runs on.
        lanes: the streams that were made.
        freed: numbers of copies of which a tensor was gone when they ran.
        unwritten: numbers of copies that read memory before anything was copied there.
        landing: copies to the host that it does not see yet.
        host_waits: how often the host has waited for a stream.
    """

    lanes: list[LazyStream] = field(default_factory=list[LazyStream])
    freed: list[int] = field(default_factory=list[int])
    unwritten: list[int] = field(default_factory=list[int])
    landing: list[_Landing] = field(default_factory=list[_Landing])
    host_waits: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.compute = LazyStream(self)

    def Stream(self, device: torch.device) -> LazyStream:
        self.lanes.append(LazyStream(self, to_host=not self.lanes))
        return self.lanes[-1]

    def land(self, only: _Landing | None = None, *, of: int | None = None) -> None:
        """Let the host see what has been copied there: all, one copy, or those into the storage at an address."""
        with self.lock:
            for one in [*self.landing]:
                if (only is None or one is only) and (of is None or one.address == of):
                    one.land()
                    self.landing.remove(one)

    def Event(self, *, blocking: bool) -> LazyEvent:
        assert blocking
        return LazyEvent()

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device: torch.device) -> LazyStream:
        return self.compute

    def stream(self, lane: LazyStream) -> _Taking:
        return _Taking(lane)


class _Taking(TorchFunctionMode):
    """Puts copies on a lane.

    Not a TorchDispatchMode: torch keeps whether it is in one for all threads, and each thread restores what it found.
    One that a disk's thread leaves while another thread traces would stay on, and nothing would be compiled any more.
    """

    def __init__(self, lane: LazyStream) -> None:
        super().__init__()
        self.lane = lane

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        self.lane.put(args[0], args[1])
        return args[0]


class LazyLanes(StreamLanes):
    """The lanes of a GPU, on such streams and with the host memory of a CPU.

    Args:
        piece_bytes: as of `StreamLanes`.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        self.lazy = LazyCuda()
        self.memory = HostPool()
        super().__init__(torch.device("cpu"), self.lazy, piece_bytes)
        self.updates = self.late = LateUpdates()

    def update(self, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What is updated has no values until it is waited for."""
        landing = [one.storage() for one in self.lazy.landing]  # nobody has seen what is there
        found = written_tensors(cast(Any, operator), args, kwargs)
        written = [one for one in found if not any(one.untyped_storage() is storage for storage in landing)]
        before = [tensor.clone() for tensor in written]
        for tensor in written:
            forget(tensor)

        def late(*args: Any, **kwargs: Any) -> None:
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
            operator(*args, **kwargs)

        return super().update(late, args, kwargs)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return self.memory.empty_like(tensor)

    @property
    def copies(self) -> tuple[int, int]:
        """How many copies have ended, from the device and to it."""
        return self.out.done, self.back.done


@contextlib.contextmanager
def late_gpu() -> Generator[LazyLanes]:
    """Let graphs that are compiled meanwhile be for a GPU with such streams; a disk's tensors pass in small pieces."""
    lanes, here = LazyLanes(piece_bytes=BLOCK), copy_lanes.lanes_of(torch.device("cpu"))
    assert isinstance(here, ThreadLanes)
    lanes.stores = here.stores
    with (
        mock.patch.object(lower_fx, "lanes_of", lambda device: lanes),
        mock.patch.object(stream_states, "computes_elsewhere", lambda order, ctx: True),
    ):
        yield lanes
    assert lanes.lazy.freed == [] and lanes.lazy.unwritten == []
    assert [lane.due for lane in lanes.lazy.lanes] == [[], []]
    assert lanes.late.due == []
