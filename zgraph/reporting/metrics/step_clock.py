"""Counts the calls of compiled graphs and times their waits for `zgraph.Metrics`; also outer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zgraph.runtime.profiler import Build, Clock, GraphProfiler, Program, Runner, Wait, now
from zgraph.runtime.window_state import state_behind


class KeptGather(NamedTuple):
    """A gather that runs only once in an accumulation window, and keeps its result for the window's later forwards.

    Attributes:
        handle: index of the graph input that is the parameter's handle (the tensor that identifies it).
        dtype: dtype of the gathered parameter.
        sent_bytes: bytes that this rank sends if the gather runs.
    """

    handle: int
    dtype: torch.dtype
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class CalledGraph:
    """Facts about one compiled graph that metrics need.

    Attributes:
        frame, direction: frame and direction, as in `zgraph.explain`.
        sent_bytes: bytes that this rank sends in a call in which every gather runs.
        kept_gathers: gathers that run only once in an accumulation window.
        peak_bytes: predicted peak memory of the graph by itself; None: unknown.
        frame_peak_bytes: predicted peak memory of a step, which is compared with the budget; None: no budget.
        budget_bytes: memory budget of a step; None: no limit.
    """

    frame: str
    direction: str
    sent_bytes: int
    kept_gathers: tuple[KeptGather, ...] = ()
    peak_bytes: int | None = None
    frame_peak_bytes: int | None = None
    budget_bytes: int | None = None

    def sends(self, args: Sequence[Any]) -> int:
        """Return the bytes that this rank will send in a call with the inputs `args`."""
        found = self.sent_bytes
        for gather in self.kept_gathers:
            if gather.dtype in state_behind(args[gather.handle]).kept:
                found -= gather.sent_bytes
        return found


@dataclass
class Counted:
    """Counts of the calls of a model's compiled graphs.

    Attributes:
        calls: one entry for each call, in order.
        sent_bytes: bytes sent by this rank.
        waits: begin and end of each wait, in microseconds of the host's clock, or as device events.
        profiled: whether `zgraph.measure` was active in one of the calls.
        site_bytes: bytes that outer steps have sent to other sites; None: there were no outer steps.
        site_wait_s: seconds for which outer steps have waited for other sites.
    """

    calls: list[CalledGraph] = field(default_factory=list[CalledGraph])
    sent_bytes: int = 0
    waits: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    profiled: bool = False
    site_bytes: int | None = None
    site_wait_s: float = 0.0


class StepClock:
    """Counts the calls of a model's compiled graphs.

    Attributes:
        counted: counts since the last call of `take`.
        paused: whether calls are currently not counted.
    """

    def __init__(self) -> None:
        self.counted = Counted()
        self.paused = False

    def take(self) -> Counted:
        """Return the counts since the last call, and reset them."""
        found, self.counted = self.counted, Counted()
        return found

    def add_outer_step(self, sent_bytes: int, waited_s: float) -> None:
        """Count an outer step, with the bytes sent to other sites and the seconds waited since the last one."""
        if not self.paused:
            self.counted.site_bytes = (self.counted.site_bytes or 0) + sent_bytes
            self.counted.site_wait_s += waited_s


class GraphWatch:
    """Chooses how each call of one graph runs: under a profiler, as a `CountedGraph`, or unobserved (None)."""

    def __init__(
        self,
        about: CalledGraph,
        clocks: Sequence[list[StepClock]],
        profiler_of: Callable[[], GraphProfiler | None] = lambda: None,
    ) -> None:
        self.about = about
        self.clocks = clocks  # clocks of the models whose parameters the graph reads; the lists change over time
        self.profiler_of = profiler_of
        self._counted = CountedGraph()

    def __call__(self, args: Sequence[Any]) -> Runner | None:
        profiler = self.profiler_of()
        counted = [clock.counted for each in self.clocks for clock in each if not clock.paused]
        for each in counted:
            each.calls.append(self.about)
            each.sent_bytes += self.about.sends(args)
            each.profiled |= profiler is not None
        runner = profiler or (self._counted if counted else None)
        if runner is not None:
            runner.clocks = counted
        return runner


class CountedGraph:
    """Runs a graph and records the begin and end of each wait."""

    def __init__(self) -> None:
        self.clocks: Sequence[Clock] = ()
        self._program: Program | None = None
        self._device: torch.device | None = None

    def run(self, build: Build, args: list[Any]) -> Any:
        if self._program is None:
            self._program = build(self, False)
            # A list: a generator would hold an input while the graph runs.
            devices = [arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"]
            self._device = devices[0] if devices else None
        return self._program(args)

    def watched(self, wait: Wait, name: str) -> Wait:
        def run(*args: Any) -> Any:
            begin = now(self._device)
            result = wait(*args)
            span = begin, now(self._device)
            for clock in self.clocks:
                clock.waits.append(span)
            return result

        return run

    def hold(self, *values: Any) -> None: ...

    def let_go(self) -> None: ...
