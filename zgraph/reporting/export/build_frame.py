"""Builds a frame's part of `report.json` from the frame's plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from zgraph.analysis.hardware import Hardware
from zgraph.analysis.liveness import MemoryCurve, memory_curve, step_curve
from zgraph.compiler.frame_plan import FramePlan
from zgraph.compiler.graph_pass import Direction
from zgraph.graph import meta, nodes
from zgraph.graph.sizes import size_hint, tensor_bytes, tensors_of
from zgraph.graph.text import dtype_text, parameters_text, stride_text, target_text, unprintable
from zgraph.reporting.data.frame import (
    CollectiveColumns,
    FrameData,
    GraphData,
    MemoryData,
    NodeColumns,
    PassData,
    Strings,
)
from zgraph.reporting.data.line_pool import LinePool
from zgraph.reporting.data.memory import ACTIVATIONS, CLASSES, StorageClasses, memory_data
from zgraph.reporting.export.parameters import KnownParameter, feedback_bytes, parameter_columns
from zgraph.reporting.export.record_passes import PassRecorder, unrecorded
from zgraph.reporting.of_graph import GraphReport, Prediction

_log = logging.getLogger(__name__)


def build_frame(
    plan: FramePlan,
    predictions: Mapping[Direction, Prediction],
    reports: Sequence[GraphReport],
    known: Mapping[str, KnownParameter],
    *,
    lowering: str,
    recorder: PassRecorder | None = None,
) -> FrameData | None:
    """Build the data of a frame for `report.json`; if this fails, log a warning and return None.

    Call this before lowering, which changes the graphs.

    Args:
        plan: plan of the frame.
        predictions: predictions of the frame's final graphs.
        reports: reports of the frame's final graphs, in execution order.
        known: facts about the parameters that the frame reads, by name.
        lowering: "inductor" or "fx".
        recorder: record of each pass's changes; None if passes were not recorded.
    """
    try:
        return _build(plan, predictions, reports, known, lowering, recorder)
    except Exception:  # a report must not fail a compile
        _log.warning("zgraph: nothing to report of frame %s", reports[0].frame if reports else "?", exc_info=True)
        return None


def _build(
    plan: FramePlan,
    predictions: Mapping[Direction, Prediction],
    reports: Sequence[GraphReport],
    known: Mapping[str, KnownParameter],
    lowering: str,
    recorder: PassRecorder | None,
) -> FrameData:
    pool = LinePool(Strings()) if recorder is None else recorder.pool
    lanes = Lanes()
    graphs: dict[Direction, fx.Graph] = {report.direction: plan.graphs[report.direction].graph for report in reports}
    classes: dict[Direction, StorageClasses] = {
        direction: StorageClasses(graph, direction) for direction, graph in graphs.items()
    }
    numbers = {name: number for number, name in enumerate(known)}
    found: list[GraphData] = []
    for report in reports:
        graph, prediction = graphs[report.direction], predictions[report.direction]
        order = list(graph.nodes)
        place = {node: number for number, node in enumerate(order)}
        columns = _node_columns(order, place, prediction, classes[report.direction], pool, graph, lanes)
        critical = [] if prediction.timeline is None else prediction.timeline.critical_path()
        found.append(
            GraphData(
                direction=report.direction,
                nodes=columns,
                collectives=_collective_columns(report, place, numbers, pool.strings),
                predicted_us=rounded(report.us),
                exposed_us=rounded(report.exposed_us),
                sent_bytes=number_of(report.sent_bytes),
                received_bytes=number_of(report.received_bytes),
                critical=[place[node] for node in critical],
                peak_bytes=None if report.peak is None else report.peak.bytes,
            )
        )
    return FrameData(
        frame=reports[0].frame,
        reason=reports[0].reason,
        lowering=lowering,
        from_step=plan.variants[-1].from_step,
        hardware=_machine(plan.ctx.hardware),
        strings=pool.strings.texts,
        lanes=lanes.names,
        lines=pool.columns,
        graphs=found,
        memory=_memory(plan, graphs, classes),
        captured={} if recorder is None else recorder.captured,
        passes=_passes(plan, recorder),
        parameters=parameter_columns(known, reports, found, feedback_bytes(graphs.values()), pool.strings),
        seconds=[run.seconds for run in plan.runs],
    )


def _passes(plan: FramePlan, recorder: PassRecorder | None) -> list[PassData]:
    if recorder is None or len(recorder.passes) != len(plan.runs):
        return unrecorded(plan.runs, plan.ctx.notes)
    for seen, run in zip(recorder.passes, plan.runs, strict=True):
        seen.changed = run.changed
    return recorder.passes


def _machine(hardware: Hardware | None) -> dict[str, str | int] | None:
    if hardware is None:
        return None
    return {"name": hardware.name, "backend": hardware.backend, "memory_bytes": int(hardware.memory_bytes)}


class Lanes:
    """Numbers lanes in the order of their first use; lane 0 is "compute"."""

    def __init__(self) -> None:
        self.names = ["compute"]

    def number(self, lane: object) -> int:
        if lane is None:
            return -1
        name = str(lane)
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def _node_columns(
    order: Sequence[fx.Node],
    place: Mapping[fx.Node, int],
    known: Prediction,
    classes: StorageClasses,
    pool: LinePool,
    graph: fx.Graph,
    lanes: Lanes,
) -> NodeColumns:
    strings = pool.strings

    def texts(show: Callable[[fx.Node], str]) -> list[int]:
        found: list[int] = []
        for node in order:
            try:
                text = show(node)
            except Exception:
                text = unprintable(node)
            found.append(strings.number(text))
        return found

    timeline, costs = known.timeline, known.costs or {}
    spans = None if timeline is None else [timeline.spans[node] for node in order]
    return NodeColumns(
        line=pool.lines_of(graph),
        op=texts(lambda node: node.op),
        target=texts(lambda node: target_text(node.target)),
        shape=texts(lambda node: ", ".join(f"[{', '.join(map(str, each.shape))}]" for each in tensors_of(node))),
        dtype=texts(lambda node: ", ".join(dtype_text(each.dtype) for each in tensors_of(node))),
        stride=texts(lambda node: ", ".join(filter(None, map(stride_text, tensors_of(node))))),
        module=texts(meta.module_path),
        source=texts(meta.source_line),
        parameters=texts(parameters_text),
        bytes=[_bytes_of(node) for node in order],
        storage=[CLASSES.index(classes.found.get(node, ACTIVATIONS)) for node in order],
        lane=[lanes.number(costs[node].lane if node in costs else None) for node in order],
        cost_us=None if spans is None else [_us(costs[node].us if node in costs else 0.0) for node in order],
        start_us=None if spans is None else [_us(span.begin_us) for span in spans],
        end_us=None if spans is None else [_us(span.end_us) for span in spans],
        exposed_us=None if timeline is None else [_us(timeline.exposed_us.get(node, 0.0)) for node in order],
        inputs=[[place[source] for source in node.all_input_nodes if source in place] for node in order],
    )


def _collective_columns(
    report: GraphReport, place: Mapping[fx.Node, int], numbers: Mapping[str, int], strings: Strings
) -> CollectiveColumns:
    columns = CollectiveColumns()
    named = {node.name: node for node in place}
    predicted, exposed = list[float](), list[float]()
    for each in report.collectives:
        start, first = named[each.name], each.transfers[0]
        wait = nodes.wait_of(start) if nodes.is_start(start) else None
        columns.node.append(place[start])
        columns.wait.append(-1 if wait is None else place[wait])
        columns.kind.append(strings.number(", ".join(transfer.kind for transfer in each.transfers)))
        columns.group.append(strings.number(first.group_name))
        columns.group_size.append(first.group_size)
        columns.dtype.append(strings.number(dtype_text(first.dtype)))
        columns.codec.append(strings.number(", ".join(first.methods)))
        columns.payload_bytes.append(number_of(sum(transfer.payload_bytes for transfer in each.transfers)))
        columns.sent_bytes.append(number_of(each.sent_bytes))
        columns.received_bytes.append(number_of(each.received_bytes))
        columns.parameters.append([numbers[name] for name in each.parameters if name in numbers])
        columns.reason.append(strings.number(each.reason))
        predicted.append(_us(each.us or 0.0))
        exposed.append(_us(each.exposed_us or 0.0))
    if report.us is not None:
        columns.predicted_us, columns.exposed_us = predicted, exposed
    return columns


def _memory(
    plan: FramePlan, graphs: Mapping[Direction, fx.Graph], classes: Mapping[Direction, StorageClasses]
) -> MemoryData | None:
    try:
        return memory_data(_curve(plan, graphs), graphs, classes, plan.ctx.plan_bytes)
    except Exception:
        _log.warning("zgraph: no memory curve for a report", exc_info=True)
        return None


def _curve(plan: FramePlan, graphs: Mapping[Direction, fx.Graph]) -> MemoryCurve:
    """Return the memory curve of a step; bytes are counted as for the memory budget."""
    if "forward" not in graphs:  # inference, a whole step
        (whole,) = graphs.values()
        return memory_curve(whole, agreed=True)
    assert plan.ctx.user_outputs is not None
    return step_curve(graphs["forward"], graphs["backward"], user_outputs=plan.ctx.user_outputs, agreed=True)


def rounded(us: float | None) -> float | None:
    return None if us is None else _us(us)


def _us(us: float) -> float:
    """Round microseconds to three decimals; whole numbers become ints, which take less space in JSON."""
    found = round(us, 3)
    return int(found) if found == int(found) else found


def number_of(count: Any) -> int:
    """Return a size as a number; for a symbolic size, the hint from tracing."""
    return size_hint(count)


def _bytes_of(node: fx.Node) -> int:
    try:
        return sum(tensor_bytes(tensor) for tensor in tensors_of(node))
    except Exception:
        return 0
