"""What `zgraph.explain` returns: lifetimes, buckets, time and memory of every compiled graph, to print and to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zgraph.graph.text import dtype_text
from zgraph.reporting.of_graph import Collective, GraphReport
from zgraph.runtime.profiler import Measured

NAMES = 4  # of parameters that one line spells out
NO_COSTS = (
    "time is not predicted, for the pipeline was given no hardware; compile with "
    'options={"pipeline": zgraph.Pipeline(zgraph.passes.presets.default(hardware=zgraph.calibrate()))}.'
)


@dataclass(frozen=True)
class Explanation:
    """The compiled graphs of a model; `print` it.

    Attributes:
        graphs: in the order in which they were compiled.
        measured: by frame and direction; of those that have run under `zgraph.measure`.
        feedback_bytes: what error feedback keeps on this rank from step to step. A graph's peak counts what the graph
            is given and allocates, so this comes on top.
    """

    graphs: tuple[GraphReport, ...]
    measured: Mapping[tuple[str, str], Measured] = field(default_factory=dict[tuple[str, str], Measured])
    feedback_bytes: int = 0

    def __str__(self) -> str:
        frames = list(dict.fromkeys(graph.frame for graph in self.graphs))
        lines = [f"zgraph.explain: {_count(self.graphs, 'graph')} of {_count(frames, 'frame')}"]
        for frame in frames:
            lines += self._frame_lines([graph for graph in self.graphs if graph.frame == frame])
        if self.feedback_bytes:
            lines.append(f"error feedback: {_size(self.feedback_bytes)} a rank, beside the peaks of the graphs")
        if any(graph.us is None for graph in self.graphs):
            lines.append(NO_COSTS)
        return "\n".join(lines)

    def _frame_lines(self, graphs: Sequence[GraphReport]) -> list[str]:
        lines = [f"frame {graphs[0].frame}"]
        lifetimes = graphs[0].lifetimes
        for lifetime in dict.fromkeys(lifetimes.values()):
            names = [name for name, found in lifetimes.items() if found == lifetime]
            lines.append(f"  {lifetime}: {_parameters(names)}")
        for graph in graphs:
            lines += [f"  {line}" for line in self._graph_lines(graph)]
        return lines

    def _graph_lines(self, graph: GraphReport) -> list[str]:
        sent, received = (_size(count) for count in (graph.sent_bytes, graph.received_bytes))
        lines = [f"{graph.direction}: {_count(range(graph.nodes), 'node')}, {sent} sent, {received} received"]
        measured = self.measured.get((graph.frame, graph.direction))
        if graph.us is not None:
            lines.append(f"  predicted {graph.us:.0f} us, of which {graph.exposed_us:.0f} us are exposed")
        if measured is not None:
            blocked = sum(measured.blocked_us.values())
            ratio = _ratio(measured.us, graph.us)
            lines.append(
                f"  measured {measured.us:.0f} us{ratio}, of which {blocked:.0f} us blocked in waits; "
                f"median of {_count(range(measured.calls), 'call')}"
            )
        if graph.peak is not None:
            largest = ", ".join(f"{name} {_size(count)}" for name, count in graph.peak.largest)
            lines.append(f"  predicted peak {_size(graph.peak.bytes)} at {graph.peak.node}: {largest}")
            if graph.peak.unknown:
                lines.append(f"    without {', '.join(graph.peak.unknown)}, whose size only the data tells")
        if measured is not None and measured.peak_bytes is not None:
            ratio = _ratio(measured.peak_bytes, graph.peak.bytes if graph.peak is not None else None)
            lines.append(f"  measured peak {_size(measured.peak_bytes)}{ratio}")
        for collective in graph.collectives:
            blocked_us = None if measured is None else measured.blocked_us.get(collective.name)
            lines += [f"  {line}" for line in _collective_lines(collective, blocked_us)]
        return lines


def _collective_lines(collective: Collective, blocked_us: float | None) -> list[str]:
    kinds = dict.fromkeys(f"{each.kind} {dtype_text(each.dtype)}" for each in collective.transfers)
    took = "" if collective.us is None else f", {collective.us:.0f} us"
    lines = [f"{collective.name}: {', '.join(kinds)}, {_size(collective.sent_bytes)} sent{took}"]
    if collective.parameters:
        lines.append(f"  {_parameters(collective.parameters)}")
    if collective.exposed_us:
        lines.append(f"  exposed for {collective.exposed_us:.0f} us: {collective.reason}")
    if blocked_us is not None:
        lines.append(f"  measured: blocked for {blocked_us:.0f} us")
    return lines


def _ratio(measured: float, predicted: float | None) -> str:
    return f" ({measured / predicted:.2f} of predicted)" if predicted else ""


def _parameters(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{_count(names, 'parameter')}: {', '.join(names[:NAMES])}{more}"


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count} bytes"
