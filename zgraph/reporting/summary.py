"""The report on everything compiled for a model: graphs, passes and collectives."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zgraph.compiler.graph_pass import Direction
from zgraph.compiler.pass_list import PassRun
from zgraph.graph.text import dtype_text
from zgraph.graph.traffic import Transfer
from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.of_graph import GraphReport
from zgraph.reporting.tables import Table, as_html, counted, size
from zgraph.runtime.profiler import GraphProfiler, Measured, StepProfiler


@dataclass(eq=False)
class Report:
    """Report on everything compiled for a model so far, as returned by `zgraph.summary`; `print` shows it as text.

    Attributes:
        graphs: every compiled graph, in order.
        passes: every run of a pass.
        notes: messages of the passes, such as why a pass did nothing; shown in dumps only.
        seconds: compile time by phase: "tracing" is torch's, "passes" includes verification, "predicting" serves
            `zgraph.explain`, "agreement" is mostly waiting for other ranks, "lowering" is mostly Inductor's.
        islands: number of islands. An island is compute between collectives; Inductor compiles each island by itself.
        distinct_islands: number of islands with different code; equal islands share their code.
        cached_islands: number of distinct islands found in Inductor's cache, compiled by other ranks or earlier runs.
        helped_islands: number of distinct islands that helper processes of this rank have compiled.
        cached_plans: number of frames whose plans were found on disk, saved by earlier runs.
        unsaved: why the plan of a frame could not be saved, by frame.
        measured: latest measurements of `zgraph.measure`, by frame and direction.
        profiler: profiler that is measuring the graphs; None: no measurement.
        uncompiled: text with the modules that gathered parameters outside of compiled graphs, and the reasons, when
            `zgraph.summary` was last called; "" if there are none.
        feedback_bytes: size of this rank's error-feedback state when `zgraph.summary` was last called.
        keep_graphs: whether each of `graphs` keeps a `network`, for inspection after the compile.
        keep_passes: whether `frames` record what each pass changed; this slows the compile down, like a dump.
        dump_failed: whether writing a dump has failed; then the user has been warned, and no more dumps are written.
        frames: data for `zgraph.report`, one entry for each compiled frame.
    """

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    passes: list[PassRun] = field(default_factory=list[PassRun])
    notes: list[str] = field(default_factory=list[str])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    islands: int = 0
    distinct_islands: int = 0
    cached_islands: int = 0
    helped_islands: int = 0
    cached_plans: int = 0
    unsaved: dict[str, str] = field(default_factory=dict[str, str])
    measured: dict[tuple[str, str], Measured] = field(default_factory=dict[tuple[str, str], Measured])
    profiler: StepProfiler | None = None
    uncompiled: str = ""
    feedback_bytes: int = 0
    keep_graphs: bool = False
    keep_passes: bool = False
    dump_failed: bool = False
    frames: list[FrameData] = field(default_factory=list[FrameData])
    _running: str | None = None

    def add(self, other: Report) -> None:
        """Add the graphs, passes, notes, frames and compile times of another report to this one."""
        self.graphs += other.graphs
        self.passes += other.passes
        self.notes += other.notes
        self.frames += other.frames
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time the code inside the `with` as a phase of compiling; the enclosing phase does not count this time."""
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
        """Return the profiler for the next call of a graph; None if the graph is not measured."""
        if self.profiler is None:
            return None
        same = [graph.owned for graph in self.graphs if (graph.frame, graph.direction) == (frame, direction)]
        return self.profiler.of(frame, direction, same[-1] if same else ())

    @property
    def recompiles(self) -> int:
        """Number of recompiles, for any reason, such as another shape, `no_sync` or evaluation."""
        frames = {graph.frame for graph in self.graphs}
        return len(frames) - len({frame.split("/")[0] for frame in frames})

    @property
    def step_bytes(self) -> int:
        """Bytes that this rank sends in one training step, if the latest forward and backward of each frame run once.

        A graph that several equal blocks share counts only once.
        """
        newest = {
            (graph.frame.split("/")[0], graph.direction): graph.sent_bytes
            for graph in self.graphs
            if graph.direction != "inference"
        }
        return sum(newest.values())

    def __str__(self) -> str:
        frames = {graph.frame.split("/")[0] for graph in self.graphs}
        lines = [
            f"zgraph compiled {counted(len(self.graphs), 'graph')} of {counted(len(frames), 'frame')}, "
            f"{counted(self.recompiles, 'recompile')}, {counted(sum(graph.buckets for graph in self.graphs), 'bucket')}"
        ]
        reasons = {graph.frame: graph.reason for graph in self.graphs if graph.reason}
        lines.extend(f"  frame {frame} compiled again: {reason}" for frame, reason in reasons.items())
        if self.uncompiled:
            lines.append(f"  gathered outside of graphs: {self.uncompiled}")
        for graph in self.graphs:
            nodes = counted(graph.nodes, "node")
            lines.append(f"  frame {graph.frame} {graph.direction}: {nodes}, {size(graph.sent_bytes)} sent")
            lines.extend(f"    {line}" for line in _transfer_lines(graph.transfers))
        lines.append("passes")
        for name, changed, seconds in self._pass_facts():
            found = "changed " + ", ".join(changed) if changed else "nothing to do"
            lines.append(f"  {name}: {found}, {1e3 * seconds:.0f} ms")
        if self.seconds:
            spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
            islands = f"; {self.islands} islands, {self._islands_text}" if self.islands else ""
            lines.append(f"compiling took {sum(self.seconds.values()):.1f} s: {spent}{islands}")
            lines.extend(self._cache_lines())
        if self.step_bytes:
            lines.append(f"one training step sends {size(self.step_bytes)} per rank")
        else:
            lines.append("nothing is sent: no compiled training graph has a collective")
        if self.feedback_bytes:
            lines.append(f"error feedback: {size(self.feedback_bytes)} a rank")
        return "\n".join(lines)

    def _cache_lines(self) -> list[str]:
        """Return lines of text on plans that were found on disk, and on those that could not be saved there."""
        frames = {graph.frame for graph in self.graphs}
        found = [f"  plans of {self.cached_plans} of {counted(len(frames), 'frame')} were found on disk"]
        reasons = {text: [one for one in self.unsaved if self.unsaved[one] == text] for text in self.unsaved.values()}
        return (found if self.cached_plans else []) + [
            f"  not saved for the next run: frame {', '.join(names)} ({text})" for text, names in reasons.items()
        ]

    @property
    def _islands_text(self) -> str:
        helped = f", {self.helped_islands} compiled by helper processes" if self.helped_islands else ""
        return f"{self.distinct_islands} distinct, {self.cached_islands} of them from Inductor's cache{helped}"

    def tables(self) -> list[Table]:
        """Return the report as tables for a notebook."""
        sent = size(self.step_bytes) if self.step_bytes else "nothing"
        frames = {graph.frame.split("/")[0] for graph in self.graphs}
        facts = {
            "graphs": f"{len(self.graphs)} of {counted(len(frames), 'frame')}",
            "recompiles": str(self.recompiles),
            "buckets": str(sum(graph.buckets for graph in self.graphs)),
            "islands": f"{self.islands}, {self._islands_text}" if self.islands else "",
            "gathered outside of graphs": self.uncompiled,
            "sent in a training step": sent,
            "error feedback": size(self.feedback_bytes) if self.feedback_bytes else "",
            "seconds of compiling": f"{sum(self.seconds.values()):.1f}" if self.seconds else "",
            **{f"seconds of {name}": f"{seconds:.1f}" for name, seconds in self.seconds.items()},
        }
        graphs = tuple(
            (graph.frame, graph.direction, str(graph.nodes), size(graph.sent_bytes), graph.reason)
            for graph in self.graphs
        )
        collectives = tuple(
            (graph.frame, graph.direction, *cells)
            for graph in self.graphs
            for cells in _transfer_cells(graph.transfers)
        )
        passes = tuple(
            (name, ", ".join(changed) or "nothing to do", f"{1e3 * seconds:.0f} ms")
            for name, changed, seconds in self._pass_facts()
        )
        return [
            Table("zgraph.summary", (), tuple((name, text) for name, text in facts.items() if text)),
            Table("graphs", ("frame", "graph", "nodes", "sent", "compiled again for"), graphs),
            Table("collectives", ("frame", "graph", "kind", "dtype", "count", "parameters", "sent"), collectives),
            Table("passes", ("pass", "changed", "took"), passes),
        ]

    def _repr_html_(self) -> str:
        return as_html(self.tables())

    def _pass_facts(self) -> list[tuple[str, list[str], float]]:
        """Return (name, changed directions, seconds) of each pass.

        The directions are those of the graphs that the pass has changed, such as "backward".
        """
        found: list[tuple[str, list[str], float]] = []
        for name in dict.fromkeys(run.name for run in self.passes):
            runs = [run for run in self.passes if run.name == name]
            changed = dict.fromkeys(run.direction for run in runs if run.changed)
            found.append((name, list[str](changed), sum(run.seconds for run in runs)))
        return found


def _transfer_lines(transfers: tuple[Transfer, ...]) -> list[str]:
    cells = _transfer_cells(transfers)
    return [
        f"{count} x {kind} {dtype}: {counted(int(parameters), 'parameter')}, {sent} sent"
        for kind, dtype, count, parameters, sent in cells
    ]


def _transfer_cells(transfers: tuple[Transfer, ...]) -> list[tuple[str, str, str, str, str]]:
    """Return a table row for each kind and dtype of collectives.

    The cells are kind, dtype, number of collectives, number of parameters, and sent bytes.
    """
    found: list[tuple[str, str, str, str, str]] = []
    for kind, dtype in dict.fromkeys((transfer.kind, transfer.dtype) for transfer in transfers):
        same = [transfer for transfer in transfers if (transfer.kind, transfer.dtype) == (kind, dtype)]
        parameters = sum(len(transfer.parameters) for transfer in same)
        sent = sum(transfer.sent_bytes for transfer in same)
        found.append((kind, dtype_text(dtype), str(len(same)), str(parameters), size(sent)))
    return found
