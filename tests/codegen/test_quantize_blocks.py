"""The quantize kernel: equal to the reference bit for bit in Triton's interpreter, and exact as compiled for GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
)
from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.triton import checks, launch_options, quantize_blocks
from zgraph.codegen.kernels.triton.constants import QuantizeConstants, may_contract, quantize_constants
from zgraph.codegen.kernels.triton.dequantize_blocks import Task
from zgraph.codegen.kernels.triton.launch_options import OPTIONS, LaunchOptions, load
from zgraph.codegen.kernels.triton.tables import entries_of
from zgraph.compression.methods import BlockMethod, ErrorFeedback, LoCo, NoFeedback, RngKey

pytestmark = needs_triton

BUCKETS = {
    "default": Bucket(),
    "one rank": Bucket(world=1, numels=(4101,), dtypes=(BF16,)),
    "three ranks, two stretches": Bucket(world=3, stretches=2),
    "five ranks, bucket smaller than them": Bucket(world=5, numels=(3, 1, 130), dtypes=(F32, F32, F32)),
    "whole groups": Bucket(numels=(512, 2048), dtypes=(BF16, BF16)),
    "aligned, but no whole groups": Bucket(numels=(96, 1000 * 16), dtypes=(F32, BF16)),
    "chunk of zeros alone": Bucket(world=3, numels=(4,), dtypes=(F32,)),
    "fp64": Bucket(numels=(1000,), dtypes=(F64,)),
    "2 bits": Bucket(method=LoCo(bits=2)),
    "8 bits": Bucket(method=LoCo(bits=8, group=256)),
    "2 bits, no rotation": Bucket(method=ErrorFeedback(bits=2, group=8)),
    "no rotation": Bucket(method=ErrorFeedback(group=32)),
    "fp32 error": Bucket(method=LoCo(error_dtype=F32, beta=0.3)),
    "fp32 error, no rotation": Bucket(method=ErrorFeedback(error_dtype=F32)),
    "no error": Bucket(method=NoFeedback(bits=8, group=512), stretches=2),
    "no error, rotated": Bucket(method=NoFeedback(rotate=True)),
    "small groups": Bucket(method=LoCo(group=32)),
    "large groups": Bucket(method=LoCo(group=1024)),
}


def compare(bucket: Bucket, steps: int, special: bool, warps: int) -> None:
    """The kernel beside the reference for a few steps, each with the errors of its own last step."""
    layout, rank = bucket.layout, bucket.world - 1
    expected_states, states = bucket.states(), bucket.states()
    for step in range(steps):
        draw = RngKey(step=7 * step + 2**31, salt=step)
        grads = bucket.grads(seed=step)
        if special and step:
            grads = [with_special_values(grad, seed) for seed, grad in enumerate(grads)]
        expected, payload = bucket.payload(), bucket.payload(fill=0xA5)
        reference.quantize_bucket(grads, expected_states, layout, draw, rank, expected)
        quantize_blocks.quantize_bucket(grads, states, layout, draw, rank, payload, options=LaunchOptions(warps=warps))
        written = torch.zeros_like(payload, dtype=torch.bool)
        for views in layout.views(written):
            for view in views:
                view.fill_(True)
        assert torch.equal(payload[written], expected[written]), f"step {step}: payload"
        assert (payload[~written] == 0xA5).all(), f"step {step}: bytes behind the sections"
        for place, (state, its) in enumerate(zip(states, expected_states, strict=True)):
            assert [name for name in its if not same_bits(state[name], its[name])] == [], f"step {step}: {place}"


@pytest.mark.parametrize("name", BUCKETS)
def test_kernel_equals_the_reference(name: str, interpreted: Callable[..., Any]):
    interpreted(compare, BUCKETS[name], 2, False, 4)


@pytest.mark.parametrize("name", ["default", "no error", "three ranks, two stretches", "fp32 error", "no rotation"])
def test_groups_that_are_not_finite_and_tiny_ones(name: str, interpreted: Callable[..., Any]):
    interpreted(compare, BUCKETS[name], 3, True, 8)


def test_errors_of_many_steps(interpreted: Callable[..., Any]):
    interpreted(compare, Bucket(numels=(1000,), dtypes=(BF16,)), 8, False, 8)


def test_launch_options_change_no_bits(interpreted: Callable[..., Any]):
    for options in OPTIONS:
        interpreted(compare, Bucket(numels=(1000, 63), dtypes=(BF16, F32)), 2, False, options.warps)


def compare_at_thresholds() -> None:
    """Rotated values that are code thresholds but for rounding, where the order of additions decides the code."""
    bucket = Bucket(method=LoCo(error_dtype=F32), numels=(2**15,), dtypes=(F32,))
    generator = torch.Generator().manual_seed(0)
    grads = [0.1 * torch.randint(-3, 4, (2**15,), generator=generator).to(F32)]
    expected, payload = bucket.payload(), bucket.payload()
    expected_states, states = bucket.states(), bucket.states()
    reference.quantize_bucket(grads, expected_states, bucket.layout, RngKey(0), 0, expected)
    options = LaunchOptions(warps=8)
    quantize_blocks.quantize_bucket(grads, states, bucket.layout, RngKey(0), 0, payload, options=options)
    assert torch.equal(payload, expected)
    assert same_bits(states[0]["error"], expected_states[0]["error"])


def test_additions_have_the_order_of_the_reference(interpreted: Callable[..., Any]):
    """Drawn gradients hardly ever show it: codes and scales are too coarse."""
    interpreted(compare_at_thresholds)


def compare_sums(group: int) -> None:
    method = ErrorFeedback(group=group)
    sum_alone: Any = importlib.import_module("tests.support.kernels.sum_alone").sum_alone
    options, case = LaunchOptions(warps=2), quantize_constants(method, F32, aligned=True)
    values = torch.randn(options.groups_at_once(method), group, generator=torch.Generator().manual_seed(0))
    sums = torch.full(values.shape[:1], float("nan"))
    sum_alone[(1,)](values, sums, CASE=case, THREADS=options.threads)
    assert same_bits(sums, reference.fold(values).view(-1))


@pytest.mark.parametrize("group", [8, 32, 128, 1024])
def test_sums_over_a_group_halve_it(group: int, interpreted: Callable[..., Any]):
    interpreted(compare_sums, group)


def compare_far_away() -> None:
    """Groups beyond 2^31 elements, beside the same groups at the beginning: nothing as long is there but its end."""
    method, options, kept = LoCo(rotate=False), LaunchOptions(), list[list[Tensor]]()
    groups = options.groups_at_once(method)
    numel = groups * method.group
    quantize, quantize_case = load("quantize"), quantize_constants(method, BF16, aligned=True)
    dequantize, dequantize_case = load("dequantize"), Task().constants(method, F32, aligned=True)
    for run in (0, 2**31 // numel + 3):
        before, programs = run * groups, torch.tensor([[0, run]], dtype=torch.int32)
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(BF16)
        state = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in method.state(numel, 1).items()}
        payload, output = torch.zeros(1, sum(method.sections(numel)), dtype=torch.uint8), torch.zeros(numel)
        length, starts = before * method.group + numel, [-64 * before, numel // 2 - 2 * before]
        tensors = [grad, state["error"], state["error_scale"]]
        begins = [tensor.data_ptr() - before * size for tensor, size in zip(tensors, (2 * 128, 128, 2), strict=True)]
        arguments = [programs, payload, payload.numel()]
        table = entries_of([[*begins, length, length, before + groups, *starts]], payload.device)
        quantize[1, 1, 1](table, *arguments, 0, -(2**31), CASE=quantize_case, **options.arguments())
        table = entries_of([[output.data_ptr() - 4 * 128 * before, length, before + groups, *starts]], payload.device)
        dequantize[1, 1](table, *arguments, 1, 0, 0, 1.0, CASE=dequantize_case, **options.arguments())
        kept.append([payload, *state.values(), output])
    for here, far in zip(*kept, strict=True):
        assert same_bits(far, here) and far.any()


def test_offsets_have_64_bits(interpreted: Callable[..., Any]):
    interpreted(compare_far_away)


def halve_a_scale_and_compare() -> None:
    """What a broken kernel would do."""
    right = quantize_blocks.quantize_constants

    def wrong(*args: Any, **options: Any) -> QuantizeConstants:
        case = right(*args, **options)
        return replace(case, unit=case.unit / 2)

    quantize_blocks.quantize_constants = wrong  # type: ignore[assignment]
    try:
        compare(Bucket(), 1, False, 4)
    finally:
        quantize_blocks.quantize_constants = right


def test_the_comparison_finds_a_wrong_scale(interpreted: Callable[..., Any]):
    with pytest.raises(AssertionError, match="step 0: payload"):
        interpreted(halve_a_scale_and_compare)


def test_strided_gradients_are_refused():
    bucket = Bucket(numels=(16,), dtypes=(F32,))
    strided = [torch.zeros(4, 4).t()]
    with pytest.raises(ValueError, match=r"quantize_blocks: tensor 0 of shape \(4, 4\) has strides \(1, 4\)"):
        quantize_blocks.quantize_bucket(strided, bucket.states(), bucket.layout, RngKey(0), 0, bucket.payload())


def test_tensors_on_the_cpu_are_refused_where_triton_compiles():
    bucket = Bucket()
    with pytest.raises(ValueError, match="quantize_blocks: the payload is on the CPU"):
        quantize_blocks.quantize_bucket(bucket.grads(0), bucket.states(), bucket.layout, RngKey(0), 0, bucket.payload())


def test_misaligned_payload_is_refused():
    with pytest.raises(ValueError, match=r"quantize_blocks: a uint8 tensor of shape \(3,\) begins 4 bytes after"):
        checks.require_aligned("quantize_blocks", [torch.zeros(32, dtype=torch.uint8)[4:7]])


# --- what it is compiled for ----------------------------------------------------------------------------------------


def test_one_kernel_serves_all_buckets(monkeypatch: pytest.MonkeyPatch):
    """Of gradients of one dtype, however many and of whatever sizes: it is compiled once."""
    launched: list[QuantizeConstants] = []
    monkeypatch.setattr(launch_options, "load", lambda _: NotLaunched(launched))  # pyright: ignore[reportUnknownLambdaType]
    for numels in ((64, 1024, 4104), (72,), (5,), (77, 2222)):
        bucket = Bucket(numels=numels, dtypes=(BF16,) * len(numels), world=1)
        grads = [torch.zeros(numel, dtype=BF16) for numel in numels]
        quantize_blocks.quantize_bucket(
            grads, bucket.states(), bucket.layout, RngKey(0), 0, bucket.payload(), options=LaunchOptions()
        )
    first, second, third, fourth = launched
    assert first == second and third == fourth, "one for sizes that are multiples of 8, and one for others"


class NotLaunched:
    def __init__(self, launched: list[QuantizeConstants]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, CASE, **__: self.launched.append(CASE)


def test_only_addresses_are_specialized():
    """So that a new step, rank or size compiles nothing."""
    specialized = [
        param.name for param in load("quantize").params if not (param.do_not_specialize or param.is_constexpr)
    ]
    assert specialized == ["table", "programs", "payload"]


# --- as compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("method", "dtype", "aligned"),
    [(LoCo(), F16, False), (LoCo(group=1024), BF16, True), (ErrorFeedback(error_dtype=F32), BF16, True)],
    ids=lambda value: str(value)[:40],
)
def test_compiled_kernel_is_exact_and_spills_nothing(
    method: BlockMethod, dtype: torch.dtype, aligned: bool, capability: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """Compiles for a GPU that is not there, which takes two seconds."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = quantize_constants(method, dtype, aligned=aligned)
    contracts = may_contract(method)
    found = compiled(load("quantize"), case, LaunchOptions(), contracts, capability)
    assert_exact(found, contracts)
    if aligned:  # 16 bytes at once
        assert "ld.global.v4.b32" in found.ptx


def test_products_are_contracted_with_additions_where_they_are_exact():
    """Factors of 0.8 / 0.2 and 0 take few bits; 0.3 / 0.7 takes 24, and so do errors in fp32."""
    assert may_contract(LoCo()) and may_contract(NoFeedback(rotate=True)) and may_contract(ErrorFeedback(bits=2))
    assert not may_contract(LoCo(beta=0.3)) and not may_contract(LoCo(error_dtype=F32))
    assert not may_contract(LoCo(group=256)) and not may_contract(NoFeedback(bits=8))


def test_types_of_special_values_are_what_they_are_called():
    values: Tensor = with_special_values(torch.ones(5000), 0)
    assert values.isnan().any() and values.isinf().any() and (values == 0).sum() >= 300
