"""The report: what zgraph compiled, pass by pass and collective by collective."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.pipeline import PassRun
from zgraph.graph.text import dtype_text
from zgraph.graph.traffic import Transfer
from zgraph.reporting.of_graph import GraphReport
from zgraph.runtime.profiler import GraphProfiler, Measured, StepProfiler


@dataclass(eq=False)
class Report:
    """Filled while compiling; print it after the first step. `zgraph.summary(model)` has one for each sharded model.

    Attributes:
        graphs: every compiled graph, in order.
        passes: every pass that ran.
        notes: what passes had to say, such as why one did nothing; not printed, dumps show them in place.
        seconds: spent compiling, by phase: "tracing" is torch's, "passes" includes their verification, "predicting" is
            what `zgraph.explain` takes, "agreement" is mostly waiting for other ranks, "lowering" is mostly Inductor's.
        islands: runs of compute that were left to Inductor.
        distinct_islands: how many it compiled, for equal ones share.
        measured: what `zgraph.measure` has found last, by frame and direction.
        meter: that measures the graphs now; None: they are not measured.
        feedback_bytes: what error feedback keeps on this rank, as `zgraph.summary` has found it last.
    """

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    passes: list[PassRun] = field(default_factory=list[PassRun])
    notes: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    islands: int = 0
    distinct_islands: int = 0
    measured: dict[tuple[str, str], Measured] = field(default_factory=dict[tuple[str, str], Measured])
    meter: StepProfiler | None = None
    feedback_bytes: int = 0
    _running: str | None = None

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time what runs inside, and take it off the phase around it."""
        outer, self._running = self._running, name
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            if outer is not None:
                self.seconds[outer] = self.seconds.get(outer, 0.0) - spent
            self._running = outer

    def profiler_of(self, frame: str, direction: Direction) -> GraphProfiler | None:
        """Who measures the call of a graph that is about to happen; None: nobody."""
        if self.meter is None:
            return None
        same = [graph.owned for graph in self.graphs if (graph.frame, graph.direction) == (frame, direction)]
        return self.meter.of(frame, direction, same[-1] if same else ())

    @property
    def recompiles(self) -> int:
        """How often a frame was compiled again: for another shape, for `no_sync`, for evaluation."""
        frames = {graph.frame for graph in self.graphs}
        return len(frames) - len({frame.split("/")[0] for frame in frames})

    @property
    def step_bytes(self) -> int:
        """Bytes this rank sends in one training step: the newest forward and backward of every frame, each run once.

        Equal blocks that are compiled one by one share a graph, which this counts once.
        """
        newest = {
            (graph.frame.split("/")[0], graph.direction): graph.sent_bytes
            for graph in self.graphs
            if graph.direction != "inference"
        }
        return sum(newest.values())

    @property
    def compile_seconds(self) -> float:
        """Time spent in zgraph's own passes and their verification."""
        return sum(run.seconds for run in self.passes)

    def __str__(self) -> str:
        frames = {graph.frame.split("/")[0] for graph in self.graphs}
        lines = [
            f"zgraph compiled {len(self.graphs)} graphs of {len(frames)} frames, {self.recompiles} recompiles, "
            f"{sum(graph.buckets for graph in self.graphs)} buckets"
        ]
        reasons = {graph.frame: graph.reason for graph in self.graphs if graph.reason}
        lines.extend(f"  frame {frame} compiled again: {reason}" for frame, reason in reasons.items())
        for graph in self.graphs:
            lines.append(f"  frame {graph.frame} {graph.direction}: {graph.nodes} nodes, {_mib(graph.sent_bytes)} sent")
            lines.extend(f"    {line}" for line in _transfer_lines(graph.transfers))
        lines.append("passes")
        for name in dict.fromkeys(run.name for run in self.passes):
            runs = [run for run in self.passes if run.name == name]
            changed = list(dict.fromkeys(run.direction for run in runs if run.changed))
            spent = 1e3 * sum(run.seconds for run in runs)
            lines.append(f"  {name}: {'changed ' + ', '.join(changed) if changed else 'nothing to do'}, {spent:.0f} ms")
        if self.seconds:
            spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
            islands = f"; {self.islands} islands, {self.distinct_islands} distinct" if self.islands else ""
            lines.append(f"compiling took {sum(self.seconds.values()):.1f} s: {spent}{islands}")
        if self.step_bytes:
            lines.append(f"one training step sends {_mib(self.step_bytes)} per rank")
        else:
            lines.append("nothing is sent: no compiled training graph has a collective")
        if self.feedback_bytes:
            lines.append(f"error feedback: {_mib(self.feedback_bytes)} a rank")
        return "\n".join(lines)


def _transfer_lines(transfers: tuple[Transfer, ...]) -> list[str]:
    kinds = dict.fromkeys((transfer.kind, transfer.dtype) for transfer in transfers)
    lines: list[str] = []
    for kind, dtype in kinds:
        same = [transfer for transfer in transfers if (transfer.kind, transfer.dtype) == (kind, dtype)]
        parameters = sum(len(transfer.parameters) for transfer in same)
        sent = sum(transfer.sent_bytes for transfer in same)
        lines.append(f"{len(same)} x {kind} {dtype_text(dtype)}: {parameters} parameters, {_mib(sent)} sent")
    return lines


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
