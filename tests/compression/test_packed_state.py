"""The laws of packed moments and 24-bit weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zgraph.compression.packed_state import GROUP, Unpacked, has_codes, pack_into, packed_shape, unpack

SIGMAS = 5  # exceeded by one draw in two million
FLOATS, HALVES = torch.float32, torch.bfloat16
WORDS = (0, 0xFFFFFFFF, 0x80808080)  # random bits at their ends


def stored(found: Unpacked, dtype: torch.dtype, random: Tensor | int | None = None) -> tuple[Unpacked, Tensor, Tensor]:
    """Return the unpacked values, the weights and the state."""
    weight = torch.empty_like(found.weight, dtype=dtype)
    packed = torch.empty(packed_shape(weight.shape, dtype, codes=has_codes(weight.shape)), dtype=torch.int32)
    if isinstance(random, int):
        random = torch.full(weight.shape, random)
    pack_into(weight, packed, found, random)
    return unpack(weight, packed), weight, packed


def of(weight: Tensor | None = None, exp_avg: Tensor | None = None, exp_avg_sq: Tensor | None = None) -> Unpacked:
    given = next(one for one in (weight, exp_avg, exp_avg_sq) if one is not None)
    return Unpacked(*(torch.zeros_like(given) if one is None else one for one in (weight, exp_avg, exp_avg_sq)))


@pytest.mark.parametrize(
    ("shape", "codes", "floats", "halves"),
    [
        ((6, 64), True, (6, 34), (6, 50)),
        ((6, 4, 8), True, (6, 17), (6, 25)),
        ((0, 32), True, (0, 17), (0, 25)),
        ((6, 33), False, (6, 33, 2), (6, 33, 3)),
        ((32,), False, (32, 2), (32, 3)),
        ((), False, (2,), (3,)),
        ((6, 0), False, (6, 0, 2), (6, 0, 3)),
    ],
)
def test_rows_of_groups_have_codes(
    shape: tuple[int, ...], codes: bool, floats: tuple[int, ...], halves: tuple[int, ...]
) -> None:
    assert has_codes(shape) == codes
    assert packed_shape(shape, FLOATS, codes=codes) == floats and packed_shape(shape, HALVES, codes=codes) == halves


@pytest.mark.parametrize("shape", [(64, 96), (777,)])
def test_a_weight_and_its_remainder_are_the_nearest_numbers(shape: tuple[int, ...]) -> None:
    """The weight is that which a cast makes, unless it is close to a tie; with remainders it is 1/256 as wrong."""
    torch.manual_seed(0)
    exact = torch.randn(shape) * 10.0 ** torch.randint(-30, 30, shape)
    found, weight, _ = stored(of(exact), HALVES)
    last = exact.view(torch.int32).bitwise_and(0xFFFF)
    clear = (last < 0x7F80) | (last > 0x8000)
    assert torch.equal(weight[clear], exact.bfloat16()[clear])
    error, coarse = (found.weight - exact).abs(), (exact.bfloat16().float() - exact).abs()
    unit = torch.exp2(exact.abs().log2().floor() - 7)  # in the last place of bf16
    assert (error <= coarse).all() and (coarse <= unit / 2).all()
    assert (error <= unit / 512).all() if has_codes(shape) else torch.equal(found.weight, exact)


@pytest.mark.parametrize("random", WORDS)
def test_exact_weights_have_no_remainder_and_special_ones_stay(random: int) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -2.5, 3.3895e38]).repeat(8, 4)
    found, weight, packed = stored(of(special.bfloat16().float()), HALVES, random)
    assert torch.equal(weight.nan_to_num(7), special.bfloat16().nan_to_num(7))
    assert torch.equal(found.weight.nan_to_num(7), special.bfloat16().float().nan_to_num(7))
    assert not packed.view(8, 25)[:, 16:24].any()


@pytest.mark.parametrize("value", [0.0, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", [(8, 32), (40,)])
def test_a_weight_set_to_zero_or_infinity_ignores_its_remainder(shape: tuple[int, ...], value: float) -> None:
    _, weight, packed = stored(of(torch.randn(shape)), HALVES)
    weight.fill_(value)
    assert packed.any() and unpack(weight, packed).weight.eq(value).all()


@pytest.mark.parametrize("random", WORDS)
def test_zero_groups_stay_zero_and_others_keep_their_range(random: int) -> None:
    exp_avg = torch.zeros(3, GROUP)
    exp_avg[0] = torch.logspace(-9, 0, GROUP) * 1e-12
    exp_avg[1, ::2] = -1e15
    found, _, packed = stored(of(None, exp_avg, exp_avg.square()), FLOATS, random)
    assert not packed[2].any()
    assert not found.exp_avg[1, 1::2].any() and not found.exp_avg_sq[1, 1::2].any()
    ratio = found.exp_avg[0, -1] / exp_avg[0, -1]
    assert 0.98 < ratio < 1.02, "scales have the range of fp32, not that of fp16"
    assert (found.exp_avg_sq[0] > 0).all(), "Adam divides by it"
    assert (found.exp_avg_sq[0].sqrt() >= 1.5e-5 * exp_avg[0, -1]).all()


def test_a_large_number_leaves_small_ones_their_precision() -> None:
    """At a hundredth of the largest number, a code without square root is up to 40 % wrong."""
    exp_avg = torch.logspace(-2, 0, GROUP).repeat(100, 1) * torch.rand(100, 1)
    found, _, _ = stored(of(None, exp_avg, exp_avg.square()), FLOATS)
    for one, exact in ((found.exp_avg, exp_avg), (found.exp_avg_sq.sqrt(), exp_avg)):
        relative = (one / exact - 1).abs()
        assert relative.max() < 0.06 and relative[:, -10:].max() < 0.016


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_group_only(bad: float) -> None:
    exp_avg = torch.ones(2, 2 * GROUP)
    exp_avg[1, 40] = bad
    found, _, _ = stored(of(None, exp_avg, exp_avg.square()), FLOATS)
    assert found.exp_avg[1, GROUP:].isnan().all() and found.exp_avg_sq[1, GROUP:].isnan().all()
    assert found.exp_avg.isfinite().sum() == 3 * GROUP


def test_stochastic_rounding_is_unbiased() -> None:
    """For each value the mean over all draws is the value, up to the curvature between two neighbours."""
    generator = torch.Generator().manual_seed(0)
    count = 4000
    values = torch.rand(1, GROUP, generator=generator)
    values[0, 0] = 1
    random = torch.randint(0, 1 << 32, (count, GROUP), generator=generator)
    many = values.expand(count, -1).contiguous()
    found, _, _ = stored(Unpacked(many, many, many.square()), HALVES, random)
    assert torch.equal(found.exp_avg, found.exp_avg[:1].expand(count, -1)), "it is rounded to nearest"
    means = [one.double().mean(0) for one in (found.weight, found.exp_avg_sq.sqrt())]
    for mean, steps in zip(means, (None, 255), strict=True):
        width = 2.0**-16 if steps is None else 2 / steps
        curvature = 0 if steps is None else 0.25 / steps**2
        assert ((mean - values[0]).abs() <= SIGMAS * width / 2 / count**0.5 + curvature + 1 / 2**13 * width).all()
