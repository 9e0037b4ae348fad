"""Whether the order of a set decides anything: the same program under two seeds of Python's hash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_under_two_hash_seeds(program: str) -> list[str]:
    """What it prints in two processes of its own, run side by side."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    texts = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], texts[0][1]
    return [printed for printed, _ in texts]
