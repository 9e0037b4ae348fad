"""The update on packed state: the kernels against their reference, and the reference against AdamW of fp32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.buckets import needs_triton
from zgraph.codegen import adam_kernels
from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.adam_reference import AdamOptions, power
from zgraph.codegen.kernels.cpu import adam as cpu_adam
from zgraph.codegen.kernels.triton import launch_options
from zgraph.codegen.kernels.triton.launch_options import load
from zgraph.compression.packed_state import has_codes, packed_shape

ADAMW = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, maximize=False)
OTHER = AdamOptions(lr=1e-2, beta1=0.8, beta2=0.99, weight_decay=0.1, eps=1e-6, maximize=True)
# With codes, and without: rows of other lengths, vectors, scalars.
SHAPES = ((1000, 96), (3, 4, 8), (0, 32), (5, 33), (63,), (1,), ())
FLOATS, HALVES = torch.float32, torch.bfloat16


class Parameters:
    """Weights and their states, each between two numbers that no kernel may overwrite."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(shapes))
        self.dtype, self.shapes, self.memory = dtype, shapes, []
        for shape in shapes:
            state = packed_shape(shape, dtype, codes=has_codes(shape))
            weights, words = torch.randn(math.prod(shape) + 2, generator=generator), torch.zeros(math.prod(state) + 2)
            weights[[0, -1]], words[[0, -1]] = 77, 77
            self.memory += [weights.to(dtype), words.int()]
        self.weights = [one[1:-1].view(shape) for one, shape in zip(self.memory[::2], shapes, strict=True)]
        self.states = [
            one[1:-1].view(packed_shape(shape, dtype, codes=has_codes(shape)))
            for one, shape in zip(self.memory[1::2], shapes, strict=True)
        ]

    def gradients(self, step: int) -> list[Tensor]:
        """Return gradients of very different magnitudes; in the third step also zeros, denormals and huge numbers."""
        generator = torch.Generator().manual_seed(step)
        found: list[Tensor] = []
        for shape in self.shapes:
            grad = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 12
            special = (0.0, 1e-30, 1e-42, 1e18, -1e18, 0.0)
            for place, value in enumerate(special if step == 3 and grad.numel() > 60 else ()):
                grad.view(-1)[7 * place] = value
            found.append(grad.to(self.dtype))
        return found

    def update(self, kernel: Any, step: int, options: AdamOptions, scale: float | None) -> list[Tensor]:
        grads = self.gradients(step)
        kernel.update(self.weights, grads, self.states, [float(step)] * len(grads), options, scale)
        return grads

    def assert_equals(self, other: Parameters, ours: list[Tensor], theirs: list[Tensor]) -> None:
        for one, two in zip([*self.memory, *ours], [*other.memory, *theirs], strict=True):
            assert torch.equal(one, two) and one.isfinite().all()
        assert all(one[0] == one[-1] == 77 for one in self.memory)


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
@pytest.mark.parametrize(("options", "scale"), [(ADAMW, None), (OTHER, 3.0)])
def test_the_kernel_equals_its_reference(dtype: torch.dtype, options: AdamOptions, scale: float | None) -> None:
    """In one call for several parameters, also such as several threads share."""
    ours, theirs = Parameters(SHAPES, dtype), Parameters(SHAPES, dtype)
    threads = torch.get_num_threads()
    for step in (1, 2, 3, 4, 77777):
        torch.set_num_threads(3 if step % 2 else 1)
        found = ours.update(cpu_adam, step, options, scale)
        torch.set_num_threads(threads)
        ours.assert_equals(theirs, found, theirs.update(adam_reference, step, options, scale))


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_seen_in_weights_for_ever(dtype: torch.dtype, value: float) -> None:
    """Others in its group of codes may become NaN with it, but nothing outside of the group."""
    parameters = Parameters(((2, 64), (40,)), dtype)
    for step in (1, 2, 3):
        grads = parameters.gradients(step)
        if step == 1:
            grads[0][1, 40], grads[1][5] = value, value
        cpu_adam.update(parameters.weights, grads, parameters.states, [float(step)] * 2, ADAMW)
    coded, vector = parameters.weights
    assert coded[1, 40].isnan() and vector[5].isnan()
    assert coded[0].isfinite().all() and coded[1, :32].isfinite().all() and vector.isfinite().sum() == 39


# --- on a GPU ------------------------------------------------------------------------------------------------------

SMALL = ((40, 64), (3, 4, 8), (0, 32), (5, 33), (1030,), ())


def on_triton(dtype: torch.dtype, options: AdamOptions, scale: float | None, rate: str) -> None:
    """Updates, in one call for several parameters; the fourth is skipped, as gradients overflowed."""
    ours, theirs = Parameters(SMALL, dtype), Parameters(SMALL, dtype)
    given: dict[str, Any] = dict(vars(options))
    lr = given.pop("lr")
    rates = lr if rate == "number" else torch.tensor(lr, dtype=getattr(torch, rate))
    for step in (1, 2, 3, 4, 77777):
        grads = ours.gradients(step)
        adam_kernels.update_on_gpu(
            ours.weights,
            grads,
            ours.states,
            [torch.tensor(float(step)) for _ in grads],
            lr=rates,
            grad_scale=None if scale is None else torch.tensor([scale]),
            found_inf=torch.tensor(float(step == 4)) if step == 4 or scale is not None else None,
            **given,
        )
        if step != 4:
            expected = theirs.update(adam_reference, step, replace(options, lr=float(rates)), scale)
            ours.assert_equals(theirs, grads, expected)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "options", "scale", "rate"),
    [
        (FLOATS, ADAMW, None, "number"),
        (FLOATS, OTHER, 3.0, "float32"),
        (HALVES, ADAMW, 1024.5, "float64"),
        (HALVES, OTHER, None, "number"),
    ],
)
def test_the_kernel_of_gpus_equals_its_reference(
    dtype: torch.dtype, options: AdamOptions, scale: float | None, rate: str, interpreted: Callable[..., Any]
) -> None:
    """In Triton's interpreter, which takes seconds to start."""
    interpreted(on_triton, dtype, options, scale, rate)


