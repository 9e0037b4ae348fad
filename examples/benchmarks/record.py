"""What all benchmarks share: their options, where figures come from, medians, tables, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def parser_of(document: str | None, epilog: str | None = None, **defaults: float | str) -> argparse.ArgumentParser:
    """A parser with `--json`, and an option for each default, of its type."""
    parser = argparse.ArgumentParser(
        description=document, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    for name, value in defaults.items():
        kind = positive if isinstance(value, int) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help="default: %(default)s")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def about() -> dict[str, Any]:
    """Machine and code that are measured. Asked for before a run: it takes minutes, in which a checkout may go on."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()}
    cores = len(os.sched_getaffinity(0))
    return {"processor": processor(), "cores": cores, "commit": commit(), "versions": versions}


def processor() -> str:
    """Name of the processor as /proc/cpuinfo has it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Commit of this checkout, with "-dirty" after it where files differ from it; None outside of a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:  # there is no git
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of a single value, that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, with quartiles: "429 (423-437)"."""
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return f"{middle} ({low}-{high})"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, the first aligned to the left."""
    lines = [[str(cell) for cell in cells] for cells in (heads, *rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join("  ".join([name.ljust(first), *map(str.rjust, cells, others)]).rstrip() for name, *cells in lines)


def save(path: Path | None, found: dict[str, Any]) -> None:
    """Write the results where `--json` says."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
