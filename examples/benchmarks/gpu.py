"""What one GPU can tell of zgraph, unattended and in at most 40 minutes; one JSON and one table.

    python examples/benchmarks/gpu.py                          # all parts in their order, into gpu_results/
    python examples/benchmarks/gpu.py --list
    python examples/benchmarks/gpu.py --part kernels train     # some of them, each under eight minutes
    python examples/benchmarks/gpu.py --device cpu --tiny      # the same program with toy sizes, which needs no GPU

Each part is a process of its own. One that fails, hangs or is killed leaves what it has found so far, and the next one
runs. The exit status tells whether everything has run and every check held. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_parts import PARTS
from gpu_setting import Setting

PART_S = 480.0
ALL_S = 2400.0

Result = dict[str, Any]


def run_part(name: str, given: argparse.Namespace, limit_s: float) -> Result:
    """One part in a process of its own: its rows, how it ended and how long it took."""
    rows_file = given.out / f"{name}.jsonl"
    rows_file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--worker", name, "--device", given.device, "--out", str(given.out)]
    started = time.perf_counter()
    with (given.out / f"{name}.log").open("w") as log:
        try:
            done = subprocess.run(
                [*command, *(["--tiny"] if given.tiny else [])],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
            ended = "" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit_s:.0f} s"
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    return {"part": name, "seconds": round(seconds, 1), "ended": ended, "rows": rows}


def work(name: str, given: argparse.Namespace) -> int:
    """Run a part here; each row is written as soon as it is known."""
    setting = Setting(torch.device(given.device), given.tiny, given.out)
    rows_file = given.out / f"{name}.jsonl"
    try:
        for row in PARTS[name].run(setting):
            print(row, flush=True)
            with rows_file.open("a") as file:
                file.write(json.dumps(row) + "\n")
    except Exception:
        traceback.print_exc()
        with rows_file.open("a") as file:
            file.write(json.dumps({"what": "error", "ok": False, "said": traceback.format_exc()[-2000:]}) + "\n")
        return 1
    return 0


def machine(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": "CPU"}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
    return found


def held(result: Result) -> bool:
    return not result["ended"] and all(row.get("ok") is not False for row in result["rows"])


def table(about: Mapping[str, str], results: Sequence[Result]) -> str:
    """In Markdown: a line for each row, and one for each part that did not end well."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), "", "| part | what | figures | held |"]
    lines.append("|---|---|---|---|")
    for result in results:
        for row in result["rows"]:
            figures = ", ".join(
                f"{key} {value}"
                for key, value in row.items()
                if key not in ("what", "ok", "said") and value is not None
            )
            said = str(row.get("said") or "").strip().splitlines()
            verdict = {True: "yes", False: "NO", None: ""}[row.get("ok")]
            lines.append(f"| {result['part']} | {row['what']} | {figures or (said[-1] if said else '')} | {verdict} |")
        if result["ended"]:
            lines.append(f"| {result['part']} | {result['ended']} after {result['seconds']} s | | NO |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="which; default: all")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to see that the program runs")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="directory for the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{name:<14} {part.about}" for name, part in PARTS.items()))
        return 0
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.worker:
        return work(given.worker, given)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no GPU; --device cpu --tiny runs the same program with toy sizes")
    about = machine(torch.device(given.device))
    started = time.perf_counter()
    results: list[Result] = []
    for name in given.part:
        left_s = ALL_S - (time.perf_counter() - started)
        if left_s < 5:
            results.append({"part": name, "seconds": 0.0, "ended": "no time was left", "rows": []})
        else:
            results.append(run_part(name, given, min(PART_S, left_s)))
        print(f"{name}: {results[-1]['seconds']} s, {'held' if held(results[-1]) else 'DID NOT HOLD'}", flush=True)
        # After every part: whoever stops the program keeps what it has found.
        (given.out / "gpu.json").write_text(json.dumps({"machine": about, "parts": results}, indent=1))
        (given.out / "gpu.md").write_text(table(about, results) + "\n")
    print(f"\n{table(about, results)}\n\nwritten to {given.out}")
    return 0 if all(map(held, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
