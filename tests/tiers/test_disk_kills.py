"""Runs with tensors on disk killed by SIGKILL: nothing of them is left."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest

from tests.support.disk_writer import write_until_killed

KILLS = 20


# Twenty processes, each forked from a server that has loaded torch: loading it takes most of these seconds.
@pytest.mark.parametrize("nameless", [True, False], ids=["nameless files", "files named for a moment"])
def test_kills_leave_nothing_behind(tmp_path: Path, nameless: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    moments = random.Random(0)
    for _ in range(KILLS):
        ours, theirs = context.Pipe()
        writer = context.Process(target=write_until_killed, args=(str(tmp_path), nameless, theirs), daemon=True)
        writer.start()
        assert ours.poll(120), "the next run does not start"
        assert ours.recv() == ([], [])  # before it made its file, and after
        time.sleep(moments.uniform(0, 0.03))  # a round of writes takes about a third of that
        assert writer.is_alive()
        writer.kill()
        writer.join()
        assert list(tmp_path.iterdir()) == []
