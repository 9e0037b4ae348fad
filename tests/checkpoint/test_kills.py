"""Runs killed by SIGKILL at random moments, also while they save: resumed, they are the unbroken run bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.torchrun import ROOT, environment


def killed(folder: Path, kills: int, *more: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.runs.killed", str(folder), "--kills", str(kills), *more]
    done = subprocess.run(command, cwd=ROOT, env=environment("lo"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differing"] == 0, found  # each step that was repeated gave the same loss, on both ranks
    assert found["complete curves"] == 4, found  # two ranks, broken and unbroken, each step from the first to the last
    assert found["ranks alike"] == 2, found  # parameters and state of the broken run and of the unbroken one
    assert found["resumed"] + found["from scratch"] == kills + 1
    assert found["resumed"] >= kills - 1, found
    return found


def test_a_killed_run_resumes_as_if_nothing_had_happened(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kills = request.config.getoption("kills")
    found = killed(tmp_path, kills)
    # The moments are random, yet of those aimed at a save most must have met one, or this tests less than it says.
    assert found["while saving"] >= kills // 4, found


# Each attempt compiles; test_disk_kills.py has kills of writers that compile nothing. Three in a save, three in a write
# and three between; `make test-long` has thrice as many.
@pytest.mark.parametrize("kills", [pytest.param(9), pytest.param(27, marks=pytest.mark.long)], ids="{}kills".format)
def test_killed_run_on_disk_resumes_unchanged(tmp_path: Path, kills: int) -> None:
    found = killed(tmp_path, kills, "--on-disk")
    assert found["left on disk"] == 0, found
    assert found["while saving"] >= kills // 6, found  # every third is aimed at a save
