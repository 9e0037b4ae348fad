"""One part of gpu.py in this process: `gpu_worker.py PART --out DIR --scratch DIR --started S [--dry-run]`."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

import torch
from gpu_parts import PARTS
from gpu_results import Results
from gpu_setting import Setting

SAID = 2000  # characters of an error


def work(name: str, setting: Setting, results: Results) -> int:
    """Add each row as soon as it is known; an error is one more."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    scratch = given.scratch / given.part
    scratch.mkdir(parents=True, exist_ok=True)
    setting = Setting(torch.device("cpu" if given.dry_run else "cuda"), given.dry_run, scratch)
    return work(given.part, setting, Results(given.out, given.started))


if __name__ == "__main__":
    sys.exit(main())
