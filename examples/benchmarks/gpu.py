"""Check and measure zgraph on one GPU, unattended, in a quarter of an hour; needs a checkout and torch.

    python examples/benchmarks/gpu.py --seconds 900 --out OUT --scratch /tmp/scratch       # all parts
    python examples/benchmarks/gpu.py --phase A                   # whether it is right: all at once, times nothing
    python examples/benchmarks/gpu.py --phase B                   # how fast it is: one part after the other, alone
    python examples/benchmarks/gpu.py --part nccl-two ceilings    # some of them
    python examples/benchmarks/gpu.py --list
    python examples/benchmarks/gpu.py --dry-run                   # the same program with toy sizes, on a CPU

Each part is a process of its own, with a session that is killed at the part's limit. Four files come into OUT:
rows.jsonl, to which each row is appended when it is known; gpu.json and gpu.md, written again after each part; and
log.txt. All else (checkpoints, caches, files of the disk) goes to the scratch folder. A part that is not expected to
end in the time that is left is skipped. The exit status is 0: whether all held is in the rows. Nothing is downloaded.

Where a machine with a GPU is lent for commands of ten minutes, this is such a command, from the checkout's root; $OUT
is the folder that comes back. Two runs are needed: T=175 B=165 P="--phase A", then P="--part" and what fits of phase B.

    set +e; mkdir -p out/scratch "${OUT:=out/results}"
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,clocks.sm,temperature.gpu \
        --format=csv,noheader | tee "$OUT/smi.csv"
    timeout -k 10 ${T:-575} python3 examples/benchmarks/gpu.py --seconds ${B:-560} --out "$OUT" --scratch out/scratch \
        ${P:-} 2>&1 | tail -c 9000
    ls -l "$OUT"
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_jobs import Job, Results, Runner

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOGETHER, ALONE, ON_REQUEST = "A", "B", ""
SAID = 2000  # characters of an error


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        phase: "A", whose parts time nothing and run together; "B", one by one; "" runs where it is named alone.
        expected_s: on an H100 with empty caches.
        limit_s: after which it is killed.
        function: "module:function", which takes a Setting and yields rows.
        about: what `--list` says of it.
    """

    phase: str
    expected_s: float
    limit_s: float
    function: str
    about: str


PARTS: dict[str, Part] = {
    "bits-kernels": Part(TOGETHER, 60, 110, "gpu_kernels:bits", "kernels against the CPU reference, bit for bit"),
    "train-bits": Part(TOGETHER, 95, 130, "gpu_training:train_bits", "README's script against plain PyTorch"),
    "loopback-bits": Part(TOGETHER, 105, 130, "gpu_loopback:loopback_bits", "8 ranks on one GPU, late: the same bits"),
    "offload-bits": Part(TOGETHER, 120, 150, "gpu_offload:offload_bits", "on host and disk: the same bits"),
    "graph-bits": Part(TOGETHER, 60, 110, "gpu_training:graph_bits", "steps as CUDA graphs: the same bits"),
    "gloo-two": Part(TOGETHER, 70, 110, "gpu_ranks:gloo_two", "two gloo ranks: resumed bitwise"),
    "nccl-two": Part(TOGETHER, 60, 110, "gpu_ranks:nccl_two", "two NCCL ranks on one GPU: the bits of gloo"),
    "ceilings": Part(ALONE, 20, 40, "gpu_ceilings:ceilings", "what the machine can do at most; calibrate()"),
    "kernels": Part(ALONE, 50, 90, "gpu_kernels:times", "compression kernels, compared with a copy of as many bytes"),
    "step-gpt": Part(ALONE, 180, 240, "gpu_step:gpt_steps", "GPT-2 small beside torch.compile and FSDP2"),
    "step-llama": Part(ALONE, 60, 120, "gpu_step:llama_steps", "a layer of Llama 3 8B beside them"),
    "peaks": Part(ALONE, 110, 150, "gpu_peaks:peaks", "predicted and measured peaks"),
    "offload": Part(ALONE, 250, 340, "gpu_offload:offload", "state on the host, hidden or not, beside FSDP2"),
    "overlap": Part(ALONE, 180, 240, "gpu_loopback:overlap", "8 ranks and an emulated link: exposed time"),
    "large-bucket": Part(ON_REQUEST, 15, 60, "gpu_kernels:large_bucket", "one bucket above 2^31 elements"),
    "sanitizer": Part(ON_REQUEST, 240, 420, "gpu_kernels:sanitizer", "the kernels under compute-sanitizer"),
}


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
            command=[sys.executable, __file__, "--work-on", name, *flags],
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
    parser.add_argument("--seconds", type=float, default=900.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of the four files")
    parser.add_argument("--scratch", type=Path, help="folder of all other files; default: gpu_scratch beside --out")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the parts' limits, on slow machines")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on the CPU")
    parser.add_argument("--work-on", choices=list(PARTS), help=argparse.SUPPRESS)  # in the process of a part
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.scratch = (given.scratch or given.out.parent / "gpu_scratch").resolve()
    return given


def work(name: str, given: argparse.Namespace) -> int:
    """Run a part in this process: add each row as soon as it is known; an error is one more."""
    import torch
    from gpu_setting import Setting

    scratch = given.scratch / name
    scratch.mkdir(parents=True, exist_ok=True)
    setting = Setting(torch.device("cpu" if given.dry_run else "cuda"), given.dry_run, scratch)
    results = Results(given.out, given.started)
    device = torch.cuda.get_device_name() if setting.on_cuda else "CPU"
    module, _, function = PARTS[name].function.partition(":")
    try:
        for row in getattr(importlib.import_module(module), function)(setting):
            figures = {key: value for key, value in row.items() if key not in ("what", "ok")}
            results.add(name, row["what"], row.get("ok"), figures, device)
            print(row, flush=True)
    except Exception as error:
        traceback.print_exc()
        results.add(name, f"error: {type(error).__name__}", False, {"said": traceback.format_exc()[-SAID:]}, device)
        return 1
    return 0


def main() -> int:
    given = arguments()
    if given.work_on:
        return work(given.work_on, given)
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
