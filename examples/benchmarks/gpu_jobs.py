"""Runs the parts of gpu.py as processes: within their limits, together or one by one; and the files that they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LOG_BYTES = 48 * 1024  # of a part at most, its end
SHOWN = 300  # characters of a figure in the table
POLL_S = 0.05


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


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process to be run.

    Attributes:
        name: of the part.
        command: what is run.
        expected_s: what it is thought to take; it is not started with less time left.
        limit_s: after which it is killed.
        environment: added to this process's own.
    """

    name: str
    command: Sequence[str]
    expected_s: float
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    limit_s: float


class Runner:
    """Runs jobs until the time is over, or until somebody stops it.

    Args:
        results: where they write.
        scratch: folder of what they say until they end.
        seconds: for all of them.
    """

    def __init__(self, results: Results, scratch: Path, seconds: float) -> None:
        self.results, self.scratch = results, scratch
        self._ends = time.monotonic() + seconds
        self._running: list[_Running] = []
        self._stopped = False

    def stop(self, *_: object) -> None:
        """Kill all that runs, and start nothing more: a signal handler, which leaves the rest to `run`."""
        self._stopped = True

    def run(self, jobs: Sequence[Job], *, together: bool) -> None:
        """Run them all at once, or each after the one before; returns when no process of theirs is left."""
        waiting = list(jobs)
        try:
            while (waiting or self._running) and not self._stopped:
                while waiting and (together or not self._running):
                    self._start(waiting.pop(0))
                time.sleep(POLL_S)
                self._look()
        finally:
            for left in [*self._running]:
                self._end(left, "stopped from outside")

    def _start(self, job: Job) -> None:
        left_s = self._ends - time.monotonic()
        if left_s < job.expected_s:
            figures = {"expected s": job.expected_s, "left s": round(left_s, 1)}
            self.results.add(job.name, "skipped, too little time is left", None, figures)
            self.results.rewrite_tables()
            print(f"{job.name}: skipped, {left_s:.0f} s are left and it takes {job.expected_s:.0f}", flush=True)
            return
        log = self.scratch / f"{job.name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | job.environment,
                start_new_session=True,  # its ranks and compilers are killed with it
            )
        self._running.append(_Running(job, process, log, time.monotonic(), min(job.limit_s, left_s)))

    def _look(self) -> None:
        for each in [*self._running]:
            status = each.process.poll()
            if status is not None:
                self._end(each, "" if status == 0 else f"exit status {status}")
            elif time.monotonic() - each.started > each.limit_s:
                self._end(each, f"killed after {each.limit_s:.0f} s")

    def _end(self, ended: _Running, why: str) -> None:
        """Kill what is left of its session, and note how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ended.process.pid, signal.SIGKILL)
        ended.process.wait()
        self._running.remove(ended)
        seconds = round(time.monotonic() - ended.started, 1)
        name = ended.job.name
        device = next((row["device"] for row in self.results.rows() if row["part"] == name and row["device"]), "")
        figures = {"s": seconds, "expected s": ended.job.expected_s}
        self.results.add(name, why or "ended", not why, figures, device)
        self.results.log(name, ended.log)
        self.results.rewrite_tables()
        print(f"{name}: {why or 'ended'}, {seconds} s", flush=True)
        if why:
            sys.stdout.write("".join(ended.log.read_text(errors="replace").splitlines(keepends=True)[-12:]))
            sys.stdout.flush()
