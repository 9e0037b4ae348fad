"""The update with rounded moments: the kernels against their reference, and the laws of stochastic rounding."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.buckets import needs_triton
from zgraph.codegen import adam_kernels
from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.adam_reference import AdamOptions, draw, power, round_stochastically, update_key
from zgraph.codegen.kernels.cpu import adam as cpu_adam
from zgraph.codegen.kernels.triton import launch_options
from zgraph.codegen.kernels.triton.launch_options import load

ADAMW = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, decoupled=True, maximize=False)
ADAM = AdamOptions(lr=1e-3, beta1=0.8, beta2=0.99, weight_decay=0.1, eps=1e-6, decoupled=False, maximize=True)
SIGMAS = 5  # one draw in two million lies further away


def states(numel: int) -> list[Tensor]:
    """A parameter and its moments, each between two of NaN that nobody may touch."""
    generator = torch.Generator().manual_seed(numel)
    whole = [torch.full((numel + 2,), torch.nan, dtype=dtype) for dtype in (torch.float32, *[torch.bfloat16] * 2)]
    for one in whole:
        one[1:-1] = torch.randn(numel, generator=generator).abs()
    return whole


def gradient(numel: int, step: int) -> Tensor:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    special = (torch.nan, torch.inf, 1e-30, 0.0, 1e30, -torch.inf)
    for place, value in enumerate(special[: max(0, numel - 10)] if step == 3 else ()):
        grad[7 * place % numel] = value
    return grad


def bits(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(nan=12345.0)


@pytest.mark.parametrize("options", [ADAMW, ADAM], ids=["adamw", "adam"])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_the_kernel_equals_its_reference(options: AdamOptions, scale: float | None) -> None:
    """In one call for several parameters, also such as several threads share."""
    numels = (1, 63, 1000, 70001)
    ours, theirs = ([states(numel) for numel in numels] for _ in range(2))
    threads = torch.get_num_threads()
    for step in (1, 2, 3, 4):
        for found, kernel in ((ours, cpu_adam), (theirs, adam_reference)):
            grads = [gradient(numel, step) for numel in numels]
            lists = [[state[place][1:-1] for state in found] for place in range(3)]
            torch.set_num_threads(2 if step == 2 else 1)
            steps, salts, firsts = [float(step)] * 4, [5, 6, 7, 8], [0, 3, 1 << 33, (1 << 32) - 20]
            kernel.update(lists[0], grads, lists[1], lists[2], steps, salts, firsts, options, scale)
            torch.set_num_threads(threads)
            found.append(grads)
        for our, their in zip([*ours[:4], ours.pop()], [*theirs[:4], theirs.pop()], strict=True):
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(our, their, strict=True))
    assert all(one[[0, -1]].isnan().all() and not one[1:-1].eq(0).all() for state in ours for one in state)


# --- on a GPU ------------------------------------------------------------------------------------------------------

ODD, EVEN = (1, 63, 1000, 2500), (8, 1024, 3000)  # of which runs of 8 elements are read at once


def on_triton(options: AdamOptions, scale: float | None, rate: str, numels: tuple[int, ...]) -> None:
    """Six updates, in one call for several parameters; the fourth is skipped, as gradients overflowed."""
    whole = [states(numel) for numel in numels]
    # What begins at a multiple of 16 bytes is read 16 bytes at once.
    ours = [[one[1:-1] if numels == ODD else one[1:-1].clone() for one in state] for state in whole]
    theirs = [[one.clone() for one in state] for state in ours]
    given: dict[str, Any] = dict(vars(options))
    lr = given.pop("lr")
    rates = lr if rate == "number" else torch.tensor(lr, dtype=getattr(torch, rate))
    salts, firsts = [5, 6, 0xFFFFFFFF, 8][: len(numels)], [0, 3, 1 << 33, (1 << 32) - 20][: len(numels)]
    for step in (1, 2, 3, 4, 5, 77777):
        grads, expected = ([gradient(numel, step) for numel in numels] for _ in range(2))
        parameters, averages, squares = zip(*ours, strict=True)
        adam_kernels.update_on_gpu(
            parameters,
            grads,
            averages,
            squares,
            [torch.tensor(float(step)) for _ in numels],
            salts,
            firsts,
            lr=rates,
            grad_scale=None if scale is None else torch.tensor([scale]),
            found_inf=torch.tensor(float(step == 4)) if step == 4 or scale is not None else None,
            **given,
        )
        if step != 4:
            parameters, averages, squares = zip(*theirs, strict=True)
            steps, known = [float(step)] * len(numels), AdamOptions(lr=float(rates), **given)
            adam_reference.update(parameters, expected, averages, squares, steps, salts, firsts, known, scale)
        for state, other in zip([*ours, grads], [*theirs, expected], strict=True):
            assert all(torch.equal(bits(one), bits(two)) for one, two in zip(state, other, strict=True)), step
    assert all(one[[0, -1]].isnan().all() for state in whole for one in state)


@needs_triton
@pytest.mark.parametrize(
    ("options", "scale", "rate", "numels"),
    [
        (ADAMW, None, "number", ODD),
        (ADAM, 3.0, "float32", EVEN),
        (ADAMW, 1024.5, "float64", EVEN),
        (ADAM, None, "number", ODD),
    ],
)
def test_the_kernel_of_gpus_equals_its_reference(
    options: AdamOptions, scale: float | None, rate: str, numels: tuple[int, ...], interpreted: Callable[..., Any]
) -> None:
    """In Triton's interpreter, which takes seconds to start."""
    interpreted(on_triton, options, scale, rate, numels)


