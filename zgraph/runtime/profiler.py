"""Measures compiled graphs while `zgraph.measure` is active: time, time blocked in waits, and peak memory."""

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

from zgraph.tiers.devices import is_gpu, module_of
from zgraph.torch_compat.memory import allocation_events, holders, is_profiling, storage_key

Program = Callable[[list[Any]], Any]
Wait = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one graph, as medians over its calls.

    Attributes:
        calls: number of measured calls.
        us: duration of a call in microseconds, waits included.
        blocked_us: microseconds blocked in the wait for each collective, by the name of the node that starts it.
        waited_at_us: microseconds from the beginning of the call to the wait for each collective, by the same names.
        peak_bytes: peak memory, counted as in `zgraph.reporting.of_graph.Peak`; None: not measured.
    """

    calls: int
    us: float
    blocked_us: Mapping[str, float]
    waited_at_us: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_bytes: int | None


class Probe(Protocol):
    """Callbacks that an instrumented graph program calls."""

    def watched(self, wait: Wait, name: str) -> Wait:
        """Return a wait function that also measures itself, under the name of the collective's start node."""
        ...

    def hold(self, *values: Any) -> None:
        """Keep a collective's operands and results alive; called after each start of a collective."""
        ...

    def let_go(self) -> None:
        """Release the kept tensors that nothing else references; called after every node."""
        ...


# Builds the instrumented program; True adds calls of hold and let_go, to watch memory.
Build = Callable[[Probe, bool], Program]


class Clock(Protocol):
    """Records the begin and end of each wait."""

    waits: list[tuple[Any, Any]]


class Runner(Protocol):
    """Runs and measures a graph.

    Attributes:
        clocks: clocks that record the waits of the next call.
    """

    clocks: Sequence[Clock]

    def run(self, build: Build, args: list[Any]) -> Any:
        """Call the graph's instrumented program, built by `build` for the first call."""
        ...


class StepProfiler:
    """Profiler of all compiled graphs of a model.

    On the CPU, torch.profiler records memory during the first step, which makes this step slow. Times of the first
    step are used only for graphs that no later step calls.
    """

    def __init__(self, *, watch_allocations: bool) -> None:
        self.graphs: dict[tuple[str, str], GraphProfiler] = {}
        self.allocations = Allocations() if watch_allocations and not is_profiling() else None
        self._backward_ran = False

    def of(self, frame: str, direction: str, owned: Sequence[int]) -> GraphProfiler:
        """Return the profiler of the graph that is called next.

        Args:
            frame, direction: frame and direction of the graph.
            owned: positions of the inputs that the graph frees.
        """
        if direction != "backward" and self._backward_ran and self.allocations is not None:
            self.allocations.stop()
        self._backward_ran = self._backward_ran or direction in ("backward", "step")
        return self.graphs.setdefault((frame, direction), GraphProfiler(self, f"{direction} {frame}", owned))

    def stop(self) -> None:
        if self.allocations is not None:
            self.allocations.stop()

    def found(self) -> dict[tuple[str, str], Measured]:
        """Return the measurements, by frame and direction."""
        if any(call.device is not None for graph in self.graphs.values() for call in graph.calls):
            torch.accelerator.synchronize()
        peaks = {} if self.allocations is None else self.allocations.peaks()
        return {key: graph.found(peaks) for key, graph in self.graphs.items()}


@dataclass
class Call:
    """One measured call of a graph.

    Attributes:
        label: label of the call in torch.profiler's record.
        device: device of the call's inputs; None: the CPU.
        profiled: whether torch.profiler recorded memory during the call.
        given_bytes: size of the inputs that the graph frees.
        begin, end: results of `now`: host microseconds or device events.
        waits: name, begin and end of each wait.
        peak_bytes: rise of the GPU allocator's peak during the call; None on the CPU.
    """

    label: str
    device: torch.device | None
    profiled: bool
    given_bytes: int
    begin: Any = None
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    peak_bytes: int | None = None


