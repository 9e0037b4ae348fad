"""What is trained: one small language model, and the tokens that every rank and every step sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 1234


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model and of one rank's batch.

    By default a step sends for longer than it computes on a 1 Gbit/s link, and computes for about a tenth of a second.
    """

    vocabulary: int = 2048
    width: int = 256
    layers: int = 8
    heads: int = 4
    sequence: int = 64
    batch: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be split over {self.heads} heads")


class Block(nn.Module):
    """Causal attention and a feed-forward layer, both behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.heads_of(self.attention_norm(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))

    def heads_of(self, normed: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, [batch, heads, sequence, head_width] each."""
        heads = self.query_key_value(normed).unflatten(2, (3, -1, self.head_width))
        return heads.permute(2, 0, 3, 1, 4).unbind(0)


class LanguageModel(nn.Module):
    """A decoder-only transformer that returns its own loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of predicting tokens[:, 1:] from what stands before; tokens is [batch, sequence + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        hidden = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_batch(config: ModelConfig, step: int, rank: int) -> Tensor:
    """[batch, sequence + 1] tokens that count upwards in a stride of their own; a function of step and rank alone."""
    generator = torch.Generator().manual_seed(SEED + 1_000_003 * step + rank)
    start = torch.randint(config.vocabulary, (config.batch, 1), generator=generator)
    stride = torch.randint(1, 5, (config.batch, 1), generator=generator)
    return (start + stride * torch.arange(config.sequence + 1)) % config.vocabulary
