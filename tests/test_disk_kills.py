"""Runs with tensors on disk killed by SIGKILL: nothing of them is left, and a checkpoint beside is whole or absent."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import pytest
import torch

from tests.support.disk_writer import NUMEL, write_until_killed

KILLS = 20


# Twenty processes, each forked from a server that has loaded torch: loading it takes the most of these seconds.
@pytest.mark.parametrize("nameless", [True, False], ids=["nameless files", "files named for a moment"])
def test_kills_leave_nothing_behind(tmp_path: Path, nameless: bool) -> None:
    scratch, checkpoint = tmp_path / "scratch", tmp_path / "checkpoints" / "weight"
    scratch.mkdir()
    checkpoint.parent.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    moments, values = random.Random(0), list[float]()
    for kill in range(KILLS):
        ours, theirs = context.Pipe()
        arguments = (str(scratch), str(checkpoint), nameless, 1000 * kill, theirs)
        writer = context.Process(target=write_until_killed, args=arguments, daemon=True)
        writer.start()
        assert ours.poll(120), "the next run does not start"
        assert ours.recv() == ([], [])  # before it made its file, and after
        if kill % 2:  # at least every other run makes a checkpoint, however slow the machine is
            _wait_for_another(checkpoint)
        time.sleep(moments.uniform(0, 0.03))  # a round of writes and a copy take about a third of that
        assert writer.is_alive()
        writer.kill()
        writer.join()
        assert list(scratch.iterdir()) == []
        if checkpoint.exists():
            found = torch.from_file(str(checkpoint), size=NUMEL)
            assert checkpoint.stat().st_size == 4 * NUMEL and found.eq(found[0]).all()
            values.append(found[0].item())
        if nameless:
            # Under its name for the moment between link and rename it is whole, too.
            rest = [path for path in checkpoint.parent.iterdir() if path != checkpoint]
            assert [path.stat().st_size for path in rest] == [4 * NUMEL] * len(rest)
    assert len(set(values)) >= KILLS // 2, "too few checkpoints were met for this to say much"


def _wait_for_another(checkpoint: Path) -> None:
    """Wait until a checkpoint has taken the place of the one that is there now."""
    before, deadline = _inode(checkpoint), time.monotonic() + 60
    while _inode(checkpoint) == before:
        assert time.monotonic() < deadline, "the run makes no checkpoint"
        time.sleep(0.001)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
