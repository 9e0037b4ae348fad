"""The update with rounded moments: the C++ kernel against its reference, and the laws of stochastic rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zgraph.codegen.kernels import adam_reference
from zgraph.codegen.kernels.adam_reference import AdamOptions, draw, round_stochastically, update_key
from zgraph.codegen.kernels.cpu import adam as cpu_adam

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


def test_the_random_numbers_of_both_moments_and_of_neighbours_are_uncorrelated() -> None:
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


def test_a_second_moment_decays_as_the_exact_one_and_rounded_to_nearest_it_stands_still() -> None:
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
