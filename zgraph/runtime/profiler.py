"""Time, time blocked in each wait, and peak memory of compiled graphs while `zgraph.measure` is active."""

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
    """Measurements of one graph; medians over its calls.

    Attributes:
        calls: number of measured calls.
        us: microseconds of one call, communication included.
        blocked_us: microseconds spent in the wait for each collective, by the name of the node that starts it.
        waited_at_us: microseconds from the beginning of the call to the wait for each collective, by the same name.
        peak_bytes: peak memory, counted as in `Peak`; None if it could not be observed.
    """

    calls: int
    us: float
    blocked_us: Mapping[str, float]
    waited_at_us: Mapping[str, float] = field(default_factory=dict[str, float])
    peak_bytes: int | None


class Probe(Protocol):
    """Callbacks of an instrumented program."""

    def watched(self, wait: Wait, name: str) -> Wait:
        """Return a wait function that also measures its wait for the collective of this name."""
        ...

    def hold(self, *values: Any) -> None:
        """Keep a collective's result and operands alive; called after the start of the collective."""
        ...

    def let_go(self) -> None:
        """Release tensors that nothing else holds; called after every node."""
        ...


# Builds the instrumented program; True adds calls of hold and let_go, to watch memory.
Build = Callable[[Probe, bool], Program]


class Clock(Protocol):
    """List of the begin and end of each wait."""

    waits: list[tuple[Any, Any]]


class Runner(Protocol):
    """Object that runs a graph and measures it.

    Attributes:
        clocks: clocks that record the waits of the next call.
    """

    clocks: Sequence[Clock]

    def run(self, build: Build, args: list[Any]) -> Any:
        """Call the instrumented program of the graph."""
        ...


class StepProfiler:
    """Profiler of every graph of a model.

    On the CPU torch.profiler records the memory of the first step, up to the first forward pass after a backward pass.
    This slows the first step down, so the times of its calls count only if there are no other calls.
    """

    def __init__(self, *, watch_allocations: bool) -> None:
        self.graphs: dict[tuple[str, str], GraphProfiler] = {}
        self.allocations = Allocations() if watch_allocations and not is_profiling() else None
        self._backward_ran = False

    def of(self, frame: str, direction: str, owned: Sequence[int]) -> GraphProfiler:
        """Return the profiler of the graph that is about to be called."""
        if direction != "backward" and self._backward_ran and self.allocations is not None:
            self.allocations.stop()
        self._backward_ran = self._backward_ran or direction in ("backward", "step")
        return self.graphs.setdefault((frame, direction), GraphProfiler(self, f"{direction} {frame}", owned))

    def stop(self) -> None:
        if self.allocations is not None:
            self.allocations.stop()

    def found(self) -> dict[tuple[str, str], Measured]:
        """Measurements by frame and direction."""
        if any(call.device is not None for graph in self.graphs.values() for call in graph.calls):
            torch.accelerator.synchronize()
        peaks = {} if self.allocations is None else self.allocations.peaks()
        return {key: graph.found(peaks) for key, graph in self.graphs.items()}


@dataclass
class Call:
    """One call of a graph; `begin`, `end` and waits are results of `now`: host microseconds, or device events."""

    label: str
    device: torch.device | None
    profiled: bool
    given_bytes: int
    begin: Any = None
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list[tuple[str, Any, Any]])
    peak_bytes: int | None = None


class GraphProfiler:
    """Profiler of one graph: runs its instrumented program and records each call."""

    def __init__(self, step: StepProfiler, label: str, owned: Sequence[int]) -> None:
        self.step = step
        self.label = label
        self.owned = owned
        self.clocks: Sequence[Clock] = ()
        self.calls: list[Call] = []
        self._programs: dict[bool, Program] = {}

    def run(self, build: Build, args: list[Any]) -> Any:
        """Call the graph and measure the call."""
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
    """Microseconds from the beginning of a call to the first wait for each collective, by the collective's name."""
    return {name: elapsed_us(call.begin, begin) for name, begin, _ in reversed(call.waits)}


class Allocations:
    """Allocations and frees of this thread on the CPU, as recorded by torch.profiler.

    torch.profiler records the memory that gloo's threads stage during a collective, but not when these threads free the
    collective's buffers. A gloo thread that is the last holder of a buffer may free it as late as its next collective.
    So this object holds the buffers, too, and this thread frees each one as soon as nothing else holds it.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._thread = threading.get_ident()
        self._held: list[torch.UntypedStorage] = []
        self._profile.start()
        self.is_watching = True

    def stop(self) -> None:
        """Stop the profile, if this is the thread that started it."""
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
        """Peak memory of each call by the call's label, in bytes above the level at the beginning of the call."""
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
    """The current time: microseconds of the host for None, else a new event on the device's current stream."""
    if device is None:
        return 1e6 * time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def elapsed_us(begin: Any, end: Any) -> float:
    """Microseconds between two results of `now`; if they are events, both must have completed."""
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
