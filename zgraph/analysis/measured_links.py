"""Measurements that all ranks make together: times of calls, and latency and rate of links."""

from __future__ import annotations

import math
import platform
import statistics
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zgraph.analysis.hardware import Link
from zgraph.runtime.chunks import MIB
from zgraph.runtime.exchanges.collectives import (
    is_hierarchical,
    start_all_gather,
    start_all_to_all,
    uses_point_to_point,
)
from zgraph.tiers.devices import KINDS, kind_of_group
from zgraph.torch_compat.collectives import all_gather, wait
from zgraph.torch_compat.groups import backend_of

POINT_S = 0.2  # seconds to measure one size of one kind of collective
SMALL_BYTES = (256, 4096)  # sizes whose time is mostly latency
SMALL_AT_ONCE = 8  # number of small collectives in flight together, as in a step: see `link_of`
LARGE_BYTES = (MIB // 4, MIB, 4 * MIB)  # typical sizes of the message that a rank sends for a bucket
LARGE_BYTES_OF_GPUS = (64 * MIB, 128 * MIB, 256 * MIB)  # on NVLink smaller sizes measure latency
_MOST_GAIN = 2.0  # largest credible gain of several messages in flight over one
MESSAGE_US = 25_000.0  # longest time of one of several messages in flight


@dataclass(frozen=True)
class MeasuringRanks:
    """The ranks that measure together.

    Attributes:
        device: device of the tensors that collectives send.
        groups: one group for each axis of the mesh; () for a single process.
    """

    device: torch.device
    groups: tuple[ProcessGroup, ...]

    @classmethod
    def of(cls, given: object) -> MeasuringRanks:
        if given is None and not (dist.is_available() and dist.is_initialized()):
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            return cls(accelerator or torch.device("cpu"), ())
        if given is None:
            given = dist.group.WORLD
        if isinstance(given, DeviceMesh):
            groups = tuple(given.get_all_groups())
            kind = given.device_type
        elif isinstance(given, ProcessGroup):
            groups = (given,)
            kind = kind_of_group(given).type
        else:
            raise ValueError(
                f"zgraph.calibrate: {given!r} is a {type(given).__name__}; pass a DeviceMesh, a ProcessGroup or None."
            )
        for group in groups:
            if backend_of(group, torch.device(kind)) == "fake":
                raise ValueError(
                    "zgraph.calibrate: collectives of the backend fake move nothing; initialise gloo or nccl, or use "
                    'zgraph.Hardware.preset("h100").'
                )
        index = torch.accelerator.current_device_index() if kind != "cpu" else None
        return cls(torch.device(kind, index) if index is not None else torch.device(kind), groups)

    @property
    def backend(self) -> str:
        """Backend of the groups; for a single process, the backend that its device would use."""
        if self.groups:
            return backend_of(self.groups[0], self.device)
        return KINDS[self.device.type].backend

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks, on all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        for group in self.groups:
            found = gathered(found, group).amax(0)
        return found.tolist()

    @property
    def large_bytes(self) -> tuple[int, ...]:
        return LARGE_BYTES if self.device.type == "cpu" else LARGE_BYTES_OF_GPUS

    def settle(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """Gather a tensor of every rank of the group: [n] on each of N ranks -> [N, n] on all."""
    found = own.new_empty((dist.get_world_size(group), *own.shape))
    all_gather(found, own.unsqueeze(0), group)
    return found


def median_us(ranks: MeasuringRanks, run: Callable[[], object], calls: int = 1, least: int = 5) -> float:
    """Return the median time of a call in microseconds, over runs of `calls` calls each.

    There are at least `least` runs, and enough of them to last `POINT_S` seconds.
    """
    times: list[float] = []
    run()
    ranks.settle()
    deadline = time.perf_counter() + POINT_S
    while len(times) < least or time.perf_counter() < deadline:
        times.append(timed(ranks, lambda: [run() for _ in range(calls)])[0] / calls)
    return statistics.median(times)


Make = Callable[[MeasuringRanks, ProcessGroup, int], Callable[[], Tensor]]


@dataclass(frozen=True)
class _Axis:
    link: Link
    on_one_host: bool
    cpu_us_per_collective: float
    cpu_us_per_byte: float


def link_of(ranks: MeasuringRanks, group: ProcessGroup, ranks_per_host: int) -> _Axis | None:
    """Measure the link of one group with all_to_alls and all_gathers; None for a single rank.

    Small collectives are timed with several in flight, as in a step. One at a time, they would need ten times as long
    with gloo on a single core: gloo's thread waits a scheduler tick for a lock that the sending program holds. In a
    step, the program computes during that tick.
    """
    world = dist.get_world_size(group)
    if world == 1:
        return None
    points: list[tuple[float, float]] = []
    cpu: list[tuple[float, float]] = []
    dispatches = [_exchanging, *([] if is_hierarchical(group, ranks_per_host) else [_gathering])]
    for make in dispatches:
        for sent_bytes in (*SMALL_BYTES, *ranks.large_bytes):
            numel = sent_bytes // (world - 1) // 4 + 1  # to each other rank
            start = make(ranks, group, numel)
            count = SMALL_AT_ONCE if sent_bytes in SMALL_BYTES else 1

            def run(start: Callable[[], Tensor] = start, count: int = count) -> None:
                for started in [start() for _ in range(count)]:
                    wait(started)

            once_us = ranks.slowest([timed(ranks, run)[0] for _ in range(2)])[1]  # the first connects
            if sent_bytes > ranks.large_bytes[0] and once_us > 5e6 * POINT_S:
                break  # the link is slow: smaller sizes suffice
            repeats = max(3, min(20, int(1e6 * POINT_S / once_us)))
            times = [timed(ranks, run) for _ in range(repeats)]
            us, cpu_us = (statistics.median(each) / count for each in zip(*times, strict=True))
            points.append((4 * numel * (world - 1), us))
            cpu.append((4 * numel * (world - 1), cpu_us))
    slowest = ranks.slowest([us for _, us in (*points, *cpu)])
    sizes = [sent for sent, _ in points]
    link = fit_link(list(zip(sizes, slowest[: len(sizes)], strict=True)), messages=world - 1)
    (stream_us,) = ranks.slowest([_stream_us(ranks, group, link, dispatches)])
    link = in_a_stream(link, stream_us, without_gap=uses_point_to_point(group, ranks.device))
    burnt = fit_link(list(zip(sizes, slowest[len(sizes) :], strict=True)), messages=world - 1)
    on_one_host = ranks_on_one_host(ranks, group) == world
    if ranks.device.type != "cpu":
        return _Axis(link, on_one_host, 0.0, compute_share(ranks, group, link) / link.bytes_per_us)
    return _Axis(link, on_one_host, (world - 1) * burnt.latency_us, 1 / burnt.bytes_per_us)


def _stream_us(ranks: MeasuringRanks, group: ProcessGroup, link: Link, makes: Sequence[Make]) -> float:
    """Return the microseconds per byte of a stream in which three collectives of the group are in flight.

    The collectives are of the kinds in `makes`, in turn.
    """
    world = dist.get_world_size(group)
    # As large as a bucket, but limited in time on a slow link.
    sent_bytes = min(ranks.large_bytes[1] // 2, int(link.bytes_per_us * MESSAGE_US))
    numel = sent_bytes // (world - 1) // 4 + 1
    dispatches = [make(ranks, group, numel) for make in makes]

    def stream(count: int) -> None:
        in_flight: deque[Tensor] = deque()
        for number in range(count):
            if len(in_flight) == 3:
                wait(in_flight.popleft())
            in_flight.append(dispatches[number % len(dispatches)]())
        for started in in_flight:
            wait(started)

    few, many = 4, 20  # their difference excludes the ramp-up and the tail of a stream
    stream(few)
    times = [[timed(ranks, lambda count=count: stream(count))[0] for count in (few, many)] for _ in range(3)]
    us = statistics.median(more - less for less, more in times)
    return max(us, 1.0) / ((many - few) * 4 * numel * (world - 1))


def compute_share(ranks: MeasuringRanks, group: ProcessGroup, link: Link) -> float:
    """Return the share of compute time that is lost while collectives are in flight.

    NCCL's kernels occupy multiprocessors, and gloo's copies occupy cores. All ranks time matrix products twice: without
    collectives, and while longer gathers are in flight.
    """
    size, dtype = (256, torch.float32) if ranks.device.type == "cpu" else (4096, torch.bfloat16)
    a = random_values(size, size, dtype=dtype, device=ranks.device)
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(10):
            torch.mm(a, a, out=out)

    products()
    (alone_us,) = ranks.slowest([statistics.median(timed(ranks, products)[0] for _ in range(5))])
    sent_bytes = min(ranks.large_bytes[0], int(link.bytes_per_us * MESSAGE_US))
    world = dist.get_world_size(group)
    start = _gathering(ranks, group, sent_bytes // (world - 1) // 4 + 1)
    count = min(64, math.ceil(3 * alone_us / link.us(sent_bytes)) + 1)  # the same on all ranks
    overlapped: list[float] = []
    for _ in range(5):
        in_flight = [start() for _ in range(count)]
        overlapped.append(timed(ranks, products)[0])
        for started in in_flight:
            wait(started)
        ranks.settle()
    (overlapped_us,) = ranks.slowest([statistics.median(overlapped)])
    return max(0.0, 1.0 - alone_us / overlapped_us)


def random_values(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return normally distributed values; the global random state is unchanged.

    A tensor of ones would give wrong times: a GPU then flips fewer wires, draws less power and keeps a higher clock,
    and so multiplies some ten percent faster than on a model's values.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(sizes, generator=generator, device=device).to(dtype)


def timed(ranks: MeasuringRanks, run: Callable[[], object]) -> tuple[float, float]:
    """Run a function; return the microseconds until its result is ready, and the processor microseconds of all threads.

    On a GPU, two stream events measure the time until the result is ready, and the processor time is 0.
    """
    if ranks.device.type != "cpu":
        begin, end = (torch.Event(ranks.device, enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        ranks.settle()
        return 1e3 * begin.elapsed_time(end), 0.0
    started, busy = time.perf_counter(), time.process_time()
    run()
    ranks.settle()
    return 1e6 * (time.perf_counter() - started), 1e6 * (time.process_time() - busy)


def _gathering(ranks: MeasuringRanks, group: ProcessGroup, numel: int) -> Callable[[], Tensor]:
    own = torch.ones(numel, device=ranks.device)
    return lambda: start_all_gather(own, dist.get_world_size(group), group.group_name)


def _exchanging(ranks: MeasuringRanks, group: ProcessGroup, numel: int) -> Callable[[], Tensor]:
    splits = [numel] * dist.get_world_size(group)
    pieces = torch.ones(sum(splits), device=ranks.device)
    return lambda: start_all_to_all(pieces, splits, splits, group.group_name)


def fit_link(points: Iterable[tuple[float, float]], messages: int) -> Link:
    """Fit a link to measured (bytes, us).

    Sizes differ a thousandfold, so that a regression line would fit only the large or only the small ones. Instead,
    small sizes give the latency, and the remaining time of large sizes gives the rate. Medians limit the effect of
    disturbed points.

    Args:
        points: measurements; at least one with at most 4 KiB, and one with more.
        messages: number of consecutive messages of one collective.
    """
    small, large = list[tuple[float, float]](), list[tuple[float, float]]()
    for size, us in points:
        (small if size <= 2 * max(SMALL_BYTES) else large).append((size, us))
    latency_us, us_per_byte = 0.0, 0.0
    for _ in range(3):  # latency and rate converge in turn
        latency_us = statistics.median(max(us - size * us_per_byte, 1e-3 * us) for size, us in small)
        us_per_byte = statistics.median(max(us - latency_us, 1e-3 * us) / size for size, us in large)
    return Link(latency_us=latency_us / messages, bytes_per_us=1 / us_per_byte)


def in_a_stream(link: Link, stream_us: float, *, without_gap: bool) -> Link:
    """Correct the rate of a link, measured with single messages, by the rate of a stream of messages.

    Some links pass an initial burst at full speed, which may cover most of a single message, but not of a stream.

    Args:
        link: link from `fit_link`.
        stream_us: microseconds per byte in a stream.
        without_gap: whether collectives follow each other without gaps, so that each has the rate of the stream.
    """
    sustained = min(1 / stream_us, _MOST_GAIN * link.bytes_per_us)
    if without_gap:
        return replace(link, bytes_per_us=sustained)
    gain = max(1.0, sustained / link.bytes_per_us)
    return replace(link, bytes_per_us=min(link.bytes_per_us, sustained), gain_at_once=gain)


def ranks_on_one_host(ranks: MeasuringRanks, group: ProcessGroup) -> int:
    """Return the largest number of ranks of a group that share a host."""
    host = zlib.crc32(platform.node().encode())
    hosts = gathered(torch.tensor([float(host)], dtype=torch.float64, device=ranks.device), group)
    return int(ranks.slowest([float((hosts == host).sum())])[0])
