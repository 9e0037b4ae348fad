"""Helper processes that compile islands (runs of compute) into Inductor's cache, where this process finds them.

Inductor compiles one graph at a time and waits for its kernels, so that a process uses one core for most of a compile.
The ranks of a host share the work (`order_of_rank`); helpers do the same on idle cores. A helper's result is found
through the cache, under Inductor's key, so a helper that fails or is late costs nothing but its own time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zgraph.graph import meta
from zgraph.graph.pickled import dumps, loads
from zgraph.torch_compat.fake_values import step_mode
from zgraph.torch_compat.inductor import (
    as_in_a_compile,
    compile_with_inductor,
    inductor_options,
    set_inductor_options,
    shares_graphs,
)

LEAST_ISLANDS = 4  # for each process: a helper takes as long to start as two islands to compile
MOST_HELPERS = 3  # each has a context on the GPU, which takes half a GiB, until the graph is compiled


def helpers_for(islands: int, workers: int, ranks: int) -> int:
    """Return the number of helpers for a rank.

    Args:
        islands: number of islands that this rank must compile.
        workers: processes that may compile on this host, from `compile_workers`.
        ranks: ranks that compile the same islands.
    """
    return max(0, min(workers // ranks, islands // LEAST_ISLANDS, MOST_HELPERS + 1) - 1)


class Helpers:
    """Processes that compile islands: this process begins with the first, they begin with the last.

    They end when they have compiled all, when `stop` is called, or with this object or process.

    Args:
        islands: graphs of the islands; those that cannot be pickled are left to this process.
        number: number of processes to start.
    """

    def __init__(self, islands: Sequence[fx.GraphModule], number: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stop: Callable[[], object] = lambda: None
        if number == 0 or not shares_graphs():
            return
        pickled: list[bytes] = []
        for gm in islands:
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
                pickled.append(dumps(gm))
        folder = tempfile.TemporaryDirectory(prefix="zgraph-islands-")
        work = Path(folder.name) / "islands"
        work.write_bytes(pickle.dumps((torch.get_num_threads(), inductor_options(), pickled)))
        self.processes = [_start(work, place, number) for place in range(number)]
        self.stop = weakref.finalize(self, _stop, self.processes, folder)


def _start(work: Path, number: int, helpers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(work), str(number), str(helpers)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _stop(processes: Sequence[subprocess.Popen[bytes]], folder: tempfile.TemporaryDirectory[str]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    folder.cleanup()


def _work(work: Path, number: int, helpers: int) -> None:
    """Compile islands from the last to the first, in turns with the other helpers."""
    os.setpriority(os.PRIO_PROCESS, 0, 5)  # the process that trains comes first
    threads, options, pickled = pickle.loads(work.read_bytes())
    torch.set_num_threads(threads)
    set_inductor_options(options, workers=1)
    mode: Any = step_mode()
    with as_in_a_compile(mode):
        for content in pickled[::-1][number::helpers]:
            found = loads(content, mode)
            gm = fx.GraphModule(found, found.graph)  # of the class that `cut_out` makes, which is in Inductor's key
            compile_with_inductor(gm, [meta.value(node) for node in gm.graph.find_nodes(op="placeholder")])


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
