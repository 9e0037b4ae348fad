"""A graph of a report in the DOT language of graphviz, with a cluster for each of the user's modules."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from zgraph.reporting.export.reading import rows_of
from zgraph.reporting.export.report_json import Document

COLOURS = MappingProxyType(
    {
        "parameters": "#dbe9f6",
        "gathered": "#9ecae1",
        "gradients": "#fdd0a2",
        "communication buffers": "#fdae6b",
        "error feedback": "#d9c2e9",
        "inputs": "#eeeeee",
    }
)


def dot(document: Document, frame: Document, graph: Document) -> str:
    """One graph of a frame; edges from a collective's start to its wait are bold."""
    columns = graph["collectives"]
    waits = {(start, wait) for start, wait in zip(columns["node"], columns["wait"], strict=True) if wait >= 0}
    rows = list(rows_of(document, frame, graph))
    modules: dict[str, list[str]] = {}
    for row in rows:
        us = "" if row["cost_us"] is None or row["lane"] is None else f"{row['cost_us']:.1f} us on {row['lane']}"
        label = "\n".join(filter(None, (row["name"], row["target"], f"{row['dtype']}{row['shape']}", us)))
        colour = COLOURS.get(row["storage"], "#ffffff")
        modules.setdefault(row["module"], []).append(
            f"n{row['position']} [label={quoted(label)}, tooltip={quoted(row['code'])}, fillcolor={quoted(colour)}];"
        )
    lines = [
        f"digraph {quoted(graph['direction'])} {{",
        '  node [shape=box, style=filled, fontname="monospace", fontsize=10];',
        *_clusters(modules),
    ]
    for row in rows:
        for source in dict.fromkeys(row["inputs"]):
            bold = " [style=bold]" if (source, row["position"]) in waits else ""
            lines.append(f"  n{source} -> n{row['position']}{bold};")
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(modules: dict[str, list[str]]) -> Iterator[str]:
    for number, (module, statements) in enumerate(modules.items()):
        if not module:
            yield from (f"  {statement}" for statement in statements)
            continue
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={quoted(module)};"
        yield from (f"    {statement}" for statement in statements)
        yield "  }"


def quoted(text: str) -> str:
    """A string of the DOT language, whatever it holds; what cannot be printed is escaped."""
    escaped = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
