"""Facts about compiled graphs that `zgraph.Metrics` adds up at each call of a graph."""

from __future__ import annotations

from torch import fx

from zgraph.compiler.frame_plan import FramePlan
from zgraph.graph import meta, nodes
from zgraph.graph.sizes import size_hint
from zgraph.graph.traffic import transfers, transfers_of
from zgraph.reporting.metrics.step_clock import CalledGraph, KeptGather
from zgraph.reporting.of_graph import GraphReport


def called_graph(report: GraphReport, plan: FramePlan, budget_bytes: int | None) -> CalledGraph:
    """Return the facts about one final graph that metrics need.

    Call this before lowering, which changes the plan's graphs.

    Args:
        report: report of the graph.
        plan: plan of the graph's frame.
        budget_bytes: memory budget of a step; None: no limit.
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
    """Return the facts about the backward graph that runs during warm-up steps; its peak memory is not predicted.

    Args:
        backward: graph that runs during warm-up.
        final: facts about the graph that runs after warm-up.
    """
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
