"""Counts calls of compiled graphs and times their waits, while `zgraph.Metrics` watches a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zgraph.runtime.profiler import Build, Clock, GraphProfiler, Program, Runner, Wait, now
from zgraph.runtime.window_state import state_behind


class KeptGather(NamedTuple):
    """A gather that sends nothing if its window has already gathered the parameter.

    Attributes:
        handle: position of the parameter's handle among the graph's inputs.
        dtype: dtype of the gathered parameter.
        sent_bytes: bytes that this rank sends if the gather sends.
    """

    handle: int
    dtype: torch.dtype
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class CalledGraph:
    """Facts about a compiled graph that are counted each time it runs.

    Attributes:
        frame, direction: frame and direction as in `zgraph.explain`.
        sent_bytes: bytes that this rank sends in one call if all gathers send.
        kept_gathers: gathers that may not send, because their window keeps the parameter.
        peak_bytes: predicted peak, without memory held outside of the graph; None: unknown.
        frame_peak_bytes: predicted peak of a step of the frame, as budgets count it; None: the frame has no budget.
        budget_bytes: most bytes that a step of the frame may hold; None: no limit.
    """

    frame: str
    direction: str
    sent_bytes: int
    kept_gathers: tuple[KeptGather, ...] = ()
    peak_bytes: int | None = None
    frame_peak_bytes: int | None = None
    budget_bytes: int | None = None

    def sends(self, args: Sequence[Any]) -> int:
        """Return the bytes that this rank is going to send in a call with the inputs `args`."""
        found = self.sent_bytes
        for gather in self.kept_gathers:
            if gather.dtype in state_behind(args[gather.handle]).kept:
                found -= gather.sent_bytes
        return found


@dataclass
class Counted:
    """Counts of the calls of a model's compiled graphs.

    Attributes:
        calls: called graphs, in call order.
        sent_bytes: bytes sent by this rank.
        waits: begin and end of each wait: microseconds of the host, or events of the device.
        profiled: whether `zgraph.measure` ran one of the calls.
    """

    calls: list[CalledGraph] = field(default_factory=list[CalledGraph])
    sent_bytes: int = 0
    waits: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    profiled: bool = False


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
        """Return the counts and start anew."""
        found, self.counted = self.counted, Counted()
        return found


class GraphWatch:
    """Chooses the runner of each call of one graph: a profiler, a `CountedGraph`, or None if neither is needed."""

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
    """Runs one call of a graph with timed waits, and adds the times to the clocks."""

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