class GraphProfiler:
    """Profiler of one graph: runs the graph's instrumented program and records each call."""

    def __init__(self, step: StepProfiler, label: str, owned: Sequence[int]) -> None:
        self.step = step
        self.label = label
        self.owned = owned
        self.clocks: Sequence[Clock] = ()
        self.calls: list[Call] = []
        self._programs: dict[bool, Program] = {}

    def run(self, build: Build, args: list[Any]) -> Any:
        """Run and measure one call of the graph."""
        allocations = self.step.allocations
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
            call.begin = now(call.device)
            try:
                return self._programs[profiled](args)
            finally:
                call.end = now(call.device)
                call.peak_bytes = _end_peak(call.device, before)

    def watched(self, wait: Wait, name: str) -> Wait:
        def run(*args: Any) -> Any:
            call = self.calls[-1]
            begin = now(call.device)
            result = wait(*args)
            end = now(call.device)
            call.waits.append((name, begin, end))
            for clock in self.clocks:
                clock.waits.append((begin, end))
            return result

        return run

    def hold(self, *values: Any) -> None:
        if self.step.allocations is not None:
            self.step.allocations.hold(values)

    def let_go(self) -> None:
        if self.step.allocations is not None:
            self.step.allocations.let_go()

    def found(self, peaks: Mapping[str, int]) -> Measured:
        calls = [call for call in self.calls if not call.profiled] or self.calls
        blocked = [_blocked_us(call) for call in calls]
        begun = [_waited_at_us(call) for call in calls]
        rises = [(call, peaks.get(call.label, call.peak_bytes)) for call in self.calls]
        highest = [call.given_bytes + rise for call, rise in rises if rise is not None]
        return Measured(
            calls=len(calls),
            us=statistics.median(elapsed_us(call.begin, call.end) for call in calls),
            blocked_us={name: statistics.median(each[name] for each in blocked) for name in blocked[0]},
            waited_at_us={name: statistics.median(each[name] for each in begun) for name in begun[0]},
            peak_bytes=int(statistics.median(highest)) if highest else None,
        )


def _blocked_us(call: Call) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, begin, end in call.waits:  # a coalesced collective has several waits
        found[name] = found.get(name, 0.0) + elapsed_us(begin, end)
    return found


def _waited_at_us(call: Call) -> dict[str, float]:
    """Return the microseconds from the beginning of a call to the first wait for each collective, by name."""
    return {name: elapsed_us(call.begin, begin) for name, begin, _ in reversed(call.waits)}


class Allocations:
    """Record of this thread's CPU allocations and frees, by torch.profiler.

    torch.profiler does not record frees by gloo's threads, which may be the last owners of a collective's buffers. So
    this object keeps the buffers alive, and frees each one on this thread as soon as nothing else references it.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._thread = threading.get_ident()
        self._held: list[torch.UntypedStorage] = []
        self._profile.start()
        self.is_watching = True

    def stop(self) -> None:
        """Stop recording; only the thread that started the record can stop it."""
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
        """Return the peak memory of each call, by label, in bytes above the level at the beginning of the call."""
        spans, events = allocation_events(self._profile, "zgraph::")
        return {label: _rise(events, begin, end) for label, (begin, end) in spans.items()}


def _rise(events: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    alive = peak = 0
    for when, count in events:
        if begin <= when <= end:
            alive += count
            peak = max(peak, alive)
    return peak


def now(device: torch.device | None) -> Any:
    """Return the current time: for None, microseconds on the host; for a device, a new event on its current stream."""
    if device is None:
        return 1e6 * time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def elapsed_us(begin: Any, end: Any) -> float:
    """Return the microseconds between two results of `now`; events must have completed."""
    return end - begin if isinstance(begin, float) else 1e3 * begin.elapsed_time(end)


def _begin_peak(device: torch.device | None) -> int:
    if device is None or not is_gpu(device):
        return 0
    module_of(device).reset_peak_memory_stats(device)
    return module_of(device).memory_allocated(device)


def _end_peak(device: torch.device | None, before: int) -> int | None:
    if device is None or not is_gpu(device):
        return None
    return module_of(device).max_memory_allocated(device) - before