def strided() -> None:
    states = [torch.zeros(4, 3, 2, dtype=torch.int32) for _ in range(2)]
    ours, theirs = torch.arange(12.0).view(3, 4).t(), torch.arange(12.0).view(3, 4).t().contiguous()
    adam_kernels.update_on_gpu([ours], [torch.ones(4, 3)], states[:1], [torch.tensor(1.0)], **vars(ADAMW))
    cpu_adam.update([theirs], [torch.ones(4, 3)], states[1:], [1.0], ADAMW)
    assert not ours.is_contiguous() and torch.equal(ours, theirs) and torch.equal(*states)
    empty = [torch.empty(0)]
    adam_kernels.update_on_gpu(empty, empty, [torch.empty(0, 2).int()], [torch.tensor(1.0)], **vars(ADAMW))
    adam_kernels.update_on_gpu([], [], [], [], **vars(ADAMW))


@needs_triton
def test_the_kernel_of_gpus_updates_strided_tensors_and_none(interpreted: Callable[..., Any]) -> None:
    interpreted(strided)


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_of_gpus_round_each_operation_as_ieee_says(capability: int) -> None:
    """With all that an update may have, compiled to machine code, which takes seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    flags: dict[str, Any] = {"SCALED": True, "SKIPS": True}
    numbers = {**flags, "LR": "float32", "MAXIMIZE": True}
    kernels = [("adam_factors", numbers, "f64")]
    for half in (True, False):
        elements = {**flags, "HALF": half, "BLOCK": adam_kernels.BLOCK}
        kernels += [("update_codes", elements, "f32"), ("update_words", elements, "f32")]
    for name, constants, dtype in kernels:
        kernel = load("adam", name)
        pointers = {"table": "*i64", "programs": "*i32", "factors": "*i32"}
        types = {name: pointers[name] for name in kernel.arg_names if name in pointers}
        source = ASTSource(fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        ptx = made.asm["ptx"]
        assert f"div.rn.{dtype}" in ptx and f"sqrt.rn.{dtype}" in ptx and len(made.asm["cubin"]) > 0
        inexact = r"\bfma\.\S+|\bdiv\.(?:full|approx)\S*|\bsqrt\.approx\S*|\brcp\.\S+|\brsqrt\S+|\S+\.ftz\S*"
        assert re.findall(inexact, ptx) == []
        assert re.findall(r"\b(?:add|sub|mul)\.f(?:32|64)\b", ptx) == [], "ptxas may contract what says no .rn"


def test_launches_fuse_nothing_and_read_gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    class NotLaunched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: launched.append((self.name, grid, options))

    monkeypatch.setattr(launch_options, "load", lambda _, name: NotLaunched(name))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(Tensor, "item", None)
    parameters = Parameters(((8,), (64, 64), (3000,)), HALVES)
    steps, scale, found_inf = [torch.tensor(1.0)] * 3, torch.tensor(2.0), torch.tensor(0.0)
    options: dict[str, Any] = {**vars(OTHER), "lr": torch.tensor(0.1), "grad_scale": scale, "found_inf": found_inf}
    adam_kernels.update_on_gpu(parameters.weights, parameters.gradients(1), parameters.states, steps, **options)
    assert [one[:2] for one in launched] == [("adam_factors", (3,)), ("update_words", (4,)), ("update_codes", (4,))]
    assert all(taken["enable_fp_fusion"] is False and taken["SCALED"] and taken["SKIPS"] for *_, taken in launched)
    assert launched[0][2]["LR"] == "float32" and launched[1][2]["HALF"] and launched[2][2]["HALF"]


def test_powers_match_the_library_within_a_few_bits() -> None:
    for base in (0.0, 0.9, 0.95, 0.999, 0.9999):
        assert power(base, 1) == base
        for exponent in (2, 3, 10, 12345, 1 << 24):
            assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-8, abs_tol=1e-300)


def test_gpus_have_a_kernel() -> None:
    for name in ("zgraph::packed_adamw_", "zgraph::packed_adamw_.tensor_lr"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")  # pyright: ignore[reportPrivateUsage]


def updates_of_torch(options: AdamOptions, weight: Tensor, grads: Sequence[Tensor]) -> Tensor:
    expected = torch.nn.Parameter(weight.clone())
    given: dict[str, Any] = {"weight_decay": options.weight_decay, "eps": options.eps, "maximize": options.maximize}
    betas = options.beta1, options.beta2
    optimizer = torch.optim.AdamW([expected], lr=options.lr, betas=betas, fused=True, **given)
    for grad in grads:
        expected.grad = grad.clone()
        optimizer.step()
    return expected.detach()


@pytest.mark.parametrize("options", [ADAMW, OTHER])
def test_updates_are_those_of_torch(options: AdamOptions) -> None:
    """The first one of any parameter, before moments are rounded; all of one without codes."""
    for shape, count in (((100, 64), 1), ((1000,), 5)):
        weight, grads = torch.randn(shape), [torch.randn(shape) for _ in range(count)]
        expected = updates_of_torch(options, weight, grads)
        state = torch.zeros(packed_shape(shape, FLOATS, codes=has_codes(shape)), dtype=torch.int32)
        for step, grad in enumerate(grads, 1):
            cpu_adam.update([weight], [grad], [state], [float(step)], options)
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
