"""The helper processes of a rank: they compile islands into Inductor's cache before the rank needs them.

Islands (runs of compute) are sent to the helpers through pipes, and results come back only through the cache. The rank
compiles every island itself: one that a helper has compiled is found in the cache, and a helper that fails costs
nothing but its work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field
from typing import IO, cast

from torch import Tensor, fx

from zgraph.graph import pickled
from zgraph.torch_compat.inductor import chooses_by_measurement, portable_settings

MOST = 4  # processes that start unasked; each needs half a GiB of memory
FEWEST = 4  # islands; for fewer, importing torch takes a helper too long
_END_S = 10.0
_MOST_TEXT = 1 << 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """An island to compile, pickled, and whether a helper has compiled it."""

    content: bytes
    compiled: Future[bool] = field(default_factory=Future)


class Helpers:
    """Helper processes that compile islands, each of them once, in the given order; they end after the last one.

    Attributes:
        threads: one for each process; a thread ends when its process has ended.

    Args:
        islands: the islands by their keys, pickled.
        count: number of processes.
        settings: settings of this process that generated code depends on, pickled.
    """

    def __init__(self, islands: Mapping[object, bytes], count: int, settings: bytes) -> None:
        self._jobs = {key: _Job(content) for key, content in islands.items()}
        waiting = deque(self._jobs.values())
        self.threads = [
            threading.Thread(target=_serve, args=(waiting, settings), name=f"zgraph-compile-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def claim(self, key: object) -> bool:
        """Return False if a helper is compiling an island now; if none has begun, none will."""
        job = self._jobs.get(key)
        return job is None or job.compiled.cancel() or job.compiled.done()

    def has_compiled(self, key: object, timeout_s: float = 0.0) -> bool:
        """Return whether a helper has compiled an island; wait for one that is compiling it, but not for longer."""
        job = self._jobs.get(key)
        try:
            return job is not None and job.compiled.result(timeout_s)
        except (CancelledError, LateError):
            return False

    def stop(self) -> None:
        """Let the helpers end after the islands that they are compiling."""
        for job in self._jobs.values():
            job.compiled.cancel()


def start_helpers(islands: Mapping[object, fx.GraphModule], count: int | None, ranks: int) -> Helpers | None:
    """Start helpers for islands (runs of compute); None if there is no work for them.

    Args:
        islands: the islands by their keys; those with symbolic sizes, which cannot be pickled, are left to the rank.
        count: number of processes; None: the number of spare cores if helpers save time, else 0.
        ranks: number of all ranks.
    """
    contents = dict(_pickled(islands))
    if count is None:
        count = spare_cores(ranks) if len(contents) >= FEWEST and _pays_off(islands.values()) else 0
    settings = _settings() if min(count, len(contents)) > 0 else None
    return None if settings is None else Helpers(contents, min(count, len(contents)), settings)


def _pickled(islands: Mapping[object, fx.GraphModule]) -> Iterator[tuple[object, bytes]]:
    for key, gm in islands.items():
        with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
            yield key, pickled.dumps(gm)


def _settings() -> bytes | None:
    """Return the settings of this process pickled; None if one of them cannot be sent."""
    try:
        settings = portable_settings()
        return None if settings is None else pickle.dumps(settings)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def _pays_off(islands: Iterable[fx.GraphModule]) -> bool:
    """Return whether to start helpers unasked.

    Not for GPUs, where each helper holds a context; and not if kernels are chosen by measurements, which helpers would
    disturb.
    """
    values = [node.meta.get("val") for gm in islands for node in gm.graph.nodes]
    on_cpu = all(value.device.type == "cpu" for value in values if isinstance(value, Tensor))
    return on_cpu and not chooses_by_measurement()


def spare_cores(ranks: int) -> int:
    """Return the number of cores, at most `MOST`, that each rank of this host has for helpers.

    Args:
        ranks: number of all ranks, which share this host if `torchrun` does not say otherwise.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(0, min(MOST, cores // max(1, int(on_host) if on_host.isdigit() else ranks) - 1))


def _serve(waiting: deque[_Job], settings: bytes) -> None:
    """Start a helper, and have it compile islands until none is left."""
    try:
        with tempfile.TemporaryFile() as errors, _helper(errors) as (requests, answers):
            _say(requests, settings)
            _answer(answers)  # it has imported torch
            while (job := _next(waiting)) is not None:
                try:
                    _say(requests, job.content)
                    job.compiled.set_result(_answer(answers))
                finally:
                    if not job.compiled.done():
                        job.compiled.set_result(False)
            _say(requests, b"")
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        _log.debug("zgraph: a helper process ended early, and the rank compiles the rest itself: %r", error)


def _next(waiting: deque[_Job]) -> _Job | None:
    """Return the next island that the rank has not taken; None if there is none."""
    while waiting:
        with contextlib.suppress(IndexError):  # another thread was faster
            job = waiting.popleft()
            if job.compiled.set_running_or_notify_cancel():
                return job
    return None


@contextlib.contextmanager
def _helper(errors: IO[bytes]) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Start a helper process, and yield the streams of its requests and answers; the process ends with the context.

    It is a new interpreter that does not import this one's main module. In a session of its own, it does not receive
    the interrupts of a terminal.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", "zgraph.codegen.ahead.helper", str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # for the end of the compilers that it starts
    )
    try:
        yield cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _log.debug("zgraph: a helper process does not end, and is killed")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # it has ended before it read all
                cast(IO[bytes], stream).close()
        errors.seek(0)
        if text := errors.read(_MOST_TEXT).decode(errors="replace"):
            _log.debug("zgraph: a helper process wrote: %s", text)


def _say(requests: IO[bytes], content: bytes) -> None:
    pickle.dump(content, requests)
    requests.flush()


def _answer(answers: IO[bytes]) -> bool:
    """Return whether the helper has done the work; log the error if not."""
    done, error = cast("tuple[bool, str]", pickle.load(answers))
    if error:
        _log.debug("zgraph: a helper process failed to compile an island, and the rank compiles it itself: %s", error)
    return done
