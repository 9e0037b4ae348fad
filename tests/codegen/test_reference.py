"""The laws and gates of gradient compression, on the reference of its kernels; N ranks are N calls."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zgraph.codegen.kernels import reference
from zgraph.compression.exact_arithmetic import reciprocal
from zgraph.compression.methods import BlockMethod, ErrorFeedback, LoCo, NoFeedback, RngKey
from zgraph.compression.payload import BucketLayout

FP32 = torch.float32
FIRST = RngKey(0)
ROUNDING = 2.0**-24  # relative error of one fp32 operation


def gauss(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def student_t3(numel: int, seed: int) -> Tensor:
    """A normal number over the root of the mean of three other squares."""
    normal = torch.randn(4, numel, generator=torch.Generator().manual_seed(seed))
    return normal[0] / normal[1:].square().mean(0).sqrt()


def fresh_state(method: BlockMethod, numel: int) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in method.state(numel, 1).items()}


def send(
    grad: Tensor, method: BlockMethod, state: dict[str, Tensor] | None = None, draw: RngKey = FIRST, rank: int = 0
) -> Tensor:
    """What the receiver reads of one rank's gradient; without a state, that of a first step."""
    kept = fresh_state(method, grad.numel()) if state is None else state
    codes, scales = reference.quantize(grad.view(1, -1), kept, method, draw, rank)
    return reference.dequantize_sum(codes, scales, grad.numel(), method, draw, rank)


def kept_error(state: dict[str, Tensor], numel: int) -> Tensor:
    error = reference.read_error(state)
    assert error is not None
    return error.double().flatten()[:numel]


def nmse(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).square().sum() / wanted.double().square().sum()).item()


def projection(found: Tensor, wanted: Tensor) -> float:
    return (found.double() @ wanted.double() / wanted.double().square().sum()).item()


feedback = pytest.mark.parametrize(
    "method",
    [
        kind(bits=bits, rotate=rotate, error_dtype=FP32)
        for kind in (LoCo, ErrorFeedback)
        for bits in (2, 4, 8)
        for rotate in (False, True)
    ],
    ids=lambda method: f"{type(method).__name__}-{method.bits}bits-{'rotated' if method.rotate else 'straight'}",
)
rotated_or_not = pytest.mark.parametrize("rotate", [False, True], ids=["straight", "rotated"])


# Error feedback.


@feedback
def test_sent_and_kept_parts_add_up(method: BlockMethod) -> None:
    """deq(q) + r == g + e and e' == beta e + (1 - beta) r: one unknown, r, and two equations."""
    beta, state = method.residual_decay, fresh_state(method, 1000)
    assert beta is not None
    for step in range(4):
        grad, old = gauss(1000, seed=step), kept_error(state, 1000)
        sent = send(grad, method, state, RngKey(step)).double()
        lost = grad.double() + old - sent
        expected = beta * old + (1 - beta) * lost
        # Rounding of g + e, of its difference to what is sent, of two products and their sum.
        most = 2 * (grad.abs().max() + old.abs().max()).item() + 4 * lost.abs().max().item()
        assert (kept_error(state, 1000) - expected).abs().max().item() <= ROUNDING * most
        assert lost.abs().max() > 0, "a quantizer without loss would prove nothing"


@feedback
def test_sent_sum_differs_from_gradients_only_by_kept_error(method: BlockMethod) -> None:
    """sum deq(q_k) - sum g_k == (e_1 - e_{T+1}) / (1 - beta): errors of 30 steps do not pile up."""
    beta, numel, steps = method.residual_decay, 1000, 30
    assert beta is not None
    state = fresh_state(method, numel)
    state["error"].copy_(0.01 * gauss(state["error"].numel(), seed=99).view_as(state["error"]))
    first = kept_error(state, numel)
    sent, given, largest = torch.zeros(numel).double(), torch.zeros(numel).double(), 0.0
    for step in range(steps):
        grad = student_t3(numel, seed=step)
        largest = max(largest, grad.abs().max().item() + kept_error(state, numel).abs().max().item())
        sent += send(grad, method, state, RngKey(step))
        given += grad
    gap = (first - kept_error(state, numel)) / (1 - beta)
    tolerance = ROUNDING * steps * largest * (2 + 3 / (1 - beta))
    assert (sent - given - gap).abs().max().item() <= tolerance
    assert gap.abs().max().item() > 20 * tolerance or method.bits == 8, "the law must not drown in rounding"


