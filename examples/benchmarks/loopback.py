"""A process group of N ranks on one device, in one process, whose collectives are copies that complete late.

This process is one of the ranks. The rule by which its results can be checked: every other rank has sent what this one
has sent. An all_gather is N copies of the shard; what an all_to_all brings is N times the piece that this rank sends
to itself; a sum is N equal terms, added one after the other; a broadcast changes nothing.

    with loopback(8, Wire()) as world:
        model = zgraph.shard(model)                 # rank 0 of 8, whose shards are all alike

Collectives of a group run one after the other, and those of two groups side by side, as with NCCL:

    on CPU      a thread for each group; `Wire.when` says when a copy is made
    on CUDA     a stream of high priority for each group, where `Wire.transfer_us` of sleep stand before the copy; an
                event is recorded behind it, for which the stream that waits waits

To zgraph the groups are those of whatever `Wire.backend` calls them: not gloo's messages, but the functional
collectives, as on NCCL.
"""

# What torch calls has its names; its own overloads are more than one method can be.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_REGISTERED = "loopback"  # with torch; what zgraph is told is `Wire.backend`
_POISON = 0xFF  # of every byte: a NaN of each floating-point type


class Watcher(Protocol):
    """Told of every collective, on the thread that starts and waits."""

    def started(self, transfer: Transfer) -> None: ...

    def waited(self, transfer: Transfer) -> None: ...


@dataclass(kw_only=True, eq=False)
class Wire:
    """How the groups of a world move data; may be changed while nothing is in flight.

    Attributes:
        backend: what zgraph takes the groups' backend for, such as "nccl".
        when: on CPU, when a copy is made: as late as can be, when it is waited for; at once; or `transfer_us` after
            the one before it. On CUDA it is always the last.
        transfer_us: of a collective, from its kind, the bytes that one rank sends and the number of ranks.
        watcher: of all groups.
        poisons: what a collective will write holds NaNs until then.
    """

    backend: str = "loopback"
    when: Literal["waited", "started", "timed"] = "waited"
    transfer_us: Callable[[str, int, int], float] = lambda kind, sent_bytes, ranks: 0.0
    watcher: Watcher | None = None
    poisons: bool = True


