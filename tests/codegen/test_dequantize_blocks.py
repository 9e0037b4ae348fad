"""The dequantize kernel: equal to the reference bit for bit in Triton's interpreter, and exact as compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.kernels.buckets import (
    BF16,
    F16,
    F32,
    F64,
    Bucket,
    assert_exact,
    compiled,
    needs_triton,
    same_bits,
    with_special_values,
    within,
)
from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton import dequantize_blocks
from zgraph.codegen.kernels.triton.dequantize_blocks import Task
from zgraph.codegen.kernels.triton.launch_options import LaunchOptions, load
from zgraph.compression.methods import BlockMethod, ErrorFeedback, LoCo, NoFeedback, RngKey

pytestmark = needs_triton

BUCKETS = {
    "default": Bucket(),
    "one rank": Bucket(world=1, numels=(4101,), dtypes=(BF16,)),
    "three ranks, two stretches": Bucket(world=3, stretches=2),
    "five ranks, bucket smaller than them": Bucket(world=5, numels=(3, 1, 130), dtypes=(F32, F32, F32)),
    "whole groups": Bucket(numels=(512, 2048), dtypes=(BF16, F32)),
    "fp64": Bucket(numels=(1000,), dtypes=(F64,)),
    "2 bits": Bucket(method=LoCo(bits=2)),
    "8 bits": Bucket(method=LoCo(bits=8, group=256)),
    "2 bits, no rotation": Bucket(method=ErrorFeedback(bits=2, group=8)),
    "no rotation": Bucket(method=ErrorFeedback(group=32)),
    "8 bits, no rotation": Bucket(method=NoFeedback(bits=8, group=512), stretches=2),
    "large groups": Bucket(method=LoCo(group=1024)),
}


def compare(bucket: Bucket, special: bool, accumulate: bool, divisor: int, first_rank: int) -> None:
    """The kernel beside the reference, storing into outputs that lie within NaN."""
    layout, draw = bucket.layout, RngKey(step=3, salt=9)
    grads = [bucket.grads(seed=rank) for rank in range(bucket.world)]
    if special:
        grads = [[with_special_values(grad, rank) for grad in given] for rank, given in enumerate(grads)]
    received = bucket.sent_to(bucket.world - 1, draw, grads)
    start = 1.7 if accumulate else float("nan")
    expected = [
        within(torch.full((layout.stretches * length,), start, dtype=dtype))
        for length, dtype in zip(layout.numels, bucket.dtypes, strict=True)
    ]
    outputs = [within(output) for output in expected]
    reference.dequantize_sum_bucket(received, layout, draw, first_rank, divisor, expected, accumulate=accumulate)
    dequantize_blocks.dequantize_sum_bucket(
        received, layout, draw, first_rank, divisor, outputs, accumulate=accumulate, options=LaunchOptions(warps=4)
    )
    for place, (output, its) in enumerate(zip(outputs, expected, strict=True)):
        # A NaN is a NaN, whichever of its bits are set.
        assert torch.equal(output.isnan(), its.isnan()), place
        assert same_bits(output.nan_to_num(0.0), its.nan_to_num(0.0)), place
        around = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage())
        assert int(around.isnan().sum() - output.isnan().sum()) == 80, f"{place}: written beyond its ends"
    if not special:
        assert not any(output.isnan().any() for output in outputs)


@pytest.mark.parametrize("name", BUCKETS)
def test_kernel_equals_the_reference(name: str, interpreted: Callable[..., Any]):
    interpreted(compare, BUCKETS[name], False, False, BUCKETS[name].world, 0)


@pytest.mark.parametrize("name", ["default", "fp64", "three ranks, two stretches"])
def test_sums_are_added_to_the_outputs(name: str, interpreted: Callable[..., Any]):
    interpreted(compare, BUCKETS[name], False, True, 7, 4)


@pytest.mark.parametrize("name", ["default", "8 bits, no rotation"])
def test_groups_that_are_not_finite_become_nan(name: str, interpreted: Callable[..., Any]):
    interpreted(compare, BUCKETS[name], True, False, 3, 0)


def compare_each(bucket: Bucket, apart: int) -> None:
    """All ranks' values beside the reference; rows lie within longer ones, as parameters of one gather do."""
    layout, draw, ranks = bucket.layout, RngKey(step=3, salt=9), 3
    rows = [bucket.payload() for _ in range(ranks)]
    for rank, row in enumerate(rows):
        reference.quantize_bucket(bucket.grads(rank), bucket.states(), layout, draw, rank, row)
    received = torch.full((ranks, layout.payload_bytes + apart), 0x5A, dtype=torch.uint8)
    received[:, apart : apart + layout.payload_bytes] = torch.cat(rows)
    shapes = [(ranks, numel) for numel in layout.numels]
    expected, outputs = (
        [
            within(torch.full(shape, float("nan"), dtype=dtype))
            for shape, dtype in zip(shapes, bucket.dtypes, strict=True)
        ]
        for _ in range(2)
    )
    for run, into in (
        (reference.dequantize_each_bucket, expected),
        (dequantize_blocks.dequantize_each_bucket, outputs),
    ):
        run(
            received[:, apart : apart + layout.payload_bytes], layout, draw,
            [output.view(shape) for output, shape in zip(into, shapes, strict=True)],
        )  # fmt: skip
    for output, its in zip(outputs, expected, strict=True):
        assert same_bits(output, its) and not output.isnan().any()
        around = torch.empty(0, dtype=output.dtype).set_(output.untyped_storage())
        assert int(around.isnan().sum()) == 80, "written beyond its ends"


@pytest.mark.parametrize("apart", [0, 48])
@pytest.mark.parametrize("method", [LoCo(), NoFeedback(bits=8, group=512)])
def test_values_of_every_rank_in_one_launch(method: LoCo | NoFeedback, apart: int, interpreted: Callable[..., Any]):
    interpreted(compare_each, Bucket(method=method, world=1), apart)


def test_strided_outputs_are_refused():
    bucket = Bucket(numels=(16,), dtypes=(F32,))
    with pytest.raises(ValueError, match=r"dequantize_blocks: tensor 1 of shape \(8,\) has strides \(2,\)"):
        dequantize_blocks.dequantize_sum_bucket(
            bucket.payload(), bucket.layout, RngKey(0), 0, 1, [torch.zeros(16)[::2]]
        )


# --- what it is compiled for ----------------------------------------------------------------------------------------


def test_powers_of_two_are_multiplied_by():
    """Which gives the same bits as a division."""
    assert Task(divisor=3).constants(LoCo(), F32, aligned=True).divides
    assert not Task(divisor=4).constants(LoCo(), F32, aligned=True).divides and Task(divisor=4).factor == 0.25


def test_only_addresses_are_specialized():
    """So that another number of ranks or other sizes compile nothing."""
    specialized = [
        param.name for param in load("dequantize").params if not (param.do_not_specialize or param.is_constexpr)
    ]
    assert specialized == ["table", "programs", "received"]


# --- as compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("method", "dtype", "task"),
    [(LoCo(), BF16, Task(divisor=3, accumulate=True)), (NoFeedback(bits=8, group=512), F16, Task(each=True))],
    ids=lambda value: str(value)[:40],
)
def test_compiled_kernel_is_exact_and_spills_nothing(
    method: BlockMethod, dtype: torch.dtype, task: Task, capability: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = task.constants(method, dtype, aligned=False)
    assert_exact(compiled(load("dequantize"), case, LaunchOptions(), True, capability), contracts=True)
