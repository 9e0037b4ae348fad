"""What compiled graphs take while `zgraph.measure` is active: time, time blocked in each wait, and memory."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from zgraph.torch_compat.memory import allocation_events, holders, is_profiling, storage_key

Program = Callable[[list[Any]], Any]
Wait = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one graph; medians over its calls.

    Attributes:
        calls: that were measured.
        us: of one call, communication included.
        blocked_us: in the wait of each collective, by the name of its start.
        peak_bytes: as `Peak` counts; None where it could not be seen.
    """

    calls: int
    us: float
    blocked_us: Mapping[str, float]
    peak_bytes: int | None


class Probe(Protocol):
    """What an instrumented program calls."""

    def watched(self, wait: Wait, name: str) -> Wait:
        """In the place of a function that waits for the collective of this name."""
        ...

    def hold(self, *values: Any) -> None:
        """Behind a collective's start, with its result and what it reads."""
        ...

    def let_go(self) -> None:
        """Behind every node."""
        ...


# Makes the instrumented program; with hold and let_go if memory is watched.
Build = Callable[[Probe, bool], Program]


class StepProfiler:
    """Measures every graph of a model.

    On the CPU torch.profiler sees the memory of the first step: up to the first forward that follows a backward. It
    slows that step down, so the times of its calls count only where there are no others.
    """

    def __init__(self, *, watch_allocations: bool) -> None:
        self.graphs: dict[tuple[str, str], GraphProfiler] = {}
        self.allocations = Allocations() if watch_allocations and not is_profiling() else None
        self._backward_ran = False

    def of(self, frame: str, direction: str, owned: Sequence[int]) -> GraphProfiler:
        """The meter of one graph, about to be called."""
        if direction == "backward":
            self._backward_ran = True
        elif self._backward_ran and self.allocations is not None:
            self.allocations.stop()
        return self.graphs.setdefault((frame, direction), GraphProfiler(self, f"{direction} {frame}", owned))

    def stop(self) -> None:
        if self.allocations is not None:
            self.allocations.stop()

    def found(self) -> dict[tuple[str, str], Measured]:
        """By frame and direction."""
        if any(call.device is not None for meter in self.graphs.values() for call in meter.calls):
            torch.accelerator.synchronize()
        peaks = {} if self.allocations is None else self.allocations.peaks()
        return {key: meter.found(peaks) for key, meter in self.graphs.items()}


@dataclass
class Call:
    """One call of a graph; times are microseconds of the host, or events of the device."""

    label: str
    device: torch.device | None
    profiled: bool
    given_bytes: int
    begin: Any = None
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    peak_bytes: int | None = None


class GraphProfiler:
    """Runs the instrumented program of one graph."""

    def __init__(self, meter: StepProfiler, label: str, owned: Sequence[int]) -> None:
        self.meter = meter
        self.label = label
        self.owned = owned
        self.calls: list[Call] = []
        self._programs: dict[bool, Program] = {}

    def run(self, build: Build, args: list[Any]) -> Any:
        """Call the graph, and note what that takes."""
        allocations = self.meter.allocations
        profiled = allocations is not None and allocations.is_watching
        if profiled not in self._programs:
            self._programs[profiled] = build(self, profiled)
        own = [args[place] for place in self.owned]
        given = {storage_key(value): value.untyped_storage().nbytes() for value in own if isinstance(value, Tensor)}
        del own
        # A list: a generator would hold an input while the graph runs.
        devices = [arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"]
        label = f"zgraph::{self.label} #{len(self.calls)}"
        call = Call(label, devices[0] if devices else None, profiled, sum(given.values()))
        self.calls.append(call)
        with record_function(label):
            before = _begin_peak(call.device)
            call.begin = _now(call.device)
            try:
                return self._programs[profiled](args)
            finally:
                call.end = _now(call.device)
                call.peak_bytes = _end_peak(call.device, before)

    def watched(self, wait: Wait, name: str) -> Wait:
        def run(*args: Any) -> Any:
            call = self.calls[-1]
            begin = _now(call.device)
            result = wait(*args)
            call.waits.append((name, begin, _now(call.device)))
            return result

        return run

    def hold(self, *values: Any) -> None:
        if self.meter.allocations is not None:
            self.meter.allocations.hold(values)

    def let_go(self) -> None:
        if self.meter.allocations is not None:
            self.meter.allocations.let_go()

    def found(self, peaks: Mapping[str, int]) -> Measured:
        calls = [call for call in self.calls if not call.profiled] or self.calls
        blocked = [_blocked_us(call) for call in calls]
        rises = [(call, peaks.get(call.label, call.peak_bytes)) for call in self.calls]
        highest = [call.given_bytes + rise for call, rise in rises if rise is not None]
        return Measured(
            calls=len(calls),
            us=statistics.median(_us(call.begin, call.end) for call in calls),
            blocked_us={name: statistics.median(each[name] for each in blocked) for name in blocked[0]},
            peak_bytes=int(statistics.median(highest)) if highest else None,
        )


def _blocked_us(call: Call) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, begin, end in call.waits:  # a coalesced collective has several waits
        found[name] = found.get(name, 0.0) + _us(begin, end)
    return found


class Allocations:
    """What this thread allocates and frees on the CPU, as torch.profiler sees it.

    It sees what gloo's threads stage while a collective runs, but not how they let go of its buffers afterwards, up to
    their next collective, when they are the last to hold them. So the buffers are held here as well, and let go by this
    thread as soon as nobody else holds them.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._thread = threading.get_ident()
        self._held: list[torch.UntypedStorage] = []
        self._profile.start()
        self.is_watching = True

    def stop(self) -> None:
        """Stop the profile, in the thread that has started it."""
        if self.is_watching and threading.get_ident() == self._thread:
            self._held.clear()
            self._profile.stop()
            self.is_watching = False

    def hold(self, values: Sequence[Any]) -> None:
        for value in values:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                    self._held.append(tensor.untyped_storage())

    def let_go(self) -> None:
        self._held = [storage for storage in self._held if holders(storage) > 1]

    def peaks(self) -> dict[str, int]:
        """How far memory rose in each labelled call above where it began."""
        spans, events = allocation_events(self._profile, "zgraph::")
        return {label: _rise(events, begin, end) for label, (begin, end) in spans.items()}


def _rise(events: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    alive = peak = 0
    for when, count in events:
        if begin <= when <= end:
            alive += count
            peak = max(peak, alive)
    return peak


def _now(device: torch.device | None) -> Any:
    if device is None:
        return 1e6 * time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _us(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else 1e3 * begin.elapsed_time(end)


def _begin_peak(device: torch.device | None) -> int:
    if device is None or device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _end_peak(device: torch.device | None, before: int) -> int | None:
    if device is None or device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) - before
