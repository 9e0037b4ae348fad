"""The rules that say where an operator leaves the tokens, against what happens if a token changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zgraph
from zgraph.sharding.context.follow import FollowTokens
from zgraph.sharding.context.token_rules import Place

BATCH, LENGTH, WIDTH = 2, 6, 4
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "merge": lambda x: x.reshape(BATCH * LENGTH, WIDTH),
    "merge_features": lambda x: x.reshape(BATCH, LENGTH * WIDTH),
    "merge_all": lambda x: x.reshape(-1),
    "merge_and_split": lambda x: x.reshape(BATCH, LENGTH * WIDTH).view(BATCH, LENGTH, 2, 2),
    "heads": lambda x: x.view(BATCH, LENGTH, 2, 2).transpose(1, 2).reshape(2 * BATCH, LENGTH, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose_last": lambda x: x.mT,
    "squeeze": lambda x: x[None, :, None].squeeze(),
    "squeeze_dims": lambda x: x[:, None, :, None].squeeze(3).squeeze(1),
    "expand": lambda x: x.expand(3, BATCH, LENGTH, WIDTH),
    "repeat": lambda x: x.repeat(2, 3, 1, 1),
    "select": lambda x: x.select(0, 1).select(1, 2),
    "slice": lambda x: x[:1, :, 1:3],
    "split": lambda x: torch.cat([-one for one in x.split(2, -1)], -1),
    "unbind": lambda x: x.unbind(0)[1],
    "stack": lambda x: torch.stack((x, x + 1), 1),
    "chunk_and_rotate": lambda x: torch.cat((-x[..., 2:], x[..., :2]), -1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "flip": lambda x: x.flip(-1),
    "linear": lambda x: F.linear(x, WEIGHT, WEIGHT[0]),
    "left": lambda x: WEIGHT @ x.mT,
    "batched": lambda x: x.permute(1, 0, 2) @ WEIGHT,
    "per_token": lambda x: x.permute(1, 0, 2) @ x.permute(1, 2, 0),
    "einsum": lambda x: torch.einsum("bld,de->bel", x, WEIGHT),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), WEIGHT[0], WEIGHT[1]),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), WEIGHT[0]),
    "mean": lambda x: x.mean(-1),
    "keep": lambda x: x - x.amax((0, 2), keepdim=True),
    "variance": lambda x: x.var(0),
    "cumulative": lambda x: x.cumsum(2).logsumexp(2),
    "topk": lambda x: x.topk(2, -1).values,
    "lookup": lambda x: F.embedding(x[..., 0].abs().long(), WEIGHT),
    "index": lambda x: WEIGHT[:, x[0, :, 0].abs().long()],
    "index_select": lambda x: WEIGHT.index_select(1, x[0, :, 0].abs().long()),
    "gather": lambda x: x.gather(2, x[..., :1].abs().long()),
    "one_hot": lambda x: torch.zeros_like(x).scatter(2, x[..., :1].abs().long(), 1.0),
    "mask": lambda x: x.masked_fill(x > 0, 0.0).clamp(max=1),
    "dropout_off": lambda x: F.dropout(x, 0.5, training=False) * torch.ones(LENGTH, 1),
    "fill": lambda x: torch.empty(BATCH, LENGTH, WIDTH).copy_(x),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()) * 1j),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "losses": lambda x: F.mse_loss(x, 2 * x, reduction="none"),
}


def _tokens() -> Tensor:
    # Below 4 in magnitude, as some operations look up rows of the weight.
    return torch.rand(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) * 7 - 3.5


def _followed(operation: Callable[[Tensor], Tensor]) -> Place | None:
    x = _tokens()
    follow = FollowTokens(LENGTH)
    follow.begin([x])
    with follow:
        result = operation(x)
    return follow.places.get(result)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_token_changes_its_own_place_only(name: str) -> None:
    operation = OPERATIONS[name]
    place = _followed(operation)
    assert place is not None
    x = _tokens()
    before = operation(x)
    index = torch.arange(before.shape[place.dim]) // place.inner % LENGTH
    touched = 0
    for token in range(LENGTH):
        other = x.clone()
        other[:, token] = other[:, token].flip(-1) / 2 + 0.3
        changed = operation(other).ne(before).movedim(place.dim, 0).reshape(len(index), -1).any(1)
        assert not bool((changed & (index != token)).any())
        touched += bool(changed.any())
    assert touched > 1


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous())


def _written_in_parts(x: Tensor) -> Tensor:
    buffer = torch.zeros(BATCH, LENGTH, WIDTH)
    buffer[..., :2] = x[..., 2:]
    return buffer


def _refused(operation: Callable[[Tensor], Tensor]) -> str:
    with pytest.raises(zgraph.ZgraphError) as caught:
        _followed(operation)
    return str(caught.value)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (lambda x: x.view(BATCH, 3, 2, WIDTH), "divides the tokens"),
        (lambda x: x.view(BATCH, 2, 3 * WIDTH), "divides the tokens"),
        (lambda x: x + x.mT[:, :, :1].mT, "selects some"),
        (lambda x: x[:, :, None] + x[:, None], "combines each token with others"),
        (lambda x: x.mT + torch.randn(LENGTH), "own value for each of 6 positions"),
        (lambda x: x + torch.zeros(LENGTH, 1).add_(torch.arange(LENGTH)[:, None]), "own value for each of 6"),
        (lambda x: x * torch.ones(LENGTH).cumsum(0)[:, None].neg(), "own value for each of 6"),
        (lambda x: x.softmax(1), "combines tokens"),
        (lambda x: x.amax(), "reduces over this rank's tokens"),
        (lambda x: x.sum() / (x > 0).sum(), "reduces over this rank's tokens; a loss is a mean()"),
        (lambda x: x.mean().sqrt(), "computes with a mean over this rank's tokens"),
        (
            lambda x: torch.stack((x.mean(), (x * x).mean())).logsumexp(0),
            "computes with a mean over this rank's tokens",
        ),
        (lambda x: WEIGHT.norm() / x.mean(), "computes with a mean over this rank's tokens"),
        (lambda x: F.mse_loss(x, 2 * x, reduction="sum"), "sums over this rank's tokens"),
        (lambda x: torch.einsum("btd,td->bt", x, torch.randn(LENGTH, WIDTH)), "own value for each of 6 positions"),
        (lambda x: torch.einsum("btd,tde->bte", x, torch.randn(LENGTH, WIDTH, 3)), "own value for each of 6 positions"),
        (
            lambda x: torch.baddbmm(torch.randn(1, LENGTH, WIDTH), x, WEIGHT.expand(2, -1, -1)),
            "own value for each of 6",
        ),
        (lambda x: _pairs(x) * torch.randn(1, LENGTH, 1), "own value for each of 6 positions"),
        (lambda x: _written_in_parts(x), "writes tokens into a part of a tensor"),
        (lambda x: F.embedding(x[..., 0].abs().long(), WEIGHT, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda x: F.nll_loss(x.flatten(0, 1), x[..., 0].abs().long().flatten()), "cross_entropy"),
        (lambda x: F.layer_norm(x, (LENGTH, WIDTH)), "normalizes over this rank's tokens"),
        (lambda x: x.repeat(1, 2, 1), "repeats the tokens"),
        (lambda x: x.flip(1), "reorders this rank's tokens"),
        (lambda x: x.roll(1, 1), "reorders this rank's tokens"),
        (lambda x: x.sort(1).values, "combines tokens"),
        (lambda x: x.gather(1, x.abs().long()), "combines tokens"),
        (lambda x: x.index_select(1, torch.tensor([1, 0, 2, 3, 4, 5])), "selects tokens by indices"),
        (lambda x: F.embedding(torch.tensor([0]), x[0]), "looks up tokens"),
        (lambda x: torch.cat((x, x), 1), "appends other tokens"),
        (lambda x: x.tril(), "place of tokens on this rank"),
        (lambda x: x.select(1, 0), "selects one of this rank's tokens"),
        (lambda x: F.pad(x, (0, 0, 1, 0)), "pads or crops"),
        (lambda x: x[:, [1, 0, 2, 3, 4, 5]], "selects tokens by indices"),
        (lambda x: x.mT @ x, "sums products over this rank's tokens"),
        (lambda x: x @ x.mT, "multiplies each token by others"),
        (lambda x: torch.tensor(float(x.mean())) + x, ".item() is not known to keep tokens apart"),
    ],
)
def test_operators_that_combine_tokens_are_refused(operation: Callable[[Tensor], Tensor], text: str) -> None:
    assert text in _refused(operation)


def test_a_loss_is_a_mean_over_tokens() -> None:
    assert _followed(lambda x: 2 * x.mean() - (x * x).mean() / 3 + 1) == Place(-1)
    assert _followed(lambda x: F.mse_loss(x, 2 * x)) == Place(-1)


def test_inference_mode_is_followed() -> None:
    with torch.inference_mode():
        assert _followed(lambda x: F.linear(x.to(torch.float64).reshape(BATCH, -1, WIDTH), WEIGHT.double())) == Place(1)
        assert "combines tokens" in _refused(lambda x: x.softmax(1))


def test_inputs_need_one_dim_of_tokens() -> None:
    follow = FollowTokens(LENGTH)
    follow.begin([torch.zeros(LENGTH), torch.zeros(1, 1, LENGTH, 12), torch.zeros(LENGTH, LENGTH), 3, "a"])
    with pytest.raises(zgraph.ZgraphError, match="several dims of 6 elements"):
        follow.begin([torch.zeros(1, 2, LENGTH, LENGTH)])
