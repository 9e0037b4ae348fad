"""A graph of a report as GraphML, which networkx, yEd, Gephi and Cytoscape read.

networkx.write_graphml writes the same, but takes seconds for ten thousand nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from xml.sax.saxutils import escape

from zgraph.reporting.export.reading import rows_of
from zgraph.reporting.export.report_json import Document
from zgraph.reporting.network import plain_text

_TEXT, _WHOLE, _REAL = "string", "long", "double"
# Columns of report.json that become attributes of nodes, with their types.
ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "position": _WHOLE,
        **dict.fromkeys(("code", "op", "target", "shape", "dtype", "stride", "module", "source", "parameters"), _TEXT),
        "bytes": _WHOLE,
        **dict.fromkeys(("storage", "lane"), _TEXT),
        **dict.fromkeys(("cost_us", "start_us", "end_us", "exposed_us"), _REAL),
    }
)
_NAMESPACE = "http://graphml.graphdrawing.org/xmlns"
_HEAD = (
    f'<graphml xmlns="{_NAMESPACE}" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
    f'xsi:schemaLocation="{_NAMESPACE} {_NAMESPACE}/1.0/graphml.xsd">'
)
_END = "</graph>\n</graphml>"


def graphml(document: Document, frame: Document, graph: Document) -> str:
    """One graph of a frame as text; attributes are the columns of its nodes, and what is unknown is left out."""
    return "\n".join([_HEAD, *_keys(), '<graph edgedefault="directed">', *_elements(document, frame, graph), _END, ""])


def _keys() -> Iterator[str]:
    for name, kind in ATTRIBUTES.items():
        yield f'<key id="{name}" for="node" attr.name="{name}" attr.type="{kind}"/>'
    yield f'<key id="kind" for="edge" attr.name="kind" attr.type="{_TEXT}"/>'


def _elements(document: Document, frame: Document, graph: Document) -> Iterator[str]:
    """All nodes, and then all edges: "wait" from a collective's start to its wait, else "data"."""
    columns = graph["collectives"]
    waits = {(start, wait) for start, wait in zip(columns["node"], columns["wait"], strict=True) if wait >= 0}
    written = _Written()
    writers: list[tuple[str, Callable[[Any], str]]] = [
        (name, written.text if kind == _TEXT else repr if kind == _WHOLE else lambda value: repr(float(value)))
        for name, kind in ATTRIBUTES.items()
    ]
    names: dict[str, int] = {}
    edges: list[str] = []
    keys: list[str] = []
    for row in rows_of(document, frame, graph):
        position = row["position"]
        name = written.text(row["name"])
        keys.append(f"{name}#{position}" if name in names else name)  # a faulty pass may name two alike
        names[keys[-1]] = position
        data = [
            f'<data key="{attribute}">{write(row[attribute])}</data>'
            for attribute, write in writers
            if row[attribute] not in (None, "")
        ]
        yield f'<node id="{keys[-1]}">{"".join(data)}</node>'
        for source in dict.fromkeys(row["inputs"]):
            kind = "wait" if (source, position) in waits else "data"
            edges.append(f'<edge source="{keys[source]}" target="{keys[-1]}"><data key="kind">{kind}</data></edge>')
    yield from edges


class _Written:
    """Texts as XML holds them, in elements and in attributes; most come again and again."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def text(self, value: str) -> str:
        found = self.known.get(value)
        if found is None:
            found = self.known[value] = escape(plain_text(value), {'"': "&quot;"})
        return found
