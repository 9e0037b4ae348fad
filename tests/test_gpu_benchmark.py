"""examples/benchmarks/gpu.py runs to its end, part by part; here with toy sizes and on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"
ORDER = (
    *("kernels", "large-bucket", "sanitizer", "train", "overlap"),
    *("offload", "resume", "profile-gpt", "profile-llama", "nccl"),
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(BENCHMARKS / "gpu.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_every_part_runs_and_holds(tmp_path: Path) -> None:
    """A process for each part, which compiles a model or two: a minute and a half."""
    done = run("--device", "cpu", "--tiny", "--out", str(tmp_path))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [part["part"] for part in found["parts"]] == list(ORDER)
    broken = [part["part"] for part in found["parts"] if part["ended"] or not part["rows"]]
    assert done.returncode == 0 and not broken, done.stdout
    assert (tmp_path / "gpu.md").read_text().count("\n| ") > 20


@pytest.mark.slow
def test_a_part_that_breaks_leaves_what_it_has_and_the_others_run(tmp_path: Path) -> None:
    """A folder of its name stands where the part puts its checkpoints."""
    (tmp_path / "resume_fx").write_text("in the way")
    done = run("--device", "cpu", "--tiny", "--out", str(tmp_path), "--part", "resume", "sanitizer")
    resume, sanitizer = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert done.returncode == 1
    assert resume["ended"] == "exit status 1" and resume["rows"][-1]["what"] == "error"
    assert sanitizer["ended"] == "" and "left out" in sanitizer["rows"][0]["said"]
    assert "| resume | exit status 1" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow  # an interpreter; the parts run in this order above
def test_the_parts_are_listed_in_their_order() -> None:
    done = run("--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(ORDER)


def test_gaps_are_what_no_kernel_covers() -> None:
    """0-10, 5-8 inside it, 12-20, 30-31: 2 and 10 us of gaps."""
    spans = [(0, 10), (5, 8), (12, 20), (30, 31)]
    code = f"import json; from gpu_profiles import gaps_of; print(json.dumps(gaps_of({spans})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == {"kernels": 4, "busy ms": 0.019, "gaps ms": 0.012, "gaps above 5 us": 1}
