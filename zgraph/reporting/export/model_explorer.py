"""A report for Google's Model Explorer: a graph collection, nested by the user's modules.

`model-explorer model_explorer.json` shows it. Source: ai-edge-model-explorer 0.1.34, `graph_builder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zgraph.reporting.export.reading import rows_of
from zgraph.reporting.export.report_json import Document

SHOWN = ("code", "source", "parameters", "stride", "storage", "lane", "cost_us", "start_us", "end_us", "exposed_us")


def model_explorer(document: Document) -> Document:
    """A graph for each direction of each frame, the newest frame's first."""
    graphs = [_graph(document, frame, graph) for frame in reversed(document["frames"]) for graph in frame["graphs"]]
    return {"label": f"zgraph, rank {document['rank']}", "graphs": graphs}


def _graph(document: Document, frame: Document, graph: Document) -> Document:
    return {
        "id": f"frame {frame['frame']} {graph['direction']}",
        "nodes": [_node(row) for row in rows_of(document, frame, graph)],
        "groupNodeAttributes": {"": _about(graph)},
    }


def _about(graph: Document) -> dict[str, str]:
    """What the side panel says of the whole graph."""
    shown = ("predicted_us", "exposed_us", "sent_bytes", "peak_bytes")
    return {name: str(graph[name]) for name in shown if graph[name] is not None}


def _node(row: Mapping[str, Any]) -> Document:
    value = {"tensor_shape": f"{row['dtype']}{row['shape']}", "bytes": str(row["bytes"])}
    return {
        "id": str(row["position"]),
        "label": row["name"],
        "namespace": row["module"].replace(".", "/"),
        "attrs": _pairs({name: str(row[name]) for name in SHOWN if row[name] not in (None, "")}),
        "incomingEdges": [
            {"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, source in enumerate(row["inputs"])
        ],
        "outputsMetadata": [{"id": "0", "attrs": _pairs(value)}] if row["shape"] else [],
    }


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]