def strided() -> None:
    ours, theirs = (torch.arange(12.0).view(3, 4).t() for _ in range(2))
    for one, kernel in ((ours, adam_kernels), (theirs, cpu_adam)):
        moments = [torch.zeros_like(one, dtype=torch.bfloat16) for _ in range(2)]
        grads, averages, squares = [torch.ones(4, 3)], moments[:1], moments[1:]
        if kernel is adam_kernels:
            adam_kernels.update_on_gpu([one], grads, averages, squares, [torch.tensor(1.0)], [3], [4], **vars(ADAMW))
        else:
            cpu_adam.update([one], grads, averages, squares, [1.0], [3], [4], ADAMW)
    assert not ours.is_contiguous() and torch.equal(ours, theirs)


@needs_triton
def test_the_kernel_of_gpus_updates_strided_tensors_and_none(interpreted: Callable[..., Any]) -> None:
    interpreted(strided)
    empty = [torch.empty(0)]
    adam_kernels.update_on_gpu(empty, empty, empty, empty, [torch.tensor(1.0)], [0], [0], **vars(ADAMW))
    adam_kernels.update_on_gpu([], [], [], [], [], [], [], **vars(ADAMW))


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_of_gpus_round_each_operation_as_ieee_says(capability: int) -> None:
    """With all that an update may have, compiled to machine code, which takes seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    flags: dict[str, Any] = {"SCALED": True, "SKIPS": True}
    elements = {**flags, "COUPLED": True, "ALIGNED": True, "BLOCK": adam_kernels.BLOCK}
    numbers = {**flags, "LR": "float32", "DECOUPLED": True, "MAXIMIZE": True}
    for kernel, constants, dtype in ((load("adam"), elements, "f32"), (load("adam", "adam_factors"), numbers, "f64")):
        pointers = {"table": "*i64", "programs": "*i32", "factors": "*i32"}
        types = {name: pointers[name] for name in kernel.arg_names if name in pointers}
        source = ASTSource(fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        ptx = made.asm["ptx"]
        assert f"div.rn.{dtype}" in ptx and f"sqrt.rn.{dtype}" in ptx and len(made.asm["cubin"]) > 0
        inexact = r"\bfma\.\S+|\bdiv\.(?:full|approx)\S*|\bsqrt\.approx\S*|\brcp\.\S+|\brsqrt\S+|\S+\.ftz\S*"
        assert re.findall(inexact, ptx) == []
        assert re.findall(r"\b(?:add|sub|mul)\.f(?:32|64)\b", ptx) == [], "ptxas may contract what says no .rn"
        if kernel is load("adam"):
            assert "ld.global.v4" in ptx and "st.global.v4" in ptx, "16 bytes at once"


def test_launches_fuse_nothing_and_read_gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    class NotLaunched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **options: launched.append((grid, options))

    monkeypatch.setattr(launch_options, "load", lambda *_: NotLaunched())  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(Tensor, "item", None)
    parameters, grads, averages, squares = ([torch.zeros(numel) for numel in (8, 3000)] for _ in range(4))
    steps, scale, found_inf = [torch.tensor(1.0)] * 2, torch.tensor(2.0), torch.tensor(0.0)
    options: dict[str, Any] = {**vars(ADAM), "lr": torch.tensor(0.1), "grad_scale": scale, "found_inf": found_inf}
    adam_kernels.update_on_gpu(parameters, grads, averages, squares, steps, [1, 2], [0, 0], **options)
    assert [grid for grid, _ in launched] == [(2,), (1 + 3,)]
    assert all(taken["enable_fp_fusion"] is False and taken["SCALED"] and taken["SKIPS"] for _, taken in launched)
    assert launched[0][1]["LR"] == "float32" and launched[1][1]["COUPLED"] and launched[1][1]["ALIGNED"]


def test_powers_match_the_library_within_a_few_bits() -> None:
    for base in (0.0, 0.9, 0.95, 0.999, 0.9999):
        assert power(base, 1) == base
        for exponent in (2, 3, 10, 12345, 1 << 24):
            assert math.isclose(power(base, exponent), base**exponent, rel_tol=1e-8, abs_tol=1e-300)


def test_gpus_have_a_kernel() -> None:
    for name in ("zgraph::fused_adam_", "zgraph::fused_adam_.tensor_lr"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("options", [ADAMW, ADAM], ids=["adamw", "adam"])
def test_a_first_update_is_that_of_torch(options: AdamOptions) -> None:
    """Parameters are updated by moments before they are rounded; of later updates, moments are other ones."""
    parameter, grad = torch.randn(1000), torch.randn(1000)
    expected = torch.nn.Parameter(parameter.clone())
    expected.grad = grad.clone()
    given: dict[str, Any] = {"weight_decay": options.weight_decay, "eps": options.eps, "maximize": options.maximize}
    kind = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    kind([expected], lr=options.lr, betas=(options.beta1, options.beta2), fused=True, **given).step()
    moments = [torch.zeros(1000, dtype=torch.bfloat16) for _ in range(2)]
    cpu_adam.update([parameter], [grad], [moments[0]], [moments[1]], [1.0], [0], [0], options)
    torch.testing.assert_close(parameter, expected.detach(), rtol=1e-6, atol=1e-7)


def test_strided_tensors_are_updated_in_place() -> None:
    ours, theirs = (torch.arange(12.0).view(3, 4).t() for _ in range(2))
    theirs = theirs.contiguous()
    for one in (ours, theirs):
        moments = [torch.zeros_like(one, dtype=torch.bfloat16) for _ in range(2)]
        cpu_adam.update([one], [torch.ones(4, 3)], [moments[0]], [moments[1]], [1.0], [3], [4], ADAMW)
    assert not ours.is_contiguous() and torch.equal(ours, theirs)


def test_rounding_takes_one_of_the_two_neighbours_and_is_unbiased() -> None:
    """Each by the probability that the value's place between them says, over elements and over updates."""
    over_elements = draw((1 << 16,), update_key(1, 9), 5)
    over_updates = torch.cat([draw((1,), update_key(step, 9), 5) for step in range(1, 1025)])
    for share in (0.0, 1 / 65536, 0.1, 0.5, 0.97):
        for scale in (1.0, -3e-30, 2.0**-130):
            low = torch.tensor(scale, dtype=torch.bfloat16)
            high = (low.view(torch.int16) + 1).view(torch.bfloat16)
            value = low.float() + share * (high.float() - low.float())
            exact = (value.double() - low.double()) / (high.double() - low.double())
            for random in (over_elements & 0xFFFF, over_elements >> 16, over_updates & 0xFFFF, over_updates >> 16):
                rounded = round_stochastically(value.expand(len(random)), random)
                assert ((rounded == low) | (rounded == high)).all()
                away = (rounded == high).double().mean() - exact
                assert away.abs() <= SIGMAS * (exact * (1 - exact) / len(random)).sqrt() + 1 / len(random)