def test_eight_bit_error_is_exact_within_half_a_step() -> None:
    narrow, exact = LoCo(), LoCo(error_dtype=FP32)
    old, numel = fresh_state(narrow, 1000), 1000
    for step in range(3):
        wide = {"error": torch.zeros_like(old["error"], dtype=FP32)}
        read = reference.read_error(old)
        assert read is not None
        wide["error"].copy_(read)
        grad = gauss(numel, seed=step)
        assert torch.equal(send(grad, narrow, old, RngKey(step)), send(grad, exact, wide, RngKey(step)))
        new = reference.read_error(old)
        assert new is not None
        largest = wide["error"].abs().amax(-1)
        assert ((127 * old["error_scale"].to(FP32) - largest).abs() <= largest * (2**-8 + 1e-5)).all()
        half_step = 0.5 * old["error_scale"].to(FP32).unsqueeze(-1)
        assert ((new - wide["error"]).abs() <= half_step * (1 + 1e-5)).all()
        assert new.abs().max() > 0


def inflation(method: BlockMethod, plain: BlockMethod) -> tuple[float, float]:
    """Noise of a step over noise without feedback, once the error's variance has settled, and that noise's NMSE.

    Gradients are drawn anew in each step: each loss is then independent of those before.
    """
    numel, settling, measured = 1 << 15, 20, 15
    state = fresh_state(method, numel)
    noise = base = 0.0
    for step in range(settling + measured):
        grad = gauss(numel, seed=step)
        sent = send(grad, method, state, RngKey(step))
        if step >= settling:
            noise += nmse(sent, grad)
            base += nmse(send(grad, plain, draw=RngKey(step)), grad)
    return noise / base, base / measured


@rotated_or_not
@pytest.mark.parametrize("beta", [0.8, 0.5, 0.0])
def test_feedback_noise_grows_by_two_over_one_plus_beta(beta: float, rotate: bool) -> None:
    """beta = 0 is classic error feedback.

    deq(q) - g = e - r. Where losses r of variance R do not depend on one another, e has (1 - beta) / (1 + beta) R, and
    the sum of both 2 / (1 + beta) R.
    """
    found, _ = inflation(LoCo(beta=beta, rotate=rotate, error_dtype=FP32), NoFeedback(rotate=rotate, clip_search=True))
    assert found == pytest.approx(2 / (1 + beta), rel=0.02)


@pytest.mark.parametrize("beta", [0.8, 0.5, 0.0])
def test_with_2_bits_kept_error_adds_to_quantized_values(beta: float) -> None:
    """R = nmse (G + share R), not nmse G, for gradients of variance G: with 2 bits this shows."""
    found, base = inflation(
        LoCo(bits=2, beta=beta, error_dtype=FP32), NoFeedback(bits=2, rotate=True, clip_search=True)
    )
    share = (1 - beta) / (1 + beta)
    assert found == pytest.approx(2 / (1 + beta) / (1 - base * share), rel=0.005)
    assert found > 1.01 * 2 / (1 + beta)


def test_the_8_bit_error_adds_little_noise() -> None:
    plain = NoFeedback(rotate=True, clip_search=True)
    found, _ = inflation(LoCo(), plain)
    assert found == pytest.approx(2 / 1.8, rel=0.02)


@pytest.mark.parametrize("group", [128, 1024])
def test_errors_of_classic_feedback_do_not_grow(group: int) -> None:
    """With 2 bits, on heavy tails, where codes keep least: the error's square settles below the gradient's own."""
    method, numel = ErrorFeedback(bits=2, group=group, error_dtype=FP32), 1 << 14
    state = fresh_state(method, numel)
    shares: list[float] = []
    for step in range(80):
        grad = student_t3(numel, seed=step)
        send(grad, method, state, RngKey(step))
        shares.append((kept_error(state, numel).square().mean() / grad.double().square().mean()).item())
    assert statistics.fmean(shares[60:]) < 1.5 * statistics.fmean(shares[20:40])


