"""Random small models, sharded, equal the replicated model bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.judges.replicated import Case, compare, token_batch
from tests.support.ranks import Ranks, worlds

KINDS = ("linear", "norm", "attention", "embedding")


@dataclass(frozen=True)
class Layer:
    kind: str
    frozen: bool
    calls: int


@dataclass(frozen=True)
class Recipe:
    """All that a rank needs to build the model; drawn once, in the parent process."""

    width: int
    layers: tuple[Layer, ...]
    tied: bool


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Position(nn.Module):
    """An embedding of the position, as long as the longest input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class Drawn(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, recipe.width)
        made = {
            "linear": lambda: nn.Linear(recipe.width, recipe.width),
            "norm": lambda: nn.LayerNorm(recipe.width),
            "attention": lambda: Attention(recipe.width),
            "embedding": lambda: Position(recipe.width),
        }
        self.layers = nn.ModuleList(made[layer.kind]() for layer in recipe.layers)
        for module, layer in zip(self.layers, recipe.layers, strict=True):
            module.requires_grad_(not layer.frozen)
        self.calls = [layer.calls for layer in recipe.layers]
        self.head = nn.Linear(recipe.width, 23, bias=False)
        if recipe.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, calls in zip(self.layers, self.calls, strict=True):
            for _ in range(calls):
                x = torch.tanh(layer(x))
        return self.head(x)


layers = st.builds(Layer, st.sampled_from(KINDS), st.booleans(), st.integers(1, 2))
recipes = st.builds(Recipe, st.integers(3, 9), st.lists(layers, min_size=1, max_size=4).map(tuple), st.booleans())


def run_recipe(recipe: Recipe, zero_stage: int, mode: str) -> int:
    return compare(Case(build=lambda: Drawn(recipe), batch=token_batch, steps=2), zero_stage, mode)


@settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(recipe=recipes, zero_stage=st.sampled_from([0, 3]))
@worlds(3)
def test_a_random_model_equals_its_replica(ranks: Ranks, recipe: Recipe, zero_stage: int) -> None:
    for mode in ("eager", "fx"):
        assert min(ranks.run(run_recipe, recipe, zero_stage, mode)) > 0
