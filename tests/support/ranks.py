"""Real gloo ranks for tests: worker processes that stay alive and run one function after another on all ranks."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable, Generator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

ANSWER_S = 240.0
GRACE_S = 10.0  # for the others to fail as well, and to say why
MOST_THREADS = 100  # of a rank that stays for the next test, which has 30 groups by then


class RankFailure(AssertionError):
    """A function failed on at least one rank; the text holds every rank's traceback."""


def _serve(rank: int, world: int, rendezvous: str, pipe: Connection, timeout_s: float) -> None:
    # Before any backward: in CUDA builds it starts threads, which would all at once replace the pool lost in the fork.
    torch.set_num_threads(1)
    # gloo would look the host's name up; the loopback is all a test needs.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, args = job
        try:
            torch.compiler.reset()
            torch.manual_seed(0)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _threads(pid: int) -> int:
    """Threads of a process, those of libraries included; 0 where the system does not tell, or it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


class Ranks:
    """`world` processes in one process group."""

    def __init__(self, world: int, timeout_s: float = 60.0) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self._start()

    def _start(self) -> None:
        # The fork server has compiled once (support/preloaded.py), so that a rank starts in a fraction of a second.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, rendezvous, theirs, self.timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a module-level function on every rank; its results by rank.

        Raises:
            RankFailure: it raised, or a rank died or gave no answer. The others, which may wait for it in a collective
                until that times out, are ended after some seconds.
        """
        answers = self._answers(function, args, grace_s=GRACE_S)
        failed = [f"--- rank {rank}\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            self._kill()  # a rank may still sit in a collective that the others have left
            self._start()
            raise RankFailure("\n".join(failed))
        return [value for _, value in answers]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, traceback) by rank, for tests of failures: no rank is ended because of another."""
        return self._answers(function, args, grace_s=ANSWER_S)

    def _answers(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, grace_s: float
    ) -> list[tuple[bool, Any]]:
        """What each rank answers within `ANSWER_S`, or within `grace_s` of the first failure."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args))
        found: dict[int, tuple[bool, Any]] = {}
        until, why = time.monotonic() + ANSWER_S, f"no answer in {ANSWER_S} s"
        while len(found) < self.world:
            waiting = {self.pipes[rank]: rank for rank in range(self.world) if rank not in found}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[waiting[pipe]] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    found[waiting[pipe]] = (False, "died")
                if not found[waiting[pipe]][0] and time.monotonic() + grace_s < until:
                    until = time.monotonic() + grace_s
                    why = f"no answer within {grace_s} s after rank {waiting[pipe]} had failed"
            if not ready:
                found |= {rank: (False, why) for rank in waiting.values()}
        return [found[rank] for rank in range(self.world)]

    def renew(self) -> None:
        """Start anew if there are many groups: each has threads of gloo, which poll a hundred times in a second.

        A mesh of two axes makes groups in each test. They cannot be destroyed: DTensor caches meshes that name them.
        """
        if any(_threads(process.pid) > MOST_THREADS for process in self.processes):
            self.close()
            self._start()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


class RanksPool:
    """Ranks that stay for the next test: those of a group of two, and of the other number that was asked for last."""

    def __init__(self) -> None:
        self._running: dict[int, Ranks] = {}

    def of(self, world: int) -> Ranks:
        for other in [other for other in self._running if world != 2 and other not in (2, world)]:
            self._running.pop(other).close()
        if world not in self._running:
            self._running[world] = Ranks(world)
        return self._running[world]

    def renew(self) -> None:
        """Start those anew that have become slow."""
        for ranks in self._running.values():
            ranks.renew()

    def close(self) -> None:
        for ranks in self._running.values():
            ranks.close()


def worlds(*sizes: int) -> pytest.MarkDecorator:
    """Run a test on groups of these sizes; pytest runs all tests of one size before it starts the next."""
    return pytest.mark.parametrize("ranks", sizes, indirect=True, scope="session", ids="ranks{}".format)


every_world = worlds(1, 2, 3, 4)


@contextlib.contextmanager
def fresh_ranks(world: int, timeout_s: float = 60.0) -> Generator[Ranks]:
    """Ranks for one test alone, such as one that kills some of them."""
    ranks = Ranks(world, timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()
