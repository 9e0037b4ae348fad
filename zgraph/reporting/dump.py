"""Dumps: the code of each graph after each pass, with its peak memory and a diff from the code before the pass."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from zgraph.analysis.liveness import memory_curve
from zgraph.analysis.storages import mortal_inputs
from zgraph.compiler.graph_pass import Direction, GraphPass
from zgraph.graph.text import graph_text, safely, shown

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Dumper:
    """Writes the graphs of one compiled frame to `directory/rank<r>/frame_<id>/`.

    If the directory cannot be written, a warning is logged, and training continues.
    """

    directory: Path
    rank: int
    frame: str
    _before: dict[Direction, list[str]] = field(default_factory=dict[Direction, list[str]])
    _peaks: dict[Direction, str] = field(default_factory=dict[Direction, str])
    _count: int = 0
    failed: bool = False

    def captured(self, direction: Direction, graph: fx.Graph) -> None:
        """Dump a graph before any pass."""
        self._write(direction, "captured", "as captured", graph, ())

    def after(self, graph_pass: GraphPass, direction: Direction, graph: fx.Graph, notes: tuple[str, ...]) -> None:
        """Dump a graph after a pass."""
        # An option's repr may hold an address, which would differ from run to run.
        title = safely(lambda: re.sub(r" at 0x[0-9a-f]+", "", repr(graph_pass)), graph_pass.name)
        self._write(direction, re.sub(r"\W", "_", graph_pass.name), f"after {title}", graph, notes)

    def kernels(self, sources: Mapping[str, str]) -> None:
        """Dump the source code of the kernels generated for the frame.

        Args:
            sources: source code by file name.
        """
        self._save({name: source.splitlines() for name, source in sources.items()})

    def _write(self, direction: Direction, label: str, title: str, graph: fx.Graph, notes: tuple[str, ...]) -> None:
        lines = graph_text(graph).splitlines()
        before = self._before.get(direction)
        self._before[direction] = lines
        stem = f"{self._count:02}_{label}.{direction}"
        self._count += 1
        comments = [f"{title}, {direction} graph, {len(lines)} nodes", self._peak(direction, graph), *notes]
        head = [f"# {' '.join(shown(lambda text=text: str(text), text).split())}" for text in comments]
        files = {f"{stem}.py": [*head, *lines]}
        if before is not None:
            # Little context is needed: a pass that moves nodes shows as lines removed and inserted.
            files[f"{stem}.diff"] = list(difflib.unified_diff(before, lines, "before", label, lineterm="", n=2))
        self._save(files)

    def _peak(self, direction: Direction, graph: fx.Graph) -> str:
        """Return a graph's predicted peak memory as text. Inputs count only in backward, which frees saved values."""

        def show() -> str:
            owned = mortal_inputs(graph.nodes) if direction == "backward" else ()
            return memory_curve(graph, owned=owned).explain()

        found = safely(show, "peak unknown")
        before, self._peaks[direction] = self._peaks.get(direction), found
        return found if before is None else f"{found} (before: {before.partition(':')[0]})"

    def _save(self, files: dict[str, list[str]]) -> None:
        if self.failed:
            return
        folder = self.directory / f"rank{self.rank}" / f"frame_{self.frame.replace('/', '_')}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, lines in files.items():
                (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8", errors="replace")
        except OSError as error:
            self.failed = True
            _log.warning("zgraph: cannot write the dump to %s: %s", folder, error)
