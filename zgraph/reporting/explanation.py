"""The result of `zgraph.explain`: lifetimes, buckets, time and memory of every compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from zgraph.compiler.memory_ledger import SpaceUse
from zgraph.graph.text import dtype_text
from zgraph.reporting.of_graph import Collective, GraphReport, LaneCopies
from zgraph.reporting.tables import Table, as_html, counted, duration, size
from zgraph.runtime.profiler import Measured
from zgraph.tiers.lanes import HOST_UPDATES

NAMES = 4  # parameter names in one line
NO_COSTS = (
    "times are not predicted, because the pipeline has no target; compile with "
    'options={"passes": zgraph.PassList(..., target=zgraph.Target(hardware=zgraph.calibrate()))}.'
)

_GRAPH_COLUMNS = (
    "frame",
    "graph",
    "nodes",
    "sent",
    "received",
    "predicted",
    "exposed",
    "measured",
    "blocked in waits",
    "calls",
    "predicted peak",
    "at",
    "largest there",
    "of unknown size",
    "measured peak",
)
_COLLECTIVE_COLUMNS = (
    "frame",
    "graph",
    "collective",
    "kind",
    "parameters",
    "sent",
    "predicted",
    "exposed",
    "measured in its wait",
    "why it is exposed",
)


@dataclass(frozen=True)
class Explanation:
    """Report on the compiled graphs of a model; `print` shows it as text.

    Attributes:
        graphs: reports of the graphs, in the order of compilation.
        measured: measurements of `zgraph.measure`, by frame and direction.
        feedback_bytes: bytes of error feedback that this rank keeps between steps; not part of a graph's peak.
    """

    graphs: tuple[GraphReport, ...]
    measured: Mapping[tuple[str, str], Measured] = field(default_factory=dict[tuple[str, str], Measured])
    feedback_bytes: int = 0

    def __str__(self) -> str:
        frames = list(dict.fromkeys(graph.frame for graph in self.graphs))
        lines = [f"zgraph.explain: {counted(len(self.graphs), 'graph')} of {counted(len(frames), 'frame')}"]
        for frame in frames:
            lines += self._frame_lines([graph for graph in self.graphs if graph.frame == frame])
        if self.feedback_bytes:
            lines.append(f"error feedback: {size(self.feedback_bytes)} a rank, beside the peaks of the graphs")
        if any(graph.us is None for graph in self.graphs):
            lines.append(NO_COSTS)
        return "\n".join(lines)

    def tables(self) -> list[Table]:
        """Return the report as tables for a notebook. Unlike the text, the tables have the names of all parameters."""
        lifetimes: list[tuple[str, ...]] = []
        for frame in dict.fromkeys(graph.frame for graph in self.graphs):
            found = next(graph.lifetimes for graph in self.graphs if graph.frame == frame)
            lifetimes += [(frame, name, str(lifetime)) for name, lifetime in found.items()]
        notes = [("error feedback of a rank", size(self.feedback_bytes))] if self.feedback_bytes else []
        notes += [(f"{graph.frame} {graph.direction}", text) for graph in self.graphs for text in graph.decisions]
        notes += [("time", NO_COSTS)] if any(graph.us is None for graph in self.graphs) else []
        return [
            Table("zgraph.explain: graphs", _GRAPH_COLUMNS, tuple(map(self._graph_cells, self.graphs))),
            Table("parameters", ("frame", "parameter", "lifetime"), tuple(lifetimes)),
            Table(
                "collectives",
                _COLLECTIVE_COLUMNS,
                tuple(
                    (graph.frame, graph.direction, *self._collective_cells(graph, collective))
                    for graph in self.graphs
                    for collective in graph.collectives
                ),
            ),
            Table(
                "copies between memory spaces",
                ("frame", "graph", "lane", "copies", "size", "predicted", "exposed"),
                tuple(
                    (
                        *(graph.frame, graph.direction, each.lane, str(each.count), size(each.bytes)),
                        *(_known(duration, each.us), _known(duration, each.exposed_us)),
                    )
                    for graph in self.graphs
                    for each in graph.copies
                ),
            ),
            Table(
                "memory of a rank",
                ("frame", "graph", "in", "parameters", "state of optimizers", "the step beside them", "together"),
                tuple(
                    (
                        *(graph.frame, graph.direction, line.space),
                        *map(size, (line.parameters, line.state, line.step, line.together)),
                    )
                    for graph in self.graphs
                    for line in graph.ledger
                    if line.together
                ),
            ),
            Table("notes", (), tuple(notes)),
        ]

    def _repr_html_(self) -> str:
        return as_html(self.tables())

    def _graph_cells(self, graph: GraphReport) -> tuple[str, ...]:
        measured = self.measured.get((graph.frame, graph.direction))
        return (
            graph.frame,
            graph.direction,
            str(graph.nodes),
            size(graph.sent_bytes),
            size(graph.received_bytes),
            _known(duration, graph.us),
            _known(duration, graph.exposed_us),
            _known(duration, measured and measured.us),
            _known(duration, measured and sum(measured.blocked_us.values())),
            str(measured.calls) if measured else "",
            _known(size, graph.peak and graph.peak.bytes),
            graph.peak.node if graph.peak else "",
            ", ".join(f"{name} {size(count)}" for name, count in graph.peak.largest) if graph.peak else "",
            ", ".join(graph.peak.unknown) if graph.peak else "",
            _known(size, measured and measured.peak_bytes),
        )

    def _collective_cells(self, graph: GraphReport, collective: Collective) -> tuple[str, ...]:
        measured = self.measured.get((graph.frame, graph.direction))
        return (
            collective.name,
            ", ".join(dict.fromkeys(f"{each.kind} {dtype_text(each.dtype)}" for each in collective.transfers)),
            ", ".join(collective.parameters),
            size(collective.sent_bytes),
            _known(duration, collective.us),
            _known(duration, collective.exposed_us),
            _known(duration, measured and measured.blocked_us.get(collective.name)),
            collective.reason,
        )

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
        sent, received = (size(count) for count in (graph.sent_bytes, graph.received_bytes))
        lines = [f"{graph.direction}: {counted(graph.nodes, 'node')}, {sent} sent, {received} received"]
        measured = self.measured.get((graph.frame, graph.direction))
        if graph.us is not None:
            lines.append(f"  predicted {graph.us:.0f} us, of which {graph.exposed_us:.0f} us are exposed")
        lines += [f"  {text}" for text in graph.decisions]
        if measured is not None:
            blocked = sum(measured.blocked_us.values())
            ratio = _ratio(measured.us, graph.us)
            lines.append(
                f"  measured {measured.us:.0f} us{ratio}, of which {blocked:.0f} us blocked in waits; "
                f"median of {counted(measured.calls, 'call')}"
            )
        if graph.peak is not None:
            largest = ", ".join(f"{name} {size(count)}" for name, count in graph.peak.largest)
            lines.append(f"  predicted peak {size(graph.peak.bytes)} at {graph.peak.node}: {largest}")
            others = graph.peak.elsewhere
            lines += [f"    and {size(count)} on the {name}" for name, count in others if count and not graph.ledger]
            if graph.peak.unknown:
                lines.append(f"    without {', '.join(graph.peak.unknown)}, whose size depends on data")
        if measured is not None and measured.peak_bytes is not None:
            ratio = _ratio(measured.peak_bytes, graph.peak.bytes if graph.peak is not None else None)
            lines.append(f"  measured peak {size(measured.peak_bytes)}{ratio}")
        lines += [f"  memory of a rank, {line.space}: {_ledger_line(line)}" for line in graph.ledger if line.together]
        lines += [f"  {_copies_line(copies)}" for copies in graph.copies]
        for collective in graph.collectives:
            blocked_us = None if measured is None else measured.blocked_us.get(collective.name)
            lines += [f"  {line}" for line in _collective_lines(collective, blocked_us)]
        return lines


def _ledger_line(line: SpaceUse) -> str:
    parts = {"parameters": line.parameters, "state of optimizers": line.state, "the step beside them": line.step}
    return f"{', '.join(f'{name} {size(count)}' for name, count in parts.items())}; together {size(line.together)}"


def _copies_line(copies: LaneCopies) -> str:
    what = "updates" if copies.lane == str(HOST_UPDATES) else "copies"
    text = f"{copies.lane}: {copies.count} {what}, {size(copies.bytes)}"
    if copies.us is None or copies.exposed_us is None:
        return text
    return f"{text}, {copies.us:.0f} us, of which {copies.exposed_us:.0f} us are exposed"


def _collective_lines(collective: Collective, blocked_us: float | None) -> list[str]:
    kinds = dict.fromkeys(f"{each.kind} {dtype_text(each.dtype)}" for each in collective.transfers)
    took = "" if collective.us is None else f", {collective.us:.0f} us"
    lines = [f"{collective.name}: {', '.join(kinds)}, {size(collective.sent_bytes)} sent{took}"]
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
    return f"{counted(len(names), 'parameter')}: {', '.join(names[:NAMES])}{more}"


def _known(text: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else text(value)
