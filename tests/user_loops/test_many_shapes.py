"""Batches of many shapes: few graphs, right gradients, and a word on every rank where Dynamo compiles no more."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import refusal
from tests.support.whole_tensors import whole

LONGEST, BUCKETS = 48, 8
Batches = Iterator[tuple[str, Tensor]]


class Text(nn.Module):
    """A language model of one block; tokens [batch, length] -> the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(LONGEST + 1, 8)
        self.mix, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        q, k, v = self.mix(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Image(nn.Module):
    """A U-Net of one level; image [batch, 3, height, width] -> the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.up = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        above = F.silu(self.norm(self.enter(image)))
        below = F.interpolate(F.silu(self.down(above)), size=above.shape[-2:])
        return self.up(torch.cat([below, above], 1)).square().mean()


def lengths(rank: int) -> Batches:
    """Drawn by each rank, the shortest and the longest among them; then padded to a few."""
    drawn, made = random.Random(rank), torch.Generator().manual_seed(rank)
    found = [20 + rank, 1, *(drawn.randint(1, LONGEST) for _ in range(8)), LONGEST]
    found += [LONGEST // BUCKETS * drawn.randint(1, BUCKETS) for _ in range(8)]
    for length in found:
        yield "train", torch.randint(11, (2, length + 1), generator=made)


def sizes(rank: int) -> Batches:
    made = torch.Generator().manual_seed(rank)
    for size in [*range(8, 24, 2)] * 2:
        yield "train", torch.randn(2, 3, size, size, generator=made)
        yield "evaluate", torch.randn(2, 3, size, size, generator=made)


def frames_of(build: Callable[[], nn.Module], batches: Callable[[int], Batches], dynamic: str) -> int:
    """Frames that were compiled, of a loop whose gradients and losses are those of the replicated model."""
    torch.manual_seed(0)
    plain = build()
    model = zgraph.shard(copy.deepcopy(plain))
    call: Any = torch.compile(
        model, backend="zgraph", options={"lowering": "fx"}, dynamic=True if dynamic == "all" else None
    )
    for kind, batch in batches(dist.get_rank()):
        if dynamic == "marked":
            for dim in range(2, 4) if batch.ndim == 4 else (1,):
                torch._dynamo.maybe_mark_dynamic(batch, dim)  # mark_dynamic refuses a single token
        model.zero_grad()
        plain.zero_grad()
        with torch.set_grad_enabled(kind == "train"):
            loss, expected = call(batch), plain(batch)
        assert torch.equal(loss, expected)
        if kind == "train":
            loss.backward()
            expected.backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert other.grad is not None
                dist.all_reduce(other.grad)
                assert torch.equal(whole(one.grad), other.grad / dist.get_world_size())
    return len({graph.frame for graph in zgraph.summary(model).graphs})


@pytest.mark.parametrize(
    ("build", "batches", "dynamic", "most"),
    [
        (Text, lengths, "", 3),  # the first length, all others, and a single token
        (Text, lengths, "marked", 2),
        (Image, sizes, "", 4),  # the first size and all others, trained and evaluated
        pytest.param(Image, sizes, "all", 2, marks=pytest.mark.long),
    ],
)
def test_graphs_stay_few_and_gradients_right(
    ranks: Ranks, build: Callable[[], nn.Module], batches: Callable[[int], Batches], dynamic: str, most: int
) -> None:
    for frames in ranks.run(frames_of, build, batches, dynamic):
        assert frames <= most


def small() -> Any:
    torch.manual_seed(0)
    return zgraph.shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))


def at_the_limit() -> tuple[list[str], str, Tensor]:
    """Warnings and the summary of a model that has no graph for its last batches, and the last gradient."""
    model = small()
    call: Any = torch.compile(model, backend="zgraph", options={"lowering": "fx"}, dynamic=False)
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=2):
        warnings.simplefilter("always", zgraph.ZgraphWarning)
        for rows in (2, 3, 4, 5):
            model.zero_grad()
            call(torch.ones(rows, 4)).square().mean().backward()
    return [str(one.message) for one in caught], str(zgraph.summary(model)), whole(model[0].weight.grad)


def test_a_model_that_is_compiled_no_more_says_so_once(ranks: Ranks) -> None:
    for said, summary, found in ranks.run(at_the_limit):
        (text,) = [one for one in said if one.startswith("zgraph")]
        assert "limit of recompiles" in text and "dynamic=False" in text
        assert "gathered outside of graphs: 0, 2: Dynamo has reached its limit of recompiles" in summary
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        plain(torch.ones(5, 4)).square().mean().backward()
        assert torch.equal(found, plain[0].weight.grad)


def on_one_rank(as_step: bool) -> str:
    """The error of two ranks if one has more shapes than the limit allows."""
    model = small()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    call: Any = model if as_step else torch.compile(model, backend="zgraph", options={"lowering": "fx"}, dynamic=False)

    def lines(x: Tensor) -> None:
        opt.zero_grad()
        call(x).square().mean().backward()
        opt.step()

    step: Any = lines
    if as_step:
        step = zgraph.training_step(model, opt, options={"lowering": "fx"}, recompile_limit=2)(lines)

    def loop() -> None:
        with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
            warnings.simplefilter("ignore", zgraph.ZgraphWarning)
            for rows in (2, 3, 4):
                step(torch.ones(rows if dist.get_rank() else 2, 4))

    return refusal(loop)


@pytest.mark.parametrize(
    ("as_step", "expected"),
    [
        (False, "rank 1 may run outside of graphs what the other one compiles: see its warnings"),
        (True, "2 graphs were made for different calls"),
    ],
)
def test_a_limit_that_one_rank_reaches_ends_all(ranks: Ranks, as_step: bool, expected: str) -> None:
    for text in ranks.run(on_one_rank, as_step):
        assert expected in text
