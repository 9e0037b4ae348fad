"""The C++ kernels equal the reference bit for bit, whatever the method, the bucket and the numbers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.codegen.kernels.cpu import blocks as cpu_blocks
from zgraph.compression.methods import BlockMethod, ErrorFeedback, LoCo, NoFeedback, RngKey
from zgraph.compression.payload import BucketLayout
from zgraph.errors import ZgraphWarning

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 63, 1000, 4096 + 5)
# What a gradient looks like: std, or a special number among normal ones.
KINDS = (1.0, 1e-8, 1e30, 1e-33, 1e-40, 0.0, "one NaN", "one inf", "overflow", "largest")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_grad(numel: int, kind: float | str, dtype: torch.dtype, seed: int) -> Tensor:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    if isinstance(kind, float):
        return (grad * kind).to(dtype)
    grad[numel // 2] = {"one NaN": float("nan"), "one inf": float("-inf")}.get(kind, 1.0)
    if kind == "overflow":  # finite, and sums of 32 are not
        grad = grad.sign() * 3e38
    if kind == "largest":  # rounds to an infinite bf16
        grad[numel // 3] = torch.finfo(torch.float32).max
    return grad.to(dtype)


def make_states(layout: BucketLayout) -> list[dict[str, Tensor]]:
    chunks = layout.stretches * layout.world
    shapes = [layout.method.state(numel, chunks) for numel in layout.numels]
    return [{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in of.items()} for of in shapes]


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits, and a NaN where there is one: which NaN an addition returns is the processor's affair."""
    assert found.dtype == expected.dtype
    if found.dtype.is_floating_point:
        assert torch.equal(found.isnan(), expected.isnan())
        bits = {2: torch.int16, 4: torch.int32}[found.itemsize]
        found, expected = (t.masked_fill(t.isnan(), 0).view(bits) for t in (found, expected))
    assert torch.equal(found, expected)


