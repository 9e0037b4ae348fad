"""The examples, but for train_gpt.py."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.torchrun import LIMIT_S, TORCHRUN, environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_pass_of_ones_own_takes_part_without_registration(tmp_path: Path) -> None:
    script = EXAMPLES / "write_a_pass.py"
    assert len(script.read_text().splitlines()) < 40
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 of 8 matmuls run again in backward" in done.stdout
    assert done.stdout.rstrip().endswith("same gradients, bit for bit: True")


def test_a_compression_of_ones_own_trains_as_well_as_none(tmp_path: Path) -> None:
    script = EXAMPLES / "write_a_compression.py"
    assert len(script.read_text().splitlines()) < 70
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    exact, signs, forgetful = losses
    assert signs < 1.05 * exact < forgetful


def test_a_llama_is_planned_without_a_gpu(tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "plan_llama.py")]
    options = ["--ranks", "16", "--sequence", "64", "--layers", "1", "2"]
    done = subprocess.run([*script, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("zgraph.plan for 16 ranks of h100") == 2
    one, two = (int(line.split()[2]) for line in done.stdout.splitlines() if " layers, " in line)
    assert one < two < 2 * one


def on_two_ranks(script: str, folder: Path, *options: str) -> str:
    """Output of a short run of an example, started in the folder."""
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(EXAMPLES / script), "--quick", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment("lo")},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def diffused(folder: Path, *options: str) -> str:
    """Output of a tiny run of train_dit.py."""
    small = ["--width", "16", "--heads", "2", "--batch", "16", "--picture", str(folder / "digits.png")]
    return on_two_ranks("train_dit.py", folder, *small, *options)


def test_a_diffusion_transformer_trains_on_two_stages(tmp_path: Path) -> None:
    """Its embedders hold the same bits behind the last step, and its samples come nearer to digits than noise is."""
    text = diffused(tmp_path, "--steps", "60")
    noise, trained = (float(found) for found in re.findall(r"Fréchet distance (?:of noise )?([\d.]+)", text))
    assert trained < 0.8 * noise  # an untrained one leaves noise as it is
    assert "4 replicas of each embedder, the furthest apart by 0\n" in text
    picture = (tmp_path / "digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) == (400, 400)


def test_embedders_without_the_sum_drift_apart(tmp_path: Path) -> None:
    text = diffused(tmp_path, "--steps", "10", "--no-sync", "--no-compile")
    (apart,) = re.findall(r"4 replicas of each embedder, the furthest apart by ([\d.e-]+)", text)
    assert float(apart) > 1e-3


def test_a_mixture_of_experts_trains_on_two_ranks(tmp_path: Path) -> None:
    """Its loss falls, and its experts' loads, which add up to all tokens, leave some of these without room."""
    text = on_two_ranks("train_moe.py", tmp_path)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", text)]
    assert losses[-1] < 0.8 * losses[0]
    for shares in re.findall(r"tokens per expert ([ \d%]+)  dropped", text):
        assert sum(int(share) for share in shares.replace("%", "").split()) == pytest.approx(100, abs=4)  # rounded
    assert max(float(found) for found in re.findall(r"dropped ([\d.]+)%", text)) > 0


def test_two_sites_train_and_exchange_a_part_of_what_ddp_does(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "train_two_sites.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    outer, ddp = (line.split()[-5:] for line in done.stdout.splitlines()[-2:])
    assert float(outer[2]) < 0.05 * float(ddp[2]), "sent MB"
    assert float(outer[4]) < 1.2 * float(ddp[4]), "held-out loss"
