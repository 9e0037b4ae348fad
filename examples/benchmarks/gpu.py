"""What one GPU can tell of zgraph in ten minutes, unattended; from a checkout, with nothing installed but torch.

    python examples/benchmarks/gpu.py --seconds 550 --out OUT --scratch /tmp/scratch       # all parts
    python examples/benchmarks/gpu.py --phase A                   # whether it is right: all at once, times nothing
    python examples/benchmarks/gpu.py --phase B                   # how fast it is: one part after the other, alone
    python examples/benchmarks/gpu.py --part nccl-two ceilings    # some of them
    python examples/benchmarks/gpu.py --list
    python examples/benchmarks/gpu.py --dry-run                   # the same program with toy sizes, on a CPU

Each part is a process of its own, with a session that is killed at the part's limit. Four files come into OUT:
rows.jsonl, to which each row is appended when it is known; gpu.json and gpu.md, written again after each part; and
log.txt. All else (checkpoints, caches, files of the disk) goes to the scratch folder. A part that is not expected to
end in the time that is left is skipped. The exit status is 0: whether all held is in the rows. Nothing is downloaded.

Where a machine with a GPU is lent for one command of ten minutes, this is that command, from the checkout's root;
$OUT is the folder that comes back. Two runs are better than one: T=170 B=160 P="--phase A", then what is left.

    set +e; mkdir -p out/scratch "${OUT:=out/results}"
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,clocks.sm,temperature.gpu \
        --format=csv,noheader | tee "$OUT/smi.csv"
    timeout -k 10 ${T:-575} python3 examples/benchmarks/gpu.py --seconds ${B:-560} --out "$OUT" --scratch out/scratch \
        ${P:-} 2>&1 | tail -c 9000
    ls -l "$OUT"
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_jobs import Job, Runner
from gpu_parts import ALONE, PARTS, TOGETHER
from gpu_results import Results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def environment(scratch: Path, *, together: bool) -> dict[str, str]:
    """What the parts need of one: this checkout, results that repeat, no network, and a share of the processors."""
    found = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    return found | ({"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"} if together else {})


def jobs(names: Sequence[str], given: argparse.Namespace, started: float, *, together: bool) -> list[Job]:
    flags = ["--out", str(given.out), "--scratch", str(given.scratch), "--started", str(started)]
    flags += ["--dry-run"] if given.dry_run else []
    return [
        Job(
            name=name,
            command=[sys.executable, str(HERE / "gpu_worker.py"), name, *flags],
            expected_s=PARTS[name].expected_s,
            limit_s=PARTS[name].limit_s * given.patience,
            environment=environment(given.scratch, together=together),
        )
        for name in names
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", nargs="+", choices=(TOGETHER, ALONE), default=[TOGETHER, ALONE])
    parser.add_argument("--part", nargs="+", choices=list(PARTS), help="these, of whatever phase")
    parser.add_argument("--seconds", type=float, default=550.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of the four files")
    parser.add_argument("--scratch", type=Path, help="folder of all other files; default: gpu_scratch beside --out")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the parts' limits, on slow machines")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.scratch = (given.scratch or given.out.parent / "gpu_scratch").resolve()
    return given


def main() -> int:
    given = arguments()
    if given.list:
        for name, part in PARTS.items():
            print(f"{part.phase or '-'} {name:<14} {part.expected_s:>4.0f} s  {part.about}")
        return 0
    for folder in (given.out, given.scratch):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    results = Results(given.out, started)
    runner = Runner(results, given.scratch, given.seconds)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, runner.stop)
    for phase in (TOGETHER, ALONE):
        names = [name for name, part in PARTS.items() if part.phase == phase and phase in given.phase]
        if given.part:  # what runs on request has the machine to itself
            names = [name for name in given.part if (PARTS[name].phase == TOGETHER) == (phase == TOGETHER)]
        runner.run(jobs(names, given, started, together=phase == TOGETHER), together=phase == TOGETHER)
    results.rewrite_tables()
    print(f"\n{(given.out / 'gpu.md').read_text()}\nwritten to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
