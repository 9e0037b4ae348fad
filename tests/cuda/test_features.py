"""Everything that a user may write compiles for a GPU: forward and backward, to the machine code of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.cuda.llama import SMALL
from tests.support.cuda.tracing import Counts, Step, trace
from zgraph.compression.methods import LoCo, NoFeedback
from zgraph.passes import presets

SHAPE = replace(SMALL, layers=1)
STEP = Step(shape=SHAPE, tokens=128)
Compile = Callable[..., list[Counts]]
LOWERINGS = pytest.mark.parametrize("lowering", ["fx", "inductor"])


def attentions(counts: Counts) -> dict[str, int]:
    return {name: number for name, number in counts.library.items() if "scaled_dot_product" in name}


@pytest.fixture(scope="module")
def compiled(on_gpu: Callable[..., Any]) -> Compile:
    """Counts of a step with other options of its shape; each is compiled once."""

    @functools.cache
    def compile_once(step: Step) -> list[Counts]:
        return on_gpu(trace, step)

    return lambda step, **shape: compile_once(replace(step, shape=replace(step.shape, **shape)))


@LOWERINGS
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_attention_is_one_kernel_each_way(lowering: str, param_dtype: torch.dtype | None, compiled: Compile) -> None:
    forward, backward = compiled(replace(STEP, lowering=lowering, param_dtype=param_dtype))
    assert sum(attentions(forward).values()) == SHAPE.layers
    assert sum(attentions(backward).values()) == SHAPE.layers
    assert all("backward" in name for name in attentions(backward))


@LOWERINGS
def test_autocast_gathers_in_its_own_dtype(lowering: str, compiled: Compile) -> None:
    """Casts go before the gathers: as many bytes as with param_dtype, but for what autocast leaves alone."""
    step = replace(STEP, lowering=lowering, param_dtype=None)
    cast, _ = compiled(step, autocast=True)
    narrow, _ = compiled(replace(step, param_dtype=torch.bfloat16))
    wide, _ = compiled(step)
    norms = (2 * SHAPE.layers + 1) * SHAPE.width
    embedding = SHAPE.vocabulary * SHAPE.width  # read by no matmul: fp32 under autocast
    assert cast.sent_bytes == narrow.sent_bytes + 2 * (norms + embedding) * 7 // 8
    assert wide.sent_bytes == 2 * narrow.sent_bytes


@LOWERINGS
def test_dropout_is_drawn_outside_of_islands(lowering: str, compiled: Compile) -> None:
    """Once for each, in forward alone, in the order in which eager torch draws."""
    forward, backward = compiled(replace(STEP, lowering=lowering), dropout=0.1)
    drawn = [sum(n for name, n in each.eager.items() if "rand" in name or name == "native_dropout")
             for each in (forward, backward)]  # fmt: skip
    assert drawn == [2 * SHAPE.layers, 0]


@LOWERINGS
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
def test_checkpointed_attention_is_computed_again(
    lowering: str, param_dtype: torch.dtype | None, compiled: Compile
) -> None:
    """One kernel in forward; two in backward, of which one is forward's: a plain call, for it draws nothing."""
    step = replace(STEP, lowering=lowering, param_dtype=param_dtype)
    forward, backward = compiled(step, checkpointed=True)
    assert attentions(forward) == attentions(compiled(step)[0])
    again = {name: number for name, number in attentions(backward).items() if "backward" not in name}
    assert again == attentions(forward)
    assert sum(attentions(backward).values()) == 2 * SHAPE.layers


@LOWERINGS
def test_checkpointed_dropout_is_drawn_again(lowering: str, compiled: Compile) -> None:
    """By the device's generator, in the state in which forward has drawn."""
    found = compiled(replace(STEP, lowering=lowering), dropout=0.1, checkpointed=True)
    drawn = [{name: n for name, n in each.eager.items() if "rand" in name or "wrapped" in name} for each in found]
    assert [sum(each.values()) for each in drawn] == [2 * SHAPE.layers] * 2
    assert all("wrapped" in name for each in drawn for name in each)


@LOWERINGS
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_travel_as_codes(lowering: str, stage: int, compiled: Compile) -> None:
    passes = tuple(presets.default(compression=LoCo()))
    step = replace(STEP, lowering=lowering, zero_stage=stage)
    _, plain = compiled(step)
    _, found = compiled(replace(step, passes=passes))
    assert found.eager["quantize_grads"] == found.eager["dequantize_sum"] > 0
    assert found.sent_bytes < plain.sent_bytes


@LOWERINGS
def test_parameters_travel_as_codes(lowering: str, compiled: Compile) -> None:
    passes = tuple(presets.default(gather_compression=NoFeedback(bits=8)))
    plain, _ = compiled(replace(STEP, lowering=lowering))
    found, _ = compiled(replace(STEP, lowering=lowering, passes=passes))
    assert found.eager["quantize_shards"] > 0
    assert found.sent_bytes < 0.6 * plain.sent_bytes


@LOWERINGS
def test_without_gradients(lowering: str, compiled: Compile) -> None:
    (found,) = compiled(replace(STEP, lowering=lowering, trains=False))
    assert found.direction == "inference"
    assert sum(attentions(found).values()) == SHAPE.layers


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_pointwise_runs_outside_of_islands(stage: int, compiled: Compile) -> None:
    """What stays alone are single operators between two collectives."""
    found = compiled(replace(STEP, zero_stage=stage))
    for counts in found:
        assert sum(counts.eager.values()) <= 12, counts.eager
