"""Shows the progress of compilation in a temporary line on a terminal, and in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


def shown(islands: Iterable[T], title: str) -> Iterator[T]:
    """Yield each island (run of compute) when it is about to be compiled, and show the progress.

    On a terminal, a line on stderr counts the islands and is removed at the end. The number of islands and their
    compile time are logged at level INFO, which loggers do not show by default.

    Args:
        islands: islands of one graph; if there are none, nothing is shown.
        title: title of the graph.
    """
    waiting = list(islands)
    if not waiting:
        return
    started = time.perf_counter()
    _log.info("zgraph: compiling %s: %d islands", title, len(waiting))
    try:
        for number, island in enumerate(waiting, 1):
            _show(
                f"zgraph: compiling {title}: island {number} of {len(waiting)}, {time.perf_counter() - started:.0f} s"
            )
            yield island
    finally:
        _show("")
    _log.info("zgraph: compiled %s in %.1f s", title, time.perf_counter() - started)


def _show(line: str) -> None:
    """Replace the last line of a terminal; writes nothing to files and pipes."""
    if sys.stderr is not None and sys.stderr.isatty():  # pyright: ignore[reportUnnecessaryComparison]  # pythonw
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()
