"""The examples that are not training runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
def test_a_pass_of_ones_own_takes_part_without_registration(tmp_path: Path) -> None:
    script = EXAMPLES / "write_a_pass.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 of 8 matmuls run again in backward" in done.stdout
    assert done.stdout.rstrip().endswith("same gradients, bit for bit: True")


@pytest.mark.slow
def test_a_compression_of_ones_own_trains_as_well_as_none(tmp_path: Path) -> None:
    script = EXAMPLES / "write_a_compression.py"
    assert len(script.read_text().splitlines()) < 70
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    exact, signs, forgetful = losses
    assert signs < 1.05 * exact < forgetful


@pytest.mark.slow
def test_a_llama_is_planned_without_a_gpu(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "plan_llama.py")]
    options = ["--ranks", "16", "--sequence", "64", "--layers", "1", "2"]
    done = subprocess.run([*script, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("zgraph.plan for 16 ranks of h100") == 2
    one, two = (int(line.split()[2]) for line in done.stdout.splitlines() if " layers, " in line)
    assert one < two < 2 * one
