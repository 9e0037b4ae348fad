"""Facts about a compiled graph that metrics count each time the graph runs."""

from __future__ import annotations

from torch import fx

from zgraph.compiler.frame_plan import FramePlan
from zgraph.graph import meta, nodes
from zgraph.graph.sizes import size_hint
from zgraph.graph.traffic import transfers, transfers_of
from zgraph.reporting.metrics.step_clock import CalledGraph, KeptGather
from zgraph.reporting.of_graph import GraphReport


def called_graph(report: GraphReport, plan: FramePlan, budget_bytes: int | None) -> CalledGraph:
    """Describe a final graph of a frame for metrics.

    Args:
        report: report of the graph.
        plan: plan of the frame, before lowering changes its graphs.
        budget_bytes: budget of the frame's steps; None: no limit.
    """
    return CalledGraph(
        frame=report.frame,
        direction=report.direction,
        sent_bytes=_sent_bytes(plan.graphs[report.direction].graph),
        kept_gathers=_kept_gathers(plan.graphs[report.direction].graph),
        peak_bytes=None if report.peak is None else report.peak.bytes,
        frame_peak_bytes=None if budget_bytes is None else plan.peak_bytes,
        budget_bytes=budget_bytes,
    )


def called_in_warm_up(backward: fx.Graph, final: CalledGraph) -> CalledGraph:
    """Describe the backward that runs in warm-up steps, for metrics; its peak is not predicted."""
    return CalledGraph(
        frame=final.frame,
        direction=final.direction,
        sent_bytes=_sent_bytes(backward),
        frame_peak_bytes=final.frame_peak_bytes,
        budget_bytes=final.budget_bytes,
    )


def _sent_bytes(graph: fx.Graph) -> int:
    return size_hint(sum(transfer.sent_bytes for transfer in transfers(graph)))


def _kept_gathers(graph: fx.Graph) -> tuple[KeptGather, ...]:
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: list[KeptGather] = []
    for node in nodes.call_functions(graph, nodes.is_kept_gather):
        chunk, handle = node.args[:2]
        assert isinstance(chunk, fx.Node) and isinstance(handle, fx.Node)
        sent_bytes = size_hint(sum(transfer.sent_bytes for transfer in transfers_of(node)))
        found.append(KeptGather(places[handle], meta.tensor_value(chunk).dtype, sent_bytes))
    return tuple(found)
