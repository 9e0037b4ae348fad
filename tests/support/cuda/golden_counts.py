"""What compiled graphs of a Llama count: the one place where these numbers stand.

    python -m tests.support.cuda.golden_counts        # counts anew, and writes golden_counts.json

A change that makes a number worse is to be explained; one that makes it better is written down by that line.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.cuda.llama import Shape
from tests.support.cuda.pretended_gpu import pretended_gpu, why_not
from tests.support.cuda.tracing import Counts, Step, trace
from zgraph.analysis.hardware import Hardware
from zgraph.compiler.target import Target
from zgraph.passes import presets

PATH = Path(__file__).parent / "golden_counts.json"
LAYERS = (2, 4)
PLANNED = tuple(presets.planned())
H100 = Target(hardware=Hardware.preset("h100"))

# By name: what is counted for Llama 3 8B on 8 ranks, NCCL, in bf16, stage 3 where nothing else is said.
CASES: dict[str, Callable[[Shape], Step]] = {
    "by default": lambda shape: Step(shape=shape),
    "by default, stage 0": lambda shape: Step(shape=shape, zero_stage=0),
    "planned for H100": lambda shape: Step(shape=shape, passes=PLANNED, target=H100),
    "planned for H100, fx": lambda shape: Step(shape=shape, passes=PLANNED, target=H100, lowering="fx"),
}


def count(call: Callable[..., Any], name: str) -> dict[str, dict[str, dict[str, float]]]:
    """Flat counts of a case by direction: of a model of four layers, and of each layer that it has more than another.

    The latter is half of what two layers add; where buckets straddle layers that may be no whole number.
    """
    few, many = ([flat(each) for each in call(trace, CASES[name](Shape(layers=layers)))] for layers in LAYERS)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for direction, fewer, more in zip(("forward", "backward"), few, many, strict=True):
        names = sorted({*fewer, *more})
        added = {key: (more.get(key, 0) - fewer.get(key, 0)) / (LAYERS[1] - LAYERS[0]) for key in names}
        found[direction] = {"4 layers": _nonzero(more), "each layer": _nonzero(added)}
    return found


def flat(counts: Counts) -> dict[str, int]:
    """One number for each name: what is a dictionary in Counts becomes "eager div" and the like."""
    found: dict[str, int] = {}
    for name, value in asdict(counts).items():
        if isinstance(value, dict):
            found |= {f"{name} {key}": number for key, number in value.items()}
        elif isinstance(value, int):
            found[name] = value
    return found


def _nonzero(numbers: Mapping[str, float]) -> dict[str, float]:
    """By name; whole numbers without a point."""
    return {
        name: int(number) if number == int(number) else number for name, number in sorted(numbers.items()) if number
    }


def golden() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def main() -> None:
    if missing := why_not():
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder, pretended_gpu(Path(folder)) as call:
        found = {name: count(call, name) for name in CASES}
    PATH.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
