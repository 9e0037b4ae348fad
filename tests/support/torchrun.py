"""Start torchrun from a test, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0  # no run here takes a tenth of it; a hang fails the test by this
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def environment(interface: str) -> dict[str, str]:
    """For ranks that talk over this interface, one thread each, with this checkout's zgraph."""
    return {"GLOO_SOCKET_IFNAME": interface, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def to_file(path: Path, command: Sequence[str]) -> list[str]:
    """The command with both outputs in a file, for launchers that pass theirs on."""
    return ["sh", "-c", 'out="$1"; shift; exec "$@" > "$out" 2>&1', "sh", str(path), *command]


@contextlib.contextmanager
def running(
    command: Sequence[str], output: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is ended on exit, with all it has started (torchrun puts its ranks into groups of their own)."""
    process = subprocess.Popen(to_file(output, command), env={**os.environ, **environment("lo"), **variables})
    try:
        yield process
    finally:
        started = descendants(process.pid)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on, of a process that runs."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True)
    parents = dict(tuple(map(int, line.split())) for line in listed.stdout.splitlines())
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]
