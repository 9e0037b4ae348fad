"""A Llama: RMSNorm, rotary embeddings, grouped-query attention and a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes; the default is Llama 3 8B with four layers of its 32.

    Attributes:
        layers, width, heads, hidden, key_heads, vocabulary: of the model.
        dropout: behind attention and behind the MLP, which Llama has none of.
        checkpointed: layers are computed again in backward.
        autocast: forward runs in bf16 under autocast.
    """

    layers: int = 4
    width: int = 4096
    heads: int = 32
    hidden: int = 14336
    key_heads: int = 8
    vocabulary: int = 128256
    dropout: float = 0.0
    checkpointed: bool = False
    autocast: bool = False


SMALL = Shape(layers=2, width=256, heads=4, hidden=512, key_heads=2, vocabulary=1024)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, keys = shape.width, shape.width * shape.key_heads // shape.heads
        self.heads, self.copies = shape.heads, shape.heads // shape.key_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.gate, self.up = nn.Linear(width, shape.hidden, bias=False), nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(projected: Tensor) -> Tensor:  # [batch, heads, length, size of a head]
            return projected.view(batch, length, -1, width // self.heads).transpose(1, 2)

        y = self.attention_norm(x)
        query, key = rotated(split(self.query(y)), cos, sin), rotated(split(self.key(y)), cos, sin)
        key, value = (each.repeat_interleave(self.copies, 1) for each in (key, split(self.value(y))))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        y = self.mlp_norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """Returns the loss of predicting each token from those before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.shape.autocast):
            return self._loss(tokens)

    def _loss(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        size = self.shape.width // self.shape.heads
        frequencies = 500_000 ** (-torch.arange(0, size, 2, device=x.device) / size)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * frequencies[None, :]
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.shape.checkpointed else layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
