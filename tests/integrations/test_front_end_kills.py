"""Runs of front ends killed by SIGKILL, also while they save: resumed, they are the unbroken run bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.budget import long
from tests.support.torchrun import ROOT, environment


# Every other kill is aimed at a save. By Accelerate such a folder is refused; the Trainer passes it over.
@pytest.mark.parametrize(
    ("by", "kills"), [("accelerate", 4), ("trainer", 4), *long(("one_folder", 8), ("accelerate", 20), ("trainer", 20))]
)
def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path: Path, by: str, kills: int) -> None:
    options = ["--by", by, "--kills", str(kills)]
    command = [sys.executable, "-m", "tests.support.runs.killed_front_ends", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment("lo"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # the Trainer prints, too
    assert found["differing"] == 0, found  # each step that was repeated gave the same loss, on both ranks
    assert found["complete curves"] == 4, found  # two ranks, broken and unbroken, each step from the first to the last
    assert found["ranks alike"] == 2, found  # parameters and state of the broken run and of the unbroken one
    assert found["while saving"] >= kills // 4, found
    assert by == "one_folder" or found["resumed"] >= kills - 1, found