def check_steps(
    layout: BucketLayout,
    kinds: list[float | str],
    dtypes: list[torch.dtype],
    *,
    steps: int = 2,
    lacking: int = 0,
    seed: int = 0,
) -> None:
    """Quantize, exchange with oneself, and sum, beside the reference."""
    states, expected_states = make_states(layout), make_states(layout)
    for step in range(steps):
        grads = [
            make_grad(max(1, numel * layout.world * layout.stretches - lacking), kind, dtype, seed + 100 * step + place)
            for place, (numel, kind, dtype) in enumerate(zip(layout.numels, kinds, dtypes, strict=True))
        ]
        draw, rank = RngKey(step=seed + step, salt=seed // 3), seed % layout.world
        payload, expected = (torch.zeros(layout.world, layout.payload_bytes, dtype=torch.uint8) for _ in range(2))
        cpu_blocks.quantize_bucket(grads, states, layout, draw, rank, payload)
        reference.quantize_bucket(grads, expected_states, layout, draw, rank, expected)
        assert torch.equal(payload, expected)
        for state, expected_state in zip(states, expected_states, strict=True):
            for name in expected_state:
                assert_same_bits(state[name], expected_state[name])

        outputs, expected_outputs = (
            [
                torch.full((layout.stretches * numel,), float("nan"), dtype=dtype)
                for numel, dtype in zip(layout.numels, dtypes, strict=True)
            ]
            for _ in range(2)
        )
        for accumulate in (False, True):
            arguments = (payload, layout, draw, seed % 2, layout.world)
            cpu_blocks.dequantize_sum_bucket(*arguments, outputs, accumulate=accumulate)
            reference.dequantize_sum_bucket(*arguments, expected_outputs, accumulate=accumulate)
            for output, expected_output in zip(outputs, expected_outputs, strict=True):
                assert_same_bits(output, expected_output)


@st.composite
def methods(draw: st.DrawFn) -> BlockMethod:
    kind = draw(st.sampled_from((LoCo, ErrorFeedback, NoFeedback)))
    rotate = draw(st.booleans())
    return kind(
        bits=draw(st.sampled_from((2, 4, 8))),
        group=draw(st.sampled_from((32, 64, 128, 512, 1024) if rotate else (8, 16, 32, 128, 512))),
        rotate=rotate,
        clip_search=draw(st.booleans()),
        error_dtype=draw(st.sampled_from((torch.int8, torch.float32))),
    )


# Each example compiles two kernels, half a second each; the same ones each time, so that they are found on disk.
@settings(max_examples=16, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(methods(), st.sampled_from(DTYPES), st.integers(1, 3), st.integers(0, 1000))
def test_any_method_equals_the_reference(method: BlockMethod, dtype: torch.dtype, world: int, seed: int) -> None:
    layout = BucketLayout(method, (*SIZES, *SIZES, 300, 200), world, stretches=2)
    check_steps(layout, list(KINDS), [dtype] * 10, lacking=2, seed=seed)


# Eight kernels are compiled, in half a second each and more, by a compiler whose command differs from run to run.
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="these are features of x86")
@pytest.mark.parametrize(("lacking", "beta"), [("avx512f", 0.640625), ("avx", 0.578125)])
def test_processors_with_shorter_vectors_make_the_same_bits(lacking: str, beta: float, tmp_path: Path) -> None:
    """Without "avx" nothing multiplies and adds at once, either. `beta` is that of no other test: kernels are kept."""
    from torch._inductor import config

    compiler = shutil.which("g++") or "g++"
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\nexec {compiler} "$@" -mno-{lacking}\n')
    script.chmod(0o700)
    with config.patch({"cpp.cxx": (str(script),)}), warnings.catch_warnings():
        warnings.simplefilter("error")  # where nothing is compiled the reference would meet itself
        for method in (LoCo(beta=beta), LoCo(beta=beta, bits=8, group=512, rotate=False)):
            layout = BucketLayout(method, (*SIZES, *SIZES, 300, 200), 2)
            check_steps(layout, list(KINDS), [torch.bfloat16] * 10, lacking=2)


# No example compiles: sizes, ranks and steps are arguments.
@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_bucket_equals_the_reference(data: st.DataObject) -> None:
    numels = data.draw(st.lists(st.sampled_from(SIZES) | st.integers(1, 700), min_size=1, max_size=4))
    world, stretches = data.draw(st.sampled_from((1, 2, 3, 5))), data.draw(st.integers(1, 2))
    each = {"min_size": len(numels), "max_size": len(numels)}
    check_steps(
        BucketLayout(LoCo(), tuple(numels), world, stretches),
        data.draw(st.lists(st.sampled_from(KINDS), **each)),
        data.draw(st.lists(st.sampled_from(DTYPES), **each)),
        lacking=data.draw(st.integers(0, world)),
        seed=data.draw(st.integers(0, 2**33)),
    )


def test_an_error_is_carried_through_five_steps() -> None:
    check_steps(BucketLayout(LoCo(), SIZES, 2), [1.0] * 4, [torch.bfloat16] * 4, steps=5)


def test_sums_are_in_the_order_of_the_reference() -> None:
    """Another order rounds differently; the bf16 scales of a few among many groups show it."""
    numel = 1 << 22
    layout = BucketLayout(LoCo(), (numel,), 1)
    for seed in range(4):
        grads = [make_grad(numel, 1.0, torch.float32, seed)]
        found, expected = (torch.zeros(1, layout.payload_bytes, dtype=torch.uint8) for _ in range(2))
        cpu_blocks.quantize_bucket(grads, make_states(layout), layout, RngKey(seed), 0, found)
        reference.quantize_bucket(grads, make_states(layout), layout, RngKey(seed), 0, expected)
        assert torch.equal(found, expected)


def test_a_gradient_smaller_than_the_world() -> None:
    """Most chunks lie behind its end, and so count as zeros."""
    layout = BucketLayout(LoCo(), (1, 2), 5)
    check_steps(layout, [1.0, 1.0], [torch.float32] * 2, lacking=9)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int) -> None:
    """With 200 000 elements every thread has some, and the second gradient is shared by all."""
    torch.set_num_threads(threads)
    layout = BucketLayout(LoCo(), (10_000, 90_001), 2)
    check_steps(layout, [1.0, "one NaN"], [torch.float32] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_numbers_are_read_and_rounded_like_torch(dtype: torch.dtype) -> None:
    """All 65536 outputs, to which numbers of all magnitudes are added; scales of zero leave them as they were."""
    layout = BucketLayout(LoCo(), (2**16,), 1)
    codes = torch.randint(0, 256, (1, 2**15), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for exponents in (torch.linspace(-40, 12, 512), torch.full((512,), -float("inf"))):
        received = torch.cat([codes, torch.exp2(exponents).to(torch.bfloat16).view(1, -1).view(torch.uint8)], 1)
        for accumulate in (False, True):
            found, expected = (torch.arange(2**16).to(torch.uint16).view(dtype) for _ in range(2))
            cpu_blocks.dequantize_sum_bucket(received, layout, RngKey(0), 0, 1, [found], accumulate=accumulate)
            reference.dequantize_sum_bucket(received, layout, RngKey(0), 0, 1, [expected], accumulate=accumulate)
            assert_same_bits(found, expected)


def test_a_contiguous_gradient_is_not_copied() -> None:
    layout = BucketLayout(LoCo(), (1 << 16,), 1)
    grads, states = [torch.randn(1 << 16)], make_states(layout)
    payload = torch.zeros(1, layout.payload_bytes, dtype=torch.uint8)
    cpu_blocks.quantize_bucket(grads, states, layout, RngKey(0), 0, payload)  # compiles
    cpu_blocks.dequantize_sum_bucket(payload, layout, RngKey(0), 0, 1, grads)
    with torch.profiler.profile(profile_memory=True) as taken:
        cpu_blocks.quantize_bucket(grads, states, layout, RngKey(0), 0, payload)
        cpu_blocks.dequantize_sum_bucket(payload, layout, RngKey(0), 0, 1, grads)
    assert not [event for event in taken.events() if event.name.startswith("aten::")]


def test_strides_and_dtypes_that_kernels_do_not_know() -> None:
    layout = BucketLayout(LoCo(), (6, 6), 2)
    grads = [torch.randn(4, 3).t(), torch.randn(12, dtype=torch.float64)]
    found, expected = (torch.zeros(2, layout.payload_bytes, dtype=torch.uint8) for _ in range(2))
    for dtypes in (grads, [grads[0], grads[1].to(torch.float32)]):
        cpu_blocks.quantize_bucket(dtypes, make_states(layout), layout, RngKey(0), 0, found)
        reference.quantize_bucket(grads, make_states(layout), layout, RngKey(0), 0, expected)
        assert torch.equal(found, expected)


def test_without_a_compiler_plain_pytorch_runs_and_warns_once() -> None:
    from torch._inductor import config

    layout = BucketLayout(LoCo(beta=0.671875), (300,), 2)  # of no other test: nothing is compiled yet
    found, expected = (torch.zeros(2, layout.payload_bytes, dtype=torch.uint8) for _ in range(2))
    grads, output = [torch.randn(600)], torch.empty(300)
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.warns(ZgraphWarning, match="kernels for CPUs cannot be compiled.*install g\\+\\+") as caught,
    ):
        cpu_blocks.quantize_bucket(grads, make_states(layout), layout, RngKey(0), 0, found)
    assert len(caught) == 1
    with warnings.catch_warnings(), config.patch({"cpp.cxx": ("no-such-compiler",)}):
        warnings.simplefilter("error")
        cpu_blocks.quantize_bucket(grads, make_states(layout), layout, RngKey(0), 0, found)
        cpu_blocks.dequantize_sum_bucket(found, layout, RngKey(0), 0, 1, [output])
    reference.quantize_bucket(grads, make_states(layout), layout, RngKey(0), 0, expected)
    assert torch.equal(found, expected)


LOAD = """
import torch
from zgraph.codegen.kernels.cpu import blocks as cpu_blocks
from zgraph.compression.methods import LoCo, RngKey
from zgraph.compression.payload import BucketLayout

layout = BucketLayout(LoCo(), (300,), 1)
output = torch.empty(300)
cpu_blocks.dequantize_sum_bucket(
    torch.zeros(1, layout.payload_bytes, dtype=torch.uint8), layout, RngKey(0), 0, 1, [output]
)
assert not output.any()
"""


def test_processes_that_compile_at_once_share_one_library(tmp_path: Path) -> None:
    """And the next one finds it without a compiler being asked to compile."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", LOAD], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    (library,) = tmp_path.rglob("*.so")
    written = library.stat()
    subprocess.run([sys.executable, "-W", "error", "-c", LOAD], env=environment, check=True)
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert [
        path for path in tmp_path.rglob("*") if path.suffix not in (".so", ".cpp", ".lock") and path.is_file()
    ] == []
