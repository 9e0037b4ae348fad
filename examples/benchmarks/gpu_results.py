"""The files that a run of gpu.py leaves behind: rows as they are found, and tables of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LOG_BYTES = 48 * 1024  # of a part at most, its end
SHOWN = 300  # characters of a figure in the table


@dataclass(frozen=True)
class Results:
    """Four files in one folder, however many parts there are; processes append to them side by side.

    Attributes:
        folder: of rows.jsonl, gpu.json, gpu.md and log.txt.
        started: when the run began, in seconds since the epoch.
    """

    folder: Path
    started: float

    def add(self, part: str, what: str, ok: bool | None, figures: Row, device: str = "") -> None:
        """Append one row; a line is written at once, so that nothing of it is lost when its process is killed."""
        at_s = round(time.time() - self.started, 1)
        row = {"part": part, "what": what, "ok": ok, "figures": figures, "device": device, "at_s": at_s}
        self._append("rows.jsonl", json.dumps(row, default=str) + "\n")

    def log(self, part: str, written: Path) -> None:
        """Append the end of what a part has said."""
        said = written.read_bytes()[-LOG_BYTES:].decode(errors="replace") if written.exists() else ""
        self._append("log.txt", f"==== {part}\n{said.rstrip()}\n")

    def rows(self) -> list[Row]:
        path = self.folder / "rows.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rewrite_tables(self) -> None:
        """gpu.json and gpu.md of the rows so far."""
        rows = self.rows()
        _replace(self.folder / "gpu.json", json.dumps({"rows": rows}, indent=1))
        _replace(self.folder / "gpu.md", table(rows))

    def _append(self, name: str, text: str) -> None:
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """Write a file so that whoever stops the program leaves the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each row, those of a part together."""
    devices = sorted({row["device"] for row in rows if row["device"]})
    wrong = sum(row["ok"] is False for row in rows)
    lines = [f"{', '.join(devices) or 'no device'}; {len(rows)} rows, of which {wrong} did not hold", ""]
    lines += ["| part | what | figures | held | at s |", "|---|---|---|---|---|"]
    for part in dict.fromkeys(row["part"] for row in rows):
        lines += [_line(row) for row in rows if row["part"] == part]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    figures = ", ".join(f"{key} {_shown(value)}" for key, value in row["figures"].items() if value is not None)
    verdict = {True: "yes", False: "NO", None: ""}[row["ok"]]
    return f"| {row['part']} | {row['what']} | {figures} | {verdict} | {row['at_s']} |"


def _shown(value: object) -> str:
    text = " ".join(str(value).replace("|", "/").split())
    return text if len(text) <= SHOWN else f"... {text[-SHOWN:]}"