@contextlib.contextmanager
def loopback(world: int, wire: Wire, rank: int = 0) -> Generator[None]:
    """The default group is a loopback of `world` ranks, of which this process is `rank`; so are groups made from it."""
    if not hasattr(dist.Backend, _REGISTERED.upper()):
        dist.Backend.register_backend(_REGISTERED, _make_group, extended_api=True, devices=["cpu", "cuda"])
    store = _Store(wire)  # kept here: groups do not keep its Python side alive
    dist.init_process_group(_REGISTERED, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        for group in store.groups:
            group.close()
        dist.destroy_process_group()


class _Store(dist.Store):
    """On it every peer has already published whatever one asks for; times of kernels are this rank's to publish."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self.groups: list[LoopbackGroup] = []
        self._counts: dict[str, int] = {}
        self._times: dict[str, bytes] = {}

    def add(self, key: str, value: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + value
        return self._counts[key]

    def set(self, key: str, value: str) -> None: ...

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        return self._times.setdefault(key, value)

    def get(self, key: str) -> bytes:
        return self._times.get(key, b"")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._times or "timed_costs" not in key for key in keys)


def _make_group(options: Any, _: Any) -> LoopbackGroup:
    store = options.store
    while not isinstance(store, _Store):
        store = store.underlying_store
    group = LoopbackGroup(options.group_rank, options.group_size, store.wire)
    store.groups.append(group)
    return group


Copy = Callable[[Sequence[Tensor]], None]  # from what is sent to what is filled


@dataclass(eq=False)
class Transfer:
    """One collective on its way.

    Attributes:
        kind: such as "all_gather".
        number: among those of its group.
        sent: what it reads.
        filled: what it writes.
        copy: does both.
        sent_bytes: what one rank sends.
        may_run: on CPU, it need not come later.
    """

    kind: str
    number: int
    sent: list[Tensor]
    filled: list[Tensor]
    copy: Copy | None
    sent_bytes: int
    started_at: float = field(default_factory=time.perf_counter)
    may_run: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    arrived: Any = None  # event of a CUDA stream
    error: BaseException | None = None
    was_waited_for: bool = False


class _Work(dist.Work):
    def __init__(self, group: LoopbackGroup, transfer: Transfer) -> None:
        super().__init__()
        self.group, self.transfer = group, transfer

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.group.wait_for(self.transfer)
        return True


class LoopbackGroup(dist.ProcessGroup):
    """This rank of N; see the module."""

    def __init__(self, rank: int, world: int, wire: Wire) -> None:
        super().__init__(rank, world)
        self.wire = wire
        self._place, self._world, self._name = rank, world, ""
        self._started = 0
        self._lane: _Threads | _Streams | None = None

    # --- what torch and zgraph ask of a group -------------------------------------------------------------------------

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return self._world

    def name(self) -> str:
        return self.wire.backend

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None: ...

    @property
    def group_name(self) -> str:
        return self._name

    group_desc = group_name

    def _get_backend(self, device: torch.device) -> LoopbackGroup:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._started

    # --- collectives, by the names that 2.11 - 2.15 call --------------------------------------------------------------

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        def copy(sent: Sequence[Tensor]) -> None:
            for output, shard in zip(outputs, sent, strict=True):
                self._repeat(output, shard)

        return self._start("all_gather", inputs, outputs, copy, _bytes(inputs) * (self._world - 1))

    def _allgather_base(self, output: Tensor, shard: Tensor, opts: object = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [shard])

    all_gather_single = _allgather_base

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> dist.Work:
        def copy(sent: Sequence[Tensor]) -> None:
            for parts, shard in zip(outputs, sent, strict=True):
                for part in parts:
                    part.copy_(shard)

        filled = [part for parts in outputs for part in parts]
        return self._start("all_gather", inputs, filled, copy, _bytes(inputs) * (self._world - 1))

    def alltoall_base(
        self, output: Tensor, pieces: Tensor, filled_rows: Sequence[int], sent_rows: Sequence[int], opts: Any = None
    ) -> dist.Work:
        splits = sent_rows or [pieces.shape[0] // self._world] * self._world
        begin, length = sum(splits[: self._place]), splits[self._place]
        if any(split != length for split in filled_rows):
            raise ValueError(
                f"loopback: rank {self._place} sends itself {length} rows, as every rank sends it, and expects "
                f"{list(filled_rows)}; no such exchange can be looped back."
            )
        sent_bytes = (pieces.shape[0] - length) * pieces[:1].numel() * pieces.dtype.itemsize
        copy: Copy = lambda sent: self._repeat(output, sent[0][begin : begin + length])  # noqa: E731
        return self._start("all_to_all", [pieces], [output], copy, sent_bytes)

    all_to_all_single = alltoall_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        def copy(sent: Sequence[Tensor]) -> None:
            for output, pieces in zip(outputs, sent, strict=True):
                output.copy_(self._reduced(pieces.view(self._world, *output.shape)[self._place], opts))

        return self._start("reduce_scatter", inputs, outputs, copy, _bytes(inputs) * (self._world - 1) // self._world)

    def _reduce_scatter_base(self, output: Tensor, pieces: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [pieces], opts)

    reduce_scatter_single = _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def copy(sent: Sequence[Tensor]) -> None:
            for tensor in sent:
                tensor.copy_(self._reduced(tensor, opts))

        return self._start("all_reduce", tensors, tensors, copy, 2 * _bytes(tensors) * (self._world - 1) // self._world)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: object = None) -> dist.Work:
        return self._start("broadcast", tensors, tensors, None, _bytes(tensors))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None) -> dist.Work:
        """Scatter from the rank that has something to scatter; another one is left with what it has."""
        mine = [pieces[self._place] for pieces in inputs]

        def copy(sent: Sequence[Tensor]) -> None:
            for output, piece in zip(outputs, sent, strict=False):
                output.copy_(piece)

        return self._start("scatter", mine, outputs if mine else [], copy, _bytes(mine))

    def barrier(self, opts: object = None) -> dist.Work:
        return self._start("barrier", [], [], None, 0)

    def _repeat(self, output: Tensor, piece: Tensor) -> None:
        output.view(self._world, *piece.shape).copy_(piece.expand(self._world, *piece.shape))

    def _reduced(self, term: Tensor, options: Any) -> Tensor:
        """N equal terms, reduced one after the other."""
        reduction = dist.ReduceOp.SUM if options is None else options.reduceOp
        if not (reduction == dist.ReduceOp.SUM or reduction == dist.ReduceOp.AVG):  # no `in`: options hold another type
            return term  # MAX, MIN, BAND, BOR
        total = term.clone()
        for _ in range(self._world - 1):
            total += term
        return total / self._world if reduction == dist.ReduceOp.AVG else total

    # --- lanes --------------------------------------------------------------------------------------------------------

    def _start(
        self, kind: str, sent: Sequence[Tensor], filled: Sequence[Tensor], copy: Copy | None, sent_bytes: int
    ) -> dist.Work:
        transfer = Transfer(kind, self._started, list(sent), list(filled), copy, sent_bytes)
        self._started += 1
        if self.wire.poisons and copy is not None:
            for tensor in filled:
                if not any(tensor is other for other in sent) and tensor.is_contiguous() and tensor.numel():
                    tensor.detach().view(-1).view(torch.uint8).fill_(_POISON)
        if self.wire.watcher is not None:
            self.wire.watcher.started(transfer)
        transfer.sent = held(transfer.sent)
        if self._lane is None:
            on_cuda = any(tensor.is_cuda for tensor in (*sent, *filled))
            if not on_cuda and not filled:  # a barrier before anything else
                transfer.done.set()
                return _Work(self, transfer)
            self._lane = _Streams(self.wire, self._world) if on_cuda else _Threads(self.wire, self._world)
        self._lane.put(transfer)
        return _Work(self, transfer)

    def wait_for(self, transfer: Transfer) -> None:
        if self._lane is not None:
            self._lane.wait_for(transfer)
        if self.wire.watcher is not None and not transfer.was_waited_for:
            self.wire.watcher.waited(transfer)
        transfer.was_waited_for = True
        transfer.sent, transfer.filled, transfer.copy = [], [], None  # the buffers that it has sent may go
        if transfer.error is not None:
            raise RuntimeError(f"loopback: {transfer.kind} {transfer.number} failed") from transfer.error

    def close(self) -> None:
        if self._lane is not None:
            self._lane.close()


class _Threads:
    """A thread that makes one copy after the other."""

    def __init__(self, wire: Wire, world: int) -> None:
        self.wire, self.world = wire, world
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[Transfer] = []
        self._free_at = 0.0

    def put(self, transfer: Transfer) -> None:
        if self.wire.when != "waited":
            transfer.may_run.set()
        self._waiting.append(transfer)
        self._thread.submit(self._run, transfer)

    def wait_for(self, transfer: Transfer) -> None:
        for earlier in [*self._waiting]:
            if earlier.number <= transfer.number:
                earlier.may_run.set()
        transfer.done.wait()
        with contextlib.suppress(ValueError):  # it was waited for before
            self._waiting.remove(transfer)

    def close(self) -> None:
        for left in self._waiting:
            left.may_run.set()
        self._thread.shutdown()

    @torch.no_grad()
    def _run(self, transfer: Transfer) -> None:
        transfer.may_run.wait()
        if self.wire.when == "timed":
            needed_us = self.wire.transfer_us(transfer.kind, transfer.sent_bytes, self.world)
            self._free_at = max(self._free_at, transfer.started_at) + needed_us / 1e6
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        try:
            if transfer.copy is not None:
                transfer.copy(transfer.sent)
        except BaseException as error:
            transfer.error = error
        transfer.done.set()


class _Streams:
    """A CUDA stream of high priority."""

    def __init__(self, wire: Wire, world: int) -> None:
        self.wire, self.world = wire, world
        self._stream = torch.cuda.Stream(priority=-1)
        self._cycles_per_us = _cycles_per_us()

    @torch.no_grad()
    def put(self, transfer: Transfer) -> None:
        needed_us = self.wire.transfer_us(transfer.kind, transfer.sent_bytes, self.world)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if needed_us > 0:
                torch.cuda._sleep(round(needed_us * self._cycles_per_us))  # pyright: ignore[reportPrivateUsage]
            if transfer.copy is not None:
                transfer.copy(transfer.sent)
            transfer.arrived = self._stream.record_event()

    def wait_for(self, transfer: Transfer) -> None:
        torch.cuda.current_stream().wait_event(transfer.arrived)

    def close(self) -> None:
        self._stream.synchronize()


def _cycles_per_us() -> float:
    """Rate of the clock by which `torch.cuda._sleep` (2.11 - 2.13) counts."""
    cycles = 20_000_000
    for _ in range(2):  # the first wakes the device up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)  # pyright: ignore[reportPrivateUsage]
        end.record()
        end.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e3)  # pyright: ignore[reportPossiblyUnboundVariable]


def held(sent: list[Tensor]) -> list[Tensor]:
    """What a transfer holds until it is waited for, so that its memory stays, as NCCL's groups do (2.11 - 2.13)."""
    return sent


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
