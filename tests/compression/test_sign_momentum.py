"""Signs of momenta: the arithmetic of one message, and the laws of error feedback."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.judges.sign_momentum import Sender
from zgraph.compression.method_text import from_text, to_text
from zgraph.compression.methods import RngKey
from zgraph.compression.payload import BucketLayout
from zgraph.passes import SignMomentum

SIZES = [1, 8, 130, 1000]
KEY = RngKey(0)


def empty_state(method: SignMomentum, chunks: int, numel: int) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in method.state(numel, chunks).items()}


def decoded(method: SignMomentum, sections: list[Tensor], numel: int) -> Tensor:
    """[chunks, numel]: what each receiver decodes from this sender."""
    return torch.stack(
        [
            method.dequantize_sum([one[chunk : chunk + 1] for one in sections], numel, KEY)
            for chunk in range(len(sections[0]))
        ]
    )


def send(method: SignMomentum, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
    return decoded(method, [*method.quantize(grad, state, KEY, 0)], grad.shape[1])


@pytest.mark.parametrize("beta1", [0.9, 0.0])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_equal_a_plain_twin(numel: int, dtype: torch.dtype, beta1: float) -> None:
    method = SignMomentum(warmup=1, beta1=beta1, group=64)
    state, twin = empty_state(method, 3, numel), Sender(method, 3, numel)
    random = torch.Generator().manual_seed(numel)
    for _ in range(4):
        grad = torch.randn(3, numel, generator=random).to(dtype)
        assert send(method, grad, state).equal(twin.send(grad))
    assert state["error"].flatten(1)[:, :numel].equal(twin.error)


@pytest.mark.parametrize("numel", SIZES)
def test_sums_telescope(numel: int) -> None:
    """The sum of messages is the sum of momenta, except for the first and the last error."""
    method = SignMomentum(warmup=1, beta1=0.0)
    state, steps = empty_state(method, 1, numel), 20
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(1, numel, generator=random) for _ in range(steps)]
    sent = sum(send(method, grad, state).double() for grad in grads)
    due = sum(grad.double() for grad in grads) - state["error"].flatten(1)[:, :numel].double()
    # Each step rounds twice, in numbers smaller than ten times the largest gradient.
    assert (sent - due).abs().max() <= steps * 2 * 10 * max(one.abs().max() for one in grads) * 2.0**-24


def test_errors_stay_bounded() -> None:
    """A least-squares scale never makes an error longer than what it is the error of."""
    method = SignMomentum(warmup=1, beta1=0.0)
    state = empty_state(method, 1, 128)
    grad = torch.zeros(1, 128)
    grad[0, 3] = 1.0  # one of 128: the hardest block for signs
    for _ in range(2000):
        send(method, grad, state)
    contraction = 1 - 1 / 128  # at worst, in squared lengths: |error'|^2 <= contraction |grad + error|^2
    assert state["error"].norm() <= math.sqrt(contraction) / (1 - math.sqrt(contraction))


def test_blocks_of_zeros_are_decoded_to_zeros() -> None:
    method = SignMomentum(warmup=1)
    state = empty_state(method, 2, 256)
    grad = torch.zeros(2, 256)
    grad[1, 128:] = 1.0
    for _ in range(3):
        found = send(method, grad, state)
        assert not found[0].any() and not found[1, :128].any() and found[1, 128:].all()
    assert not state["error"][0].any()


def test_padding_counts_neither_in_scales_nor_in_errors() -> None:
    method = SignMomentum(warmup=1, beta1=0.0)
    state = empty_state(method, 1, 130)
    grad = torch.ones(1, 130)
    assert send(method, grad, state).equal(grad)
    assert not state["error"].any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_block_that_is_not_finite_is_decoded_to_nan_and_changes_nothing(bad: float) -> None:
    method = SignMomentum(warmup=1)
    state = empty_state(method, 1, 256)
    send(method, torch.randn(1, 256), state)
    before = {name: value.clone() for name, value in state.items()}
    grad = torch.randn(1, 256)
    grad[0, 5] = bad
    found = send(method, grad, state)
    assert found[0, :128].isnan().all() and found[0, 128:].isfinite().all()
    for name in ("error", "momentum"):
        assert state[name][0, 0].equal(before[name][0, 0]) and not state[name][0, 1].equal(before[name][0, 1])


def test_sums_are_in_rank_order() -> None:
    method = SignMomentum(warmup=1, beta1=0.0)
    senders = [torch.randn(1, 1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    sections = [method.quantize(one, empty_state(method, 1, 1000), KEY, 0) for one in senders]
    each = [decoded(method, [*one], 1000)[0] for one in sections]
    together = [torch.cat(parts) for parts in zip(*sections, strict=True)]
    assert method.dequantize_sum(together, 1000, KEY).equal(each[0] + each[1] + each[2])


@pytest.mark.parametrize(("numel", "expected"), [(128, 18), (129, 36), (2**20, 2**20 // 8 + 2**20 // 64)])
def test_bytes(numel: int, expected: int) -> None:
    assert sum(SignMomentum(warmup=1).sections(numel)) == expected
    assert BucketLayout(SignMomentum(warmup=1), (numel,), 2).payload_bytes == -(-expected // 16) * 16
    if numel % 128 == 0:
        assert expected / (2 * numel) <= 0.09  # of bf16


def test_the_warm_up_is_no_part_of_the_text() -> None:
    assert to_text(SignMomentum(warmup=5).codec) == to_text(SignMomentum(warmup="auto").codec)
    assert from_text(to_text(SignMomentum(warmup=5))) == SignMomentum(warmup=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmup": 0}, "warmup=0"),
        ({"warmup": "soon"}, "warmup='soon'"),
        ({"warmup": 100_000}, "warmup=100000"),
        ({"beta1": 1.0}, "beta1=1.0"),
        ({"group": 12}, "group=12"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SignMomentum(**{"warmup": 1, **options})  # pyright: ignore[reportArgumentType]
