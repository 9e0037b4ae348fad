"""Reads reports: merges the `report.json` files of several frames and ranks, and converts table entries to texts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zgraph.errors import ZgraphError
from zgraph.reporting.export.report_json import FORMAT, PLANS, REPORT, TIMES, VERSION, Document, at_rest

TEXTS = ("op", "target", "shape", "dtype", "stride", "module", "source", "parameters")
TIMED = ("cost_us", "start_us", "end_us", "exposed_us")


def load(path: Path) -> Document:
    """Read a report into one document. `path` is one frame's folder, or a directory with several frames and ranks.

    The frames, the measured `times` and the pipeline's plan (if there is one) are those of the lowest rank. The list
    `ranks` has, for every rank, the predictions for its graphs and (if there are any) its measured `times`.

    Raises:
        ZgraphError: a report is missing, or its version is unknown.
    """
    files = sorted(path.rglob(REPORT), key=_by_numbers) if path.is_dir() else [path]
    documents = [_load_one(file) for file in files]
    if not documents:
        raise ZgraphError(
            f'zgraph: there is no {REPORT} in {path}; write one with options={{"dump": ...}}, or zgraph.report(model, '
            "directory)."
        )
    ranks = sorted({document["rank"] for document in documents})
    merged = [_merge([each for each in documents if each["rank"] == rank]) for rank in ranks]
    first = merged[0]
    first["ranks"] = [
        {**row, **({"times": each["times"]} if "times" in each else {})} for each in merged for row in each["ranks"]
    ]
    for name in PLANS if path.is_dir() else ():
        for file in sorted(path.rglob(f"{name}.json"), key=_by_numbers)[:1]:
            first[name] = _document_of(file, f"{FORMAT}-{name}")
    return first


def _by_numbers(path: Path) -> list[Any]:
    """Return a sort key that puts frame_2 before frame_10."""
    return [[int(part) if part.isdigit() else part for part in re.split(r"(\d+)", piece)] for piece in path.parts]


def _document_of(file: Path, wanted: str) -> Document:
    try:
        document: Document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ZgraphError(f"zgraph: cannot read the report {file}: {error}") from error
    found = document.get("format"), str(document.get("version", "")).split(".")[0]
    if found != (wanted, VERSION.split(".")[0]):
        raise ZgraphError(
            f"zgraph: {file} is a {found[0]} of version {document.get('version')}, and this zgraph reads {wanted} of "
            f"version {VERSION}; write it anew."
        )
    return document


def _load_one(file: Path) -> Document:
    document = _document_of(file, FORMAT)
    times = file.with_name(TIMES)
    if times.exists():
        document["times"] = json.loads(times.read_text(encoding="utf-8"))
    return document


def _merge(documents: Sequence[Document]) -> Document:
    """Merge the documents of one rank's frames into one document."""
    first, *others = documents
    for other in others:
        first["frames"] += other["frames"]
        first["ranks"][0]["graphs"] += other["ranks"][0]["graphs"]
        if "times" in other:
            times = first.setdefault("times", {**other["times"], "passes": {}, "measured": []})
            times["phases"] = other["times"]["phases"]  # each document has the phases up to its own compile
            times["passes"] |= other["times"]["passes"]
            times["measured"] += other["times"]["measured"]
    first["at_rest"] |= at_rest(first)
    return first


def line_text(frame: Document, line: int) -> str:
    """Return line number `line` of a frame's code, as dumps print it."""
    lines, strings = frame["lines"], frame["strings"]
    name, value, call = lines["name"][line], strings[lines["value"][line]], lines["call"][line]
    parameters = strings[lines["parameters"][line]]
    return f"{name}: {value} = {call}" + (f"  # {parameters}" if parameters else "") if value else call


def names_of(frame: Document, graph: Document) -> list[str]:
    """Return the names of a graph's nodes, in program order."""
    names = frame["lines"]["name"]
    return [names[line] for line in graph["nodes"]["line"]]


def unrolled(runs: Sequence[Sequence[int]]) -> list[int]:
    """Expand runs (first, count) to a list of line numbers: [(4, 3), (2, 1)] becomes [4, 5, 6, 2]."""
    return [number for first, count in runs for number in range(first, first + count)]


def texts_of(frame: Document, direction: str) -> Iterator[tuple[Document | None, list[int]]]:
    """Yield the line numbers of a graph's text before any pass and after each pass.

    The pairs are (None, lines) for the captured graph, then (pass, lines) for each pass on this graph.
    """
    lines = unrolled(frame["captured"].get(direction, []))
    yield None, lines
    for entry in frame["passes"]:
        if entry["direction"] == direction:
            lines = list(lines)
            for at, removed, runs in reversed(entry["hunks"]):
                lines[at : at + removed] = unrolled(runs)
            yield entry, lines


def bytes_by_class(document: Document, frame: Document) -> dict[str, list[int]]:
    """Return the live device bytes of each memory class at each position of a frame's step.

    The class "workspace" has the workspace of each call. The sum over all classes is the memory curve.
    """
    memory, classes = frame["memory"], document["memory_classes"]
    storages = memory["storages"]
    change = {name: [0] * (memory["nodes"] + 1) for name in classes}
    for number, kind in enumerate(storages["kind"]):
        if not storages["held"][number] and document["memory_spaces"][storages["space"][number]] == "device":
            change[classes[kind]][storages["first"][number]] += storages["bytes"][number]
            change[classes[kind]][storages["last"][number] + 1] -= storages["bytes"][number]
    found: dict[str, list[int]] = {}
    for name, steps in change.items():
        alive, found[name] = 0, []
        for step in steps[:-1]:
            alive += step
            found[name].append(alive)
    return found | {"workspace": list(memory["workspace_bytes"])}


def rows_of(document: Document, frame: Document, graph: Document) -> Iterator[dict[str, Any]]:
    """Yield each node of a graph as a dict of texts and numbers; times that were not predicted are None."""
    columns, strings, lanes = graph["nodes"], frame["strings"], frame["lanes"]
    for number, line in enumerate(columns["line"]):
        row: dict[str, Any] = {"position": number, "name": frame["lines"]["name"][line], "code": line_text(frame, line)}
        row |= {name: strings[columns[name][number]] for name in TEXTS}
        row |= {name: columns[name][number] for name in ("bytes", "inputs")}
        row |= {name: columns[name] and columns[name][number] for name in TIMED}
        row["storage"] = document["memory_classes"][columns["storage"][number]]
        row["lane"] = lanes[columns["lane"][number]] if columns["lane"][number] >= 0 else None
        yield row