def test_random_numbers_of_moments_and_neighbours_are_uncorrelated() -> None:
    count = 1 << 16
    one, other = draw((count,), update_key(1, 9), 0), draw((count,), update_key(2, 9), 0)
    pairs = {
        "moments": (one & 0xFFFF, one >> 16),
        "elements": ((one & 0xFFFF)[1:], (one & 0xFFFF)[:-1]),
        "updates": (one >> 16, other >> 16),
        "parameters": (one & 0xFFFF, draw((count,), update_key(1, 10), 0) & 0xFFFF),
    }
    for name, (first, second) in pairs.items():
        found = torch.corrcoef(torch.stack([first, second]).double())[0, 1]
        assert found.abs() < SIGMAS / count**0.5, name


def test_special_values_stay_what_they_are() -> None:
    values = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -2.5])
    for random in (0, 0xFFFF):
        found = round_stochastically(values, torch.full((8,), random))
        assert torch.equal(bits(found), bits(values.bfloat16()))
        assert torch.equal(found.signbit()[2:], values.signbit()[2:])


def test_second_moment_decays_but_not_if_rounded_to_nearest() -> None:
    """A thousand updates by 0.999, from 0.5 towards 0.1; the bound is that of independent errors of half a unit."""
    count, updates, target = 4096, 1000, 0.1
    square, exact = torch.full((count,), 0.5, dtype=torch.bfloat16), 0.5
    nearest, average, parameter = square[:1].clone(), torch.zeros_like(square), torch.zeros(count)
    for step in range(1, updates + 1):
        cpu_adam.update(
            [parameter], [torch.full((count,), target**0.5)], [average], [square], [float(step)], [1], [0], ADAMW
        )
        exact = exact * ADAMW.beta2 + target * (1 - ADAMW.beta2)
        nearest = (nearest.float() * ADAMW.beta2 + target * (1 - ADAMW.beta2)).bfloat16()
    unit = 0.5 * 2**-7  # the largest distance of two neighbours on the way
    deviation = unit / 2 / (1 - ADAMW.beta2**2) ** 0.5
    assert abs(square.double().mean().item() - exact) < SIGMAS * deviation / count**0.5
    assert abs(average.double().mean().item() - target**0.5) < SIGMAS * 2**-9 / 2 / (1 - 0.9**2) ** 0.5 / count**0.5
    assert exact < 0.25 and nearest.item() > 0.45
