"""`report.json`: a versioned document of plain tables; docs/report-json.md explains every field.

The file has the same bytes in every run of a program. Measured times, which differ between runs, are in `times.json`
in the same folder.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.data.memory import CLASSES, FEEDBACK, OPTIMIZER, PARAMETERS, SPACES
from zgraph.runtime.profiler import Measured

FORMAT, VERSION = "zgraph-report", "1.1"
REPORT, TIMES = "report.json", "times.json"
PLANS = ("pipeline", "sites")  # each in a file of its own, such as pipeline.json
Document = dict[str, Any]


def document_of(
    frames: Iterable[FrameData],
    *,
    rank: int,
    world_size: int,
    optimizer_bytes: int | None = None,
) -> Document:
    """Return the content of `report.json`.

    Args:
        frames: frames compiled by this rank.
        rank, world_size: rank of the process, and number of ranks.
        optimizer_bytes: size of the optimizer's state on this rank; None: unknown.
    """
    listed = list(frames)
    document: Document = {
        "format": FORMAT,
        "version": VERSION,
        "made_with": {"zgraph": _zgraph_version(), "torch": torch.__version__, "python": platform.python_version()},
        "rank": rank,
        "world_size": world_size,
        "memory_classes": list(CLASSES),
        "memory_spaces": list(SPACES),
        "at_rest": {} if optimizer_bytes is None else {OPTIMIZER: optimizer_bytes},
        "frames": [plain(frame, leave_out=("seconds",)) for frame in listed],
        "ranks": [{"rank": rank, "graphs": [row for frame in listed for row in _rows(frame)]}],
    }
    document["at_rest"] |= at_rest(document)
    return document


def at_rest(document: Document) -> dict[str, int]:
    """Return the bytes of parameters and of error feedback that the rank keeps between steps, by memory class."""
    found: dict[str, dict[str, int]] = {PARAMETERS: {}, FEEDBACK: {}}
    for frame in document["frames"]:
        table = frame["parameters"]
        found[PARAMETERS] |= dict(zip(table["name"], table["local_bytes"], strict=True))
        found[FEEDBACK] |= {
            name: max(count, found[FEEDBACK].get(name, 0))  # a frame of an evaluation has no feedback
            for name, count in zip(table["name"], table["feedback_bytes"], strict=True)
        }
    return {kind: sum(counts.values()) for kind, counts in found.items()}


def times_of(
    frames: Iterable[FrameData],
    seconds: Mapping[str, float],
    measured: Mapping[tuple[str, str], Measured],
) -> Document:
    """Return the content of `times.json`: all measured times.

    Args:
        frames: frames compiled by this rank.
        seconds: compile time by phase.
        measured: measurements of `zgraph.measure`, by frame and direction.
    """
    return {
        "format": f"{FORMAT}-times",
        "version": VERSION,
        "phases": dict(seconds),
        "passes": {frame.frame: list(frame.seconds) for frame in frames},
        "measured": [
            {"frame": frame, "direction": direction, **plain(found)} for (frame, direction), found in measured.items()
        ],
    }


def to_json(document: Mapping[str, Any]) -> str:
    """Return a document as compact ASCII text with sorted keys."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def plain(value: Any, leave_out: Sequence[str] = ()) -> Any:
    """Convert a value to JSON types: dataclasses become dicts, tuples become lists, infinity and NaN become None."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.name not in leave_out}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _rows(frame: FrameData) -> list[Document]:
    """Return one row per graph with its size, traffic, peak memory and predicted times, for comparing ranks."""
    return [
        {
            "frame": frame.frame,
            "direction": graph.direction,
            "nodes": len(graph.nodes.line),
            "sent_bytes": graph.sent_bytes,
            "peak_bytes": graph.peak_bytes,
            "predicted_us": graph.predicted_us,
            "exposed_us": graph.exposed_us,
        }
        for graph in frame.graphs
    ]


def _zgraph_version() -> str:
    try:
        return version("zgraph")
    except PackageNotFoundError:
        return "unknown"


def schema() -> Document:
    """Return the JSON Schema of `report.json`, read from the file in the package."""
    return json.loads((Path(__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