# Quality.


@pytest.mark.parametrize("std", [1.0, 1e-8])
@pytest.mark.parametrize("sample", [gauss, student_t3])
def test_noise_of_one_gradient(sample: Callable[[int, int], Tensor], std: float) -> None:
    """A million samples: most of what t3 varies by is in its few largest."""
    grad = std * sample(1 << 20, 0)
    assert nmse(send(grad, LoCo()), grad) <= 10.5e-3


@pytest.mark.parametrize("sample", [gauss, student_t3])
def test_noise_of_the_mean_of_64_equal_gradients(sample: Callable[[int, int], Tensor]) -> None:
    """The median of five samples: a single value of t3 may carry half of a sample's energy."""
    found: list[float] = []
    for seed in range(5):
        grad = sample(1 << 13, seed)
        total = sum((send(grad, LoCo(), rank=rank, draw=RngKey(seed)) for rank in range(64)), torch.zeros_like(grad))
        assert projection(total / 64, grad) == pytest.approx(1, abs=0.001)
        found.append(nmse(total / 64, grad))
    assert statistics.median(found) <= 0.3e-3


def exchange(
    grads: list[list[Tensor]], method: BlockMethod, stretches: int = 1, dtype: torch.dtype = FP32
) -> list[Tensor]:
    """The mean of all ranks' gradients, by bucket: each rank quantizes, receives its row of each payload, and sums.

    Args:
        grads: of each rank, the gradients of one bucket.
    """
    world = len(grads)
    numels = tuple(-(-grad.numel() // (world * stretches)) for grad in grads[0])
    layout = BucketLayout(method, numels, world, stretches)
    payloads = torch.zeros(world, world, layout.payload_bytes, dtype=torch.uint8)
    for rank, bucket in enumerate(grads):
        states = [
            {name: torch.zeros(shape, dtype=kept) for name, (shape, kept) in kinds.items()}
            for kinds in (method.state(numel, world * stretches) for numel in numels)
        ]
        reference.quantize_bucket(bucket, states, layout, RngKey(7), rank, payloads[rank])
    shards = [[torch.full((stretches * numel,), math.nan, dtype=dtype) for numel in numels] for _ in grads]
    for rank, outputs in enumerate(shards):
        reference.dequantize_sum_bucket(payloads[:, rank].contiguous(), layout, RngKey(7), 0, world, outputs)
    return [
        # chunk s * world + d went to rank d
        torch.stack([shard[place].view(stretches, -1) for shard in shards], 1).flatten()[: grad.numel()].view_as(grad)
        for place, grad in enumerate(grads[0])
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_mean_of_a_bucket_keeps_its_length(dtype: torch.dtype, world: int) -> None:
    """2-dim gradients of odd sizes: neither P times the mean, nor bf16's bits read as those of another dtype."""
    sizes = ((401, 307), (63,), (1,), (3, 333))
    grads = [
        [gauss(math.prod(size), seed=10 * rank + place).view(size).to(dtype) for place, size in enumerate(sizes)]
        for rank in range(world)
    ]
    means = [torch.stack([bucket[place].double() for bucket in grads]).mean(0) for place in range(len(sizes))]
    for stretches in (1, 2):
        found = exchange(grads, LoCo(), stretches)
        joined, wanted = (torch.cat([part.flatten().double() for part in parts]) for parts in (found, means))
        assert projection(joined, wanted) == pytest.approx(1, abs=0.001)
        assert nmse(joined, wanted) <= 11e-3
        for part, mean in zip(found, means, strict=True):
            assert part.shape == mean.shape
            assert nmse(part, mean) <= 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_may_be_stored_in_16_bits(dtype: torch.dtype) -> None:
    grads = [[gauss(1000, seed=rank)] for rank in range(3)]
    wide, narrow = exchange(grads, LoCo())[0], exchange(grads, LoCo(), dtype=dtype)[0]
    assert narrow.dtype == dtype and torch.equal(wide.to(dtype), narrow)


@rotated_or_not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_gradients_are_read_by_value(dtype: torch.dtype, rotate: bool) -> None:
    grad, method = student_t3(1000, seed=0).to(dtype).view(1, -1), LoCo(rotate=rotate)
    states = fresh_state(method, 1000), fresh_state(method, 1000)
    narrow = reference.quantize(grad, states[0], method, RngKey(3), 1)
    wide = reference.quantize(grad.to(FP32), states[1], method, RngKey(3), 1)
    assert all(map(torch.equal, narrow, wide))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# Groups.


@rotated_or_not
def test_a_scale_serves_one_group_and_not_a_row(rotate: bool) -> None:
    """4096 elements, an outlier in one of its 32 groups: 31 are as without it."""
    grad, method = gauss(4096, seed=0), NoFeedback(rotate=rotate)
    calm = send(grad, method).view(32, 128)
    grad[5 * 128 + 17] = 1e6
    wild = send(grad, method).view(32, 128)
    assert [group for group in range(32) if not torch.equal(calm[group], wild[group])] == [5]


def test_any_number_of_groups() -> None:
    """More than 40960, and the last with a single element."""
    grad = gauss(50_000 * 8 + 1, seed=0)
    method = NoFeedback(group=8)
    assert nmse(send(grad, method)[-8000:], grad[-8000:]) < 0.01


@rotated_or_not
@pytest.mark.parametrize("numel", [1, 2, 63, 127, 129, 1000])
def test_padding_of_a_group_changes_nothing(numel: int, rotate: bool) -> None:
    """A gradient of odd length is that gradient followed by zeros."""
    grad, method = gauss(numel, seed=numel), LoCo(rotate=rotate)
    full = torch.zeros(method.groups(numel) * method.group)
    full[:numel] = grad
    assert torch.equal(send(grad, method), send(full, method)[:numel])
    assert nmse(send(grad, method), grad) < 0.05


@rotated_or_not
@pytest.mark.parametrize("error_dtype", [torch.int8, FP32], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38], ids=str)
def test_a_group_that_is_not_finite_is_lost_alone(bad: float, error_dtype: torch.dtype, rotate: bool) -> None:
    """Its scale is NaN and its error stays; all other groups are as without it."""
    method = LoCo(rotate=rotate, error_dtype=error_dtype)
    state, numel = fresh_state(method, 512), 512
    send(gauss(numel, seed=0), method, state, RngKey(0))
    before = {name: value.clone() for name, value in state.items()}
    clean, broken = ({name: value.clone() for name, value in state.items()} for _ in range(2))
    grad = gauss(numel, seed=1)
    # 3.4e38 alone is finite; eight of them are not once rotated
    hurt = grad.index_fill(0, torch.arange(128, 136 if math.isfinite(bad) else 129), bad)
    if math.isfinite(bad) and not rotate:
        hurt[128] = math.inf
    codes, scales = reference.quantize(grad.view(1, -1), clean, method, RngKey(1), 0)
    hurt_codes, hurt_scales = reference.quantize(hurt.view(1, -1), broken, method, RngKey(1), 0)
    assert hurt_scales.isnan().tolist() == [[False, True, False, False]]
    others = [0, 2, 3]
    assert torch.equal(hurt_codes.view(4, -1)[others], codes.view(4, -1)[others])
    assert torch.equal(hurt_scales[:, others], scales[:, others])
    for name, value in broken.items():
        assert torch.equal(value[:, 1], before[name][:, 1])
        assert torch.equal(value[:, others], clean[name][:, others])
    received = reference.dequantize_sum(hurt_codes, hurt_scales, numel, method, RngKey(1)).view(4, 128)
    assert received.isnan().all(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("error_dtype", [torch.int8, FP32], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(2, 1024), (2, 128), (4, 1024), (4, 128), (8, 128)])
def test_no_finite_gradient_makes_an_error_that_is_not(bits: int, group: int, error_dtype: torch.dtype) -> None:
    """One large value beside many that round to zero: the scale that keeps their length is many times the largest."""
    method = LoCo(bits=bits, group=group, rotate=False, error_dtype=error_dtype)
    book = reference.CodeBook.of(method)
    small = 0.49 / (book.slope(book.clips[-1]) * book.top)
    grad = torch.full((group,), small).index_fill(0, torch.tensor([0]), 1.0)
    for power in range(90, 128):
        state = fresh_state(method, group)
        sent = send(1.99 * 2.0**power * grad, method, state)
        assert reference.read_error(state).isfinite().all()  # pyright: ignore[reportOptionalMemberAccess]
        assert sent.isfinite().all() or sent.isnan().all()
        assert send(torch.ones(group), method, state).isfinite().all(), "what comes next is lost with it"


@rotated_or_not
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_stay_zeros(bits: int, rotate: bool) -> None:
    """Also where all codes stand for something else."""
    method = LoCo(bits=bits, rotate=rotate)
    state = fresh_state(method, 300)
    sent = send(torch.zeros(300), method, state)
    assert torch.equal(sent, torch.zeros(300))
    assert all(not value.any() for value in state.values())


@rotated_or_not
@pytest.mark.parametrize("std", [1e-45, 1e-40, 1e-38, 1e-32, 1e-29, 1e-20, 1e20, 1e28])
def test_any_magnitude_is_sent_or_counts_as_zeros(std: float, rotate: bool) -> None:
    """Denormals neither divide by zero, nor do they make a NaN."""
    method, grad = LoCo(rotate=rotate), gauss(512, seed=0) * std
    state = fresh_state(method, 512)
    sent = send(grad, method, state)
    assert sent.isfinite().all() and kept_error(state, 512).isfinite().all()
    assert not sent.any() if std < 1e-30 else nmse(sent / std, grad / std) < 0.02


# Pieces.


@pytest.mark.parametrize("group", [32, 64, 128, 1024])
def test_hadamard_is_a_product_with_an_orthogonal_matrix(group: int) -> None:
    """Sylvester's matrix on blocks of four runs of 8 elements; 32 times the identity when done twice."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double()
    matrix = two
    for _ in range(4):
        matrix = torch.kron(matrix, two)
    assert torch.equal(matrix @ matrix.T, 32 * torch.eye(32).double())
    values = gauss(3 * group, seed=group).view(3, group)
    wanted = torch.zeros_like(values).double()
    for block in range(group // 32):
        places = [group // 4 * run + 8 * block + place for run in range(4) for place in range(8)]
        wanted[:, places] = values.double()[:, places] @ matrix
    found = reference.hadamard(values)
    assert (found - wanted).abs().max().item() <= ROUNDING * 5 * 32 * values.abs().max().item()
    assert (
        reference.hadamard(found) / 32 - values
    ).abs().max().item() <= ROUNDING * 10 * 32 * values.abs().max().item()
    whole = torch.arange(group).float()
    assert torch.equal(reference.hadamard(reference.hadamard(whole)), 32 * whole)


@pytest.mark.parametrize("group", [32, 128, 1024])
def test_signs_are_balanced_and_differ_by_rank_step_and_salt(group: int) -> None:
    """Sums and products of n fair signs have variance n; five deviations in a thousand draws would be one in 2000."""
    draws = [
        reference.draw_signs((1 << 14) // group, group, RngKey(step, salt), rank).flatten().double()
        for step, salt, rank in itertools.product((0, 1, 2, 1000), (0, 1), (0, 1, 2, 63))
    ]
    signs = torch.stack(draws)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    deviation = signs.shape[1] ** -0.5
    assert signs.mean(1).abs().max() < 5 * deviation
    products = (signs @ signs.T / signs.shape[1])[*torch.triu_indices(len(draws), len(draws), 1)]
    assert products.abs().max() < 5 * deviation
    assert products.square().mean().sqrt().item() == pytest.approx(deviation, rel=0.15)
    # Neighbours within a draw, one element, one block of 32 and one group apart.
    for distance in (1, 8, group // 4, 32, group):
        along = (signs[:, distance:] * signs[:, :-distance]).mean(1)
        assert along.abs().max() < 5 * deviation
    # By place: 32 draws of each, so that no element has the same sign wherever it is drawn.
    assert signs.mean(0).square().mean().item() == pytest.approx(1 / len(draws), rel=0.1)


def test_all_ranks_of_a_step_have_signs_of_their_own() -> None:
    keys = [reference.sign_key(RngKey(step, salt), rank) for step in (0, 5) for salt in (0, 1) for rank in range(512)]
    assert len({*keys}) == len(keys)


def test_the_hash_is_lowbias32_and_gives_each_word_another() -> None:
    """Values of Wellons' C function, and a bijection: each step can be undone."""
    words = torch.arange(1 << 16)
    assert reference.hash_32(words).unique().numel() == words.numel()

    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    tried = [0, 1, 2, 12345, 0x80000000, 0xFFFFFFFF]
    assert reference.hash_32(torch.tensor(tried)).tolist() == list(map(lowbias32, tried))
    assert list(map(reference.hash_32, tried)) == list(map(lowbias32, tried))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [8, 128])
def test_all_codes_survive_packing(bits: int, group: int) -> None:
    """Each code at each place of a group."""
    method = NoFeedback(bits=bits, group=group)
    half = 2 ** (bits - 1)
    codes = torch.stack([(torch.arange(group) + shift) % (2 * half) - half for shift in range(2 * half)]).to(torch.int8)
    assert codes.min() == -half and codes.max() == half - 1
    packed = reference.pack(codes, method)
    assert packed.dtype == torch.uint8 and packed.shape == (2 * half, group * bits // 8)
    assert torch.equal(reference.unpack(packed, method), codes)
    # By hand: a byte holds codes of equal place in each of the stretches, the first in its lowest bits.
    stretches = codes.long().view(2 * half, 8 // bits, -1) % (2 * half)
    by_hand = sum(stretches[:, place] << (place * bits) for place in range(8 // bits))
    assert torch.equal(packed.long(), torch.as_tensor(by_hand))


def test_fold_sums_halves_of_each_block_and_then_blocks() -> None:
    """2^24 swallows a 1 that is added to it: only where the second half meets the first do both survive."""
    values = torch.zeros(8)
    values[[0, 1, 4, 5]] = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    assert reference.fold(values).tolist() == [2]
    # In a group of 64, runs of 8 belong to both blocks in turn.
    values = torch.zeros(64)
    values[[0, 8, 16, 24]] = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0])
    assert reference.fold(values).tolist() == [2]
    assert reference.fold(torch.arange(1024.0)).tolist() == [1023 * 512]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("rotate", [False, True])
def test_no_order_changes_the_sums_of_small_groups(bits: int, rotate: bool) -> None:
    """Of the largest integers there are, 128 of them: exact but for one rounding of their squares' sum."""
    book = reference.CodeBook.of(NoFeedback(bits=bits, rotate=rotate))
    generator = torch.Generator().manual_seed(0)
    integers = 511 - torch.randint(0, 2, (200, 128), generator=generator).float() * torch.tensor(
        [0, 1, 2, 1021]
    ).repeat(32)
    levels = reference.levels_of(integers, 1.0, book)
    for one, other in ((integers, integers), (integers, levels), (levels, levels)):
        exact = (one.double() * other.double()).sum(-1, keepdim=True).to(FP32)
        assert torch.equal(reference.fold(one * other), exact)
        assert torch.equal(reference.fold((one * other).flip(-1)), exact)


def test_reciprocals_are_nearly_exact() -> None:
    """All exponents that occur, and a run of neighbouring numbers."""
    values = torch.cat([torch.exp2(torch.linspace(-106, 100, 50_000)), 1 + torch.arange(50_000) * 2.0**-23])
    assert (reciprocal(values).double() * values.double() - 1).abs().max() < 3 * 2.0**-24


@pytest.mark.parametrize("world", [2, 8, 64])
def test_a_large_bucket_is_a_quarter_of_its_bf16_gradients(world: int) -> None:
    """A transformer block of width 1024: bytes handed to the collective over bytes of bf16."""
    numels = [1024 * 3072, 1024 * 1024, 1024 * 4096, 4096 * 1024]
    layout = BucketLayout(LoCo(), tuple(-(-numel // world) for numel in numels), world)
    sent = torch.empty(world, layout.payload_bytes, dtype=torch.uint8).nbytes
    assert sent / (2 * sum(numels)) <= 0.26
