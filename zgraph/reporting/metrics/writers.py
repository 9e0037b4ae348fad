"""Writers of metrics: lines of JSON, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from zgraph.errors import ZgraphError
from zgraph.runtime.groups import rank_and_world

RANK = "{rank}"


class Writer(Protocol):
    """Receives the metrics of each step; a user-defined writer implements these two methods."""

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """Write the values of one step, by name; None stands for an unknown value."""
        ...

    def close(self) -> None:
        """Write all buffered values; called once, at the end."""
        ...


class JsonLines:
    """Appends each step to a file as one line of JSON.

    If `path` contains "{rank}", each rank writes its own file; otherwise only rank 0 writes. Unknown values are null.
    Infinity and NaN, which JSON lacks, are the strings "Infinity", "-Infinity" and "NaN". If a run resumes from a
    checkpoint, steps after the checkpoint may appear twice: the last line is the valid one.

    Args:
        path: path of the file; missing folders are created.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(str(path).replace(RANK, str(rank_and_world()[0])))
        self._file: TextIO | None = None
        if _writes(path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)  # by line: a kill leaves no partial line

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({name: _as_json(value) for name, value in values.items()}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """Writes each known value as a scalar to TensorBoard.

    Args:
        log_dir: an existing `torch.utils.tensorboard.SummaryWriter`, which the caller closes; or a directory for a new
            one. If the directory contains "{rank}", each rank writes its own; otherwise only rank 0 writes.
        prefix: text before each name.

    Raises:
        ZgraphError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | Path | Any, *, prefix: str = "zgraph/") -> None:
        self.prefix = prefix
        self._owned = isinstance(log_dir, str | Path)
        self._writer: Any = log_dir
        if self._owned:
            folder = str(log_dir).replace(RANK, str(rank_and_world()[0]))
            self._writer = _summary_writer(folder) if _writes(log_dir) else None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._writer is not None:
            for name, value in _known(values).items():
                self._writer.add_scalar(f"{self.prefix}{name}", value, step)

    def close(self) -> None:
        if self._writer is not None and self._owned:
            self._writer.close()


class WeightsAndBiases:
    """Logs each known value to a run of Weights & Biases.

    Use this writer only on ranks that have a run.

    Args:
        run: run returned by `wandb.init(...)`; None: wandb's current run. The caller finishes the run.
        prefix: text before each name.

    Raises:
        ZgraphError: wandb is not installed, or no run is active.
    """

    def __init__(self, run: Any = None, *, prefix: str = "zgraph/") -> None:
        self.run = _current_run() if run is None else run
        self.prefix = prefix

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        self.run.log({f"{self.prefix}{name}": value for name, value in _known(values).items()}, step=step)

    def close(self) -> None: ...


def _writes(path: object) -> bool:
    return RANK in str(path) or rank_and_world()[0] == 0


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the known values without `step`, which is the x-axis of the plots."""
    return {name: value for name, value in values.items() if value is not None and name != "step"}


def _as_json(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ZgraphError(
            "zgraph.metrics.TensorBoard: TensorBoard is not installed; pip install tensorboard, or write "
            "zgraph.metrics.JsonLines(path)."
        ) from error
    return SummaryWriter(folder)


def _current_run() -> Any:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ZgraphError(
            "zgraph.metrics.WeightsAndBiases: wandb is not installed; pip install wandb, or write "
            "zgraph.metrics.JsonLines(path)."
        ) from error
    if wandb.run is None:
        raise ZgraphError(
            "zgraph.metrics.WeightsAndBiases: no run has begun; call wandb.init(...) first, or pass the run that it "
            "returned."
        )
    return wandb.run
