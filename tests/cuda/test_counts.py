"""What the compiled graphs of a Llama do on a GPU, counted: golden numbers, and laws that they have to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.cuda.golden_counts import CASES, count, golden
from tests.support.cuda.llama import SMALL, Shape
from tests.support.cuda.tracing import Counts, Step, trace
from zgraph.passes import presets

WORLD = 8


@pytest.mark.parametrize("name", CASES)
def test_counts_are_the_golden_ones(name: str, on_gpu: Callable[..., Any]) -> None:
    """After a change that is meant to move them: python -m tests.support.cuda.golden_counts."""
    assert count(on_gpu, name) == golden()[name]


def elements(shape: Shape) -> tuple[int, int]:
    """Parameters of a Llama, and those of its embedding, which backward does not read."""
    width, keys = shape.width, shape.width * shape.key_heads // shape.heads
    layer = 2 * width + 2 * width * width + 2 * width * keys + 3 * width * shape.hidden
    embedding = shape.vocabulary * width
    return 2 * embedding + width + shape.layers * layer, embedding


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wire_bytes_are_those_of_the_readme(stage: int, micro_batches: int, on_gpu: Callable[..., Any]) -> None:
    """2P at stages 0 and 1, (k+1)P at 2 and 3kP at 3, of which (N-1)/N are sent.

    Less at stage 3: backward does not gather the embedding. All sizes are multiples of the ranks, so nothing is padded.
    """
    step = Step(
        shape=SMALL,
        lowering="fx",
        world=WORLD,
        zero_stage=stage,
        param_dtype=None,
        tokens=128,
        micro_batches=micro_batches,
    )
    found: list[Counts] = on_gpu(trace, step)
    whole, embedding = elements(SMALL)
    # Stage 3 has no windows. Elsewhere graphs of open micro-batches are compiled once and run for all but the last.
    runs = [micro_batches] * 2 if len(found) == 2 else [micro_batches - 1] * 2 + [1] * 2
    sent = sum(times * counts.sent_bytes for times, counts in zip(runs, found, strict=True))
    kept = {counts.kept_bytes for counts in found} - {0}  # sent by the first forward of a window alone
    expected = {0: 2 * whole, 1: 2 * whole, 2: (micro_batches + 1) * whole, 3: micro_batches * (3 * whole - embedding)}
    assert sent + sum(kept) == expected[stage] * torch.float32.itemsize * (WORLD - 1) // WORLD


def test_equal_layers_have_equal_islands(on_gpu: Callable[..., Any]) -> None:
    """Two layers more are compiled for nothing where each weight travels alone: buckets across layers differ."""
    passes = tuple(presets.default(bucket_bytes=2**20))
    few, many = (on_gpu(trace, Step(shape=Shape(layers=layers), tokens=512, passes=passes)) for layers in (4, 6))
    for fewer, more in zip(few, many, strict=True):
        assert more.islands > fewer.islands
        assert more.distinct_islands <= fewer.distinct_islands + 2
