"""Writes the folder of a report: `report.json` for each rank and frame, and further files made from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zgraph.errors import ZgraphError
from zgraph.reporting.data.frame import FrameData
from zgraph.reporting.export.chrome_trace import chrome_trace
from zgraph.reporting.export.reading import line_text, load
from zgraph.reporting.export.report_json import (
    FORMAT,
    REPORT,
    TIMES,
    VERSION,
    Document,
    document_of,
    times_of,
    to_json,
)
from zgraph.reporting.of_model import report_of
from zgraph.reporting.page.write_page import PAGE, page_text, write_page
from zgraph.reporting.summary import Report
from zgraph.runtime.groups import rank_and_world
from zgraph.torch_compat.dynamo import trace_artifact

_log = logging.getLogger(__name__)
Exporter = Callable[[Document], str]


@dataclass(frozen=True)
class About:
    """Facts about the rank that writes a report.

    Attributes:
        rank, world_size: rank of the process, and number of ranks.
        optimizer_bytes: size of the optimizer's state on this rank; None: unknown.
    """

    rank: int
    world_size: int
    optimizer_bytes: int | None = None


def report(model: nn.Module, directory: str | Path) -> Path:
    """Write the report of a compiled model to a folder: `zgraph.report(model, "out/")` after the first step.

    For each frame that this rank has compiled, `rank<r>/frame_<id>/` contains the page `index.html`, `report.json`,
    `times.json` with the results of `zgraph.measure`, and a trace for ui.perfetto.dev. The changes of each pass are
    included only if the model was compiled with `options={"dump": ...}`, or with a `Report` that has `keep_passes` set.
    If the folder cannot be written, a warning is logged.

    Args:
        model: module returned by `zgraph.shard` or `torch.compile`.
        directory: parent of the ranks' folders.

    Returns:
        The folder of this rank.

    Raises:
        ZgraphError: the model was not sharded, or nothing has been compiled.
    """
    found = report_of(model, "report")
    return write_report(Path(directory), found)


def write_report(
    directory: Path, found: Report, optimizer_bytes: int | None = None, world_size: int | None = None
) -> Path:
    """Write the folders of all frames of a report; if a folder cannot be written, log a warning and stop.

    Args:
        directory: parent of the ranks' folders.
        found: report to write.
        optimizer_bytes: size of the optimizer's state on this rank; None: unknown.
        world_size: number of ranks of a planned cluster; None: number of ranks of this process's default group.

    Returns:
        The folder of this rank.
    """
    rank, found_size = rank_and_world()
    about = About(rank, world_size or found_size, optimizer_bytes)
    newest = {frame.frame: frame for frame in found.frames}
    for frame in newest.values():
        if not write_frame(directory, frame, found, about):
            break
    return directory / f"rank{rank}"


def write_plans(folder: Path, plans: Mapping[str, Mapping[str, Any]]) -> None:
    """Add plans to a rank's folder, and a page that shows them and all frames.

    If the folder cannot be written, a warning is logged.

    Args:
        folder: folder of a rank, returned by `write_report`.
        plans: plans by name: "pipeline" as returned by `pipeline_document`, "sites" by `OuterPlan.document`.
    """
    try:
        files = {name: {"format": f"{FORMAT}-{name}", "version": VERSION, **plan} for name, plan in plans.items()}
        _write(folder, [(f"{name}.json", to_json(document)) for name, document in files.items()])
        write_page(load(folder), folder)
    except (OSError, ZgraphError) as error:
        _log.warning("zgraph: cannot write the report to %s: %s", folder, error)


def write_frame(directory: Path, frame: FrameData, found: Report, about: About | None = None) -> bool:
    """Write the folder of one frame; return whether that succeeded. A failure is logged as a warning."""
    about = about or About(*rank_and_world())
    folder = folder_of(directory, about.rank, frame.frame)
    try:
        document = document_of([frame], **vars(about))
        times = times_of(
            [frame], found.seconds, {key: each for key, each in found.measured.items() if key[0] == frame.frame}
        )
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, [(REPORT, to_json(document)), (TIMES, to_json(times))])
        _write(folder, files_of(load(folder / REPORT)))  # the same files as `zgraph report` makes later
    except Exception as error:  # a report must not end a training run
        _log.warning("zgraph: cannot write the report to %s: %s", folder, error)
        return False
    return True


def _write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    for name, text in files:
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")


def folder_of(directory: Path, rank: int, frame: str) -> Path:
    """Return the folder for the files of one compiled frame; each rank has folders of its own."""
    return directory / f"rank{rank}" / f"frame_{frame.replace('/', '_')}"


def files_of(document: Document) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a frame's page and trace. A file that cannot be made is skipped with a warning.

    Args:
        document: document of one frame, with its measured times if there are any.
    """
    makers: dict[str, Exporter] = {
        PAGE: page_text,
        "trace.json": lambda found: to_json(chrome_trace(found)),
    }
    (frame,) = document["frames"]
    for name, make in makers.items():
        try:
            yield name, make(document)
        except Exception:
            _log.warning("zgraph: cannot make %s of frame %s", name, frame["frame"], exc_info=True)


def trace_graphs(frame: FrameData) -> None:
    """Add the final graphs and the report to torch's structured trace for tlparse, if TORCH_TRACE is on."""
    try:
        for graph in frame.graphs:
            trace_artifact(
                f"zgraph_{graph.direction}_graph", "string", lambda graph=graph: _text_of(frame, graph.nodes.line)
            )
        rank, world_size = rank_and_world()
        trace_artifact("zgraph_report", "json", lambda: to_json(document_of([frame], rank=rank, world_size=world_size)))
    except Exception:
        _log.warning("zgraph: cannot add frame %s to torch's trace", frame.frame, exc_info=True)


def _text_of(frame: FrameData, lines: Sequence[int]) -> str:
    shown: Document = {"lines": vars(frame.lines), "strings": frame.strings}
    return "\n".join(line_text(shown, line) for line in lines)
