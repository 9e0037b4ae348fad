"""examples/benchmarks/gpu.py: its parts with toy sizes on the CPU, and how it runs, limits and kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.budget import long

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
SCRIPT = str(BENCHMARKS / "gpu.py")
FILES = {"rows.jsonl", "gpu.json", "gpu.md", "log.txt"}
FOREVER = "import time; time.sleep(600)"
# Starts a process of its own that would go on, writes its number, and waits.
WITH_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
print("began", flush=True)
time.sleep(600)
"""
PROGRAM = """
import json, signal, sys, time
from pathlib import Path
from gpu_jobs import Job, Results, Runner

folder, seconds, together, jobs = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "together", sys.argv[4]
runner = Runner(Results(folder, time.time()), folder.parent, seconds)
signal.signal(signal.SIGTERM, runner.stop)
runner.run([Job(**{**job, "command": [sys.executable, "-c", *job["command"]]}) for job in json.loads(jobs)],
           together=together)
"""


def job(name: str, *command: str, expected_s: float = 0.0, limit_s: float = 60.0) -> dict[str, Any]:
    return {"name": name, "command": command, "expected_s": expected_s, "limit_s": limit_s}


def arguments(out: Path, jobs: list[dict[str, Any]], *, seconds: float = 60.0, together: bool = False) -> list[str]:
    out.mkdir(exist_ok=True)
    order = "together" if together else "alone"
    return [sys.executable, "-c", PROGRAM, str(out), str(seconds), order, json.dumps(jobs)]


def run(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and is still to be collected does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def eventually_gone(pid: int) -> bool:
    for _ in range(200):
        if not lives(pid):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"


def test_part_killed_at_its_limit_dies_with_its_processes(out: Path) -> None:
    pid = out.parent / "pid"
    run(arguments(out, [job("hangs", WITH_A_CHILD, str(pid), limit_s=4.0), job("next", "print('here')")]))
    assert eventually_gone(int(pid.read_text()))
    hung, ran = rows_of(out)
    assert (hung["part"], hung["what"], hung["ok"]) == ("hangs", "killed after 4 s", False)
    assert (ran["part"], ran["what"], ran["ok"]) == ("next", "ended", True)
    assert set(os.listdir(out)) == FILES
    assert "==== hangs\nbegan\n==== next\nhere\n" in (out / "log.txt").read_text()
    assert "| hangs | killed after 4 s |" in (out / "gpu.md").read_text()


def test_broken_part_keeps_rows_and_reports_its_end(out: Path) -> None:
    breaks = (
        "import sys, time; from pathlib import Path; from gpu_jobs import Results\n"
        "Results(Path(sys.argv[1]), time.time()).add('breaks', 'found', True, {'ms': 1.5}, 'a GPU')\n"
        "raise SystemExit('it broke')"
    )
    run(arguments(out, [job("breaks", breaks, str(out))]))
    found, ended = rows_of(out)
    assert (found["what"], found["figures"], found["ok"]) == ("found", {"ms": 1.5}, True)
    assert (ended["what"], ended["ok"], ended["device"]) == ("exit status 1", False, "a GPU")
    assert set(found) == {"part", "what", "ok", "figures", "device", "at_s"}
    assert json.loads((out / "gpu.json").read_text())["rows"] == [found, ended]
    assert "it broke" in (out / "log.txt").read_text()


def test_part_without_enough_time_is_skipped(out: Path) -> None:
    run(arguments(out, [job("long", "1", expected_s=100.0), job("short", "1", expected_s=1.0)], seconds=50.0))
    skipped, ran = rows_of(out)
    assert (skipped["what"], skipped["ok"]) == ("skipped, too little time is left", None)
    assert (ran["part"], ran["what"]) == ("short", "ended")


def test_total_time_ends_a_part_before_its_limit(out: Path) -> None:
    run(arguments(out, [job("hangs", FOREVER)], seconds=2.0))
    (hung,) = rows_of(out)
    assert hung["what"].startswith("killed after") and hung["figures"]["s"] < 30


def test_parts_of_one_phase_run_at_once(out: Path) -> None:
    """Each waits until the other one has begun."""
    meets = (
        "import sys, time; from pathlib import Path\n"
        "mine, other = map(Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.02)"
    )
    one, other = str(out.parent / "one"), str(out.parent / "other")
    run(arguments(out, [job("one", meets, one, other), job("other", meets, other, one)], together=True))
    assert sorted((row["part"], row["what"]) for row in rows_of(out)) == [("one", "ended"), ("other", "ended")]


def test_termination_kills_all_parts_and_writes_tables(out: Path) -> None:
    pid = out.parent / "pid"
    command = arguments(out, [job("hangs", WITH_A_CHILD, str(pid)), job("never", "1")])
    running = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(BENCHMARKS)}, stdout=subprocess.DEVNULL)
    while not (pid.exists() and pid.read_text()):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 0
    assert eventually_gone(int(pid.read_text()))
    assert [(row["part"], row["what"]) for row in rows_of(out)] == [("hangs", "stopped from outside")]
    assert set(os.listdir(out)) == FILES


