"""Whether the order of a set decides anything: the same program under two seeds of Python's hash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

# Loads what programs need once, and runs each in a fork: the path of a program and of its output come in by line.
_SERVER = """
import os, sys, warnings
warnings.simplefilter("ignore")
import tests.support.preloaded
for line in sys.stdin:
    program, output = line.split()
    child = os.fork()
    if not child:
        with open(output, "w", buffering=1) as sys.stdout:
            exec(compile(open(program).read(), program, "exec"), {"__name__": "__main__"})
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class HashSeeds:
    """Two interpreters with different seeds, which stay for the next test."""

    def __init__(self) -> None:
        self._running = [
            subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                cwd=Path(__file__).resolve().parents[2],
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for seed in ("1", "2")
        ]

    def printed(self, program: str, folder: Path) -> list[str]:
        """What a program prints under each seed; its files lie in the folder."""
        (folder / "program.py").write_text(program)
        outputs = [folder / f"printed_{number}" for number in range(len(self._running))]
        for process, output in zip(self._running, outputs, strict=True):
            print(folder / "program.py", output, file=_there(process.stdin), flush=True)
        statuses = [_there(process.stdout).readline().strip() for process in self._running]
        assert statuses == ["0"] * len(self._running), "a program failed: its error is among what the test printed"
        return [output.read_text() for output in outputs]

    def close(self) -> None:
        for process in self._running:
            _there(process.stdin).close()
            process.wait()


def _there(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
