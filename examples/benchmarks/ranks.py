"""Starts the ranks of a benchmark, here or in a network of namespaces, and joins them; rank 0 hands back the results.

A benchmark calls `run_ranks` with its own file, which is then run once per rank as `FILE --rank RANK FOLDER` and has
`as_rank` call its function. A rank has one thread, and one core if there are enough.
"""

# HashStore is exported, though not listed.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from netns import INTERFACE, ShapedNetwork

T = TypeVar("T")

# The first step compiles, DDP lays its buckets out anew in the second, and the third is like all that follow.
WARM_UP_STEPS = 3
# A rank that is this late has hung: compilation of the slowest strategy, by Inductor, takes a part of it.
_TIMEOUT = timedelta(minutes=15)


class BenchmarkError(RuntimeError):
    """The benchmark cannot run, or a rank ended early; the message says why."""


def run_ranks(
    script: str,
    plan: dict[str, Any],
    cores: Sequence[int],
    network: ShapedNetwork | None = None,
    hosts: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a script on each rank, and return the results of rank 0.

    Args:
        script: path of the file that is run; it calls `as_rank`.
        plan: JSON for all ranks; "cores" and "addresses" are added.
        cores: of each rank; where there are fewer, ranks share them.
        network: of the hosts; None: all ranks run here.
        hosts: of each rank in the network.
        environment: more variables for the ranks.

    Raises:
        BenchmarkError: a rank failed.
    """
    # The log level silences the store's complaint that a namespace has no names for its addresses.
    variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | dict(environment or {})
    variables["GLOO_SOCKET_IFNAME"] = "lo" if network is None else INTERFACE
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        addresses = [network.address(host) for host in hosts] if network else []
        (Path(folder) / "plan.json").write_text(json.dumps({**plan, "cores": [*cores], "addresses": addresses}))
        try:
            for rank in range(len(cores)):
                command = [sys.executable, script, "--rank", str(rank), folder]
                if network is not None:
                    processes.append(network.popen(hosts[rank], command, variables))
                    continue
                mine = os.environ | variables
                processes.append(subprocess.Popen(command, env=mine, stdin=subprocess.PIPE, start_new_session=True))
            _wait_for_all(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                if process.stdin is not None:
                    process.stdin.close()
        return json.loads((Path(folder) / "result.json").read_text())


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until every rank has ended well; the first that does not ends the wait, for its peers would hang."""
    running = True
    while running:
        time.sleep(0.1)
        states = [process.poll() for process in processes]
        for rank, state in enumerate(states):
            if state == -signal.SIGKILL:
                raise BenchmarkError(f"rank {rank} was killed, probably for memory; choose fewer strategies or layers")
            if state not in (None, 0):
                raise BenchmarkError(f"rank {rank} ended with status {state}; its error stands above")
        running = None in states


@contextlib.contextmanager
def alone(backend: str = "gloo") -> Generator[None]:
    """This process as the only rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- in a rank --------------------------------------------------------------------------------------------------------


def as_rank(work: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """In a process that `run_ranks` has started: join the others, work, and end. Elsewhere: nothing."""
    if sys.argv[1:2] != ["--rank"]:
        return
    rank, folder = int(sys.argv[2]), Path(sys.argv[3])
    plan = json.loads((folder / "plan.json").read_text())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cores = sorted(os.sched_getaffinity(0))
    # Before any other thread starts: gloo's own inherit the core, so one rank never computes on two.
    os.sched_setaffinity(0, {cores[plan["cores"][rank] % len(cores)]})
    torch.set_num_threads(1)
    # One process compiles the same functions for many strategies; falling back to eager would go unnoticed.
    torch.compiler.config.recompile_limit = 64
    torch.compiler.config.fail_on_recompile_limit_hit = True
    # What zgraph warns of here is meant: pipelines without data parallelism.
    warnings.filterwarnings("ignore", message="zgraph: .* nothing is sharded")
    ranks = len(plan["cores"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    found = work(rank, plan)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
    # Not an ordinary return: gloo's thread may still be freeing the tensor of that barrier, for which it needs the
    # interpreter, and asking an interpreter that is shutting down aborts the process.
    os._exit(0)


def _end_with_parent() -> None:
    """Leave when standard input closes: the parent holds its other end, so it closes however the parent ends."""
    sys.stdin.read()
    os._exit(1)


def on_all_ranks(value: T) -> list[T]:
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest_ms(seconds: Sequence[float]) -> list[float]:
    """Milliseconds of each step on the rank where it took longest."""
    return [1e3 * max(of_step) for of_step in zip(*on_all_ranks(list(seconds)), strict=True)]


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