def parts() -> dict[str, str]:
    """Phase of each part, as `--list` has it, which loads no torch."""
    done = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True)
    return {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}


def test_every_part_is_listed_with_its_phase() -> None:
    phases = parts()
    assert [name for name, phase in phases.items() if phase == "A"] == [
        *("bits-kernels", "train-bits", "loopback-bits", "offload-bits", "graph-bits", "gloo-two", "nccl-two")
    ]
    assert [name for name, phase in phases.items() if phase == "B"] == [
        *("ceilings", "kernels", "step-gpt", "step-llama", "peaks", "offload", "overlap")
    ]


def test_parts_fit_into_a_quarter_of_an_hour_and_each_into_a_lent_command() -> None:
    """Phase A takes as long as its longest part; what is expected stays below every limit."""
    code = "import json; from gpu import PARTS; print(json.dumps([vars(part) for part in PARTS.values()]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert all(part["expected_s"] < part["limit_s"] for part in found)
    together = max(part["limit_s"] for part in found if part["phase"] == "A")
    assert together + sum(part["expected_s"] for part in found if part["phase"] == "B") <= 1000
    assert max(part["limit_s"] for part in found) <= 550


def test_the_command_for_a_lent_machine_fits() -> None:
    """At most 2,000 characters; the shell can read it, and it hands over the options that the script has."""
    lines = Path(SCRIPT).read_text().split('"""')[1].splitlines()
    command = "\n".join(line[4:] for line in lines[next(n for n, line in enumerate(lines) if "set +e" in line) :])
    assert len(command) <= 2000
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


# --- dry runs ---------------------------------------------------------------------------------------------------------


def dry(out: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, SCRIPT, "--dry-run", "--out", str(out), "--scratch", str(out.parent / "scratch")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seconds", "1800", "--patience", "10", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(os.listdir(out)) == FILES
    return rows_of(out)


@pytest.mark.parametrize(
    "part",
    [
        "ceilings",
        "loopback-bits",
        "nccl-two",  # the fast tests have what starts and ends a part
        *long("bits-kernels", "train-bits", "offload-bits", "graph-bits", "gloo-two"),
        *long("kernels", "step-gpt", "step-llama", "peaks", "offload", "overlap", "large-bucket", "sanitizer"),
    ],
)
def test_a_part_runs_to_its_end_and_holds(part: str, out: Path) -> None:
    found = dry(out, "--part", part)
    assert len(found) > 1 and {row["part"] for row in found} == {part}
    assert [row for row in found if row["ok"] is False] == []
    assert found[-1]["what"] == "ended"


# --- what a profiler saw ----------------------------------------------------------------------------------------------


def evaluated(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_gaps_are_what_no_kernel_covers() -> None:
    """0-10, 5-8 inside it, 12-20, 30-31: 2 and 10 us of gaps. A user's annotation around all covers none."""
    spans = [(0, 10), (5, 8), (12, 20), (30, 31)]
    code = (
        "from types import SimpleNamespace as N; import torch; from gpu_setting import gaps_of, kernel_spans\n"
        "cuda = torch.autograd.DeviceType.CUDA\n"
        "when = lambda span: N(start=span[0], end=span[1])\n"
        "event = lambda span, note: N(device_type=cuda, is_user_annotation=note, time_range=when(span))\n"
        f"events = [event(span, False) for span in {spans}] + [event((0, 31), True)]\n"
        "print(json.dumps(gaps_of(kernel_spans(events))))"
    )
    assert evaluated(code) == {"kernels": 4, "busy ms": 0.019, "gaps ms": 0.012, "gaps above 5 us": 1}
