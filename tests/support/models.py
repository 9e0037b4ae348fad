"""Small models for the numerics tests, each with something that sharding could get wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 23


class Block(nn.Module):
    """Pre-norm attention and MLP; widths that no world size divides."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Language(nn.Module):
    """A GPT with tied embeddings and a scalar temperature (which cannot be sharded on dim 0)."""

    def __init__(self, dropout: float = 0.0, layers: int = 2, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def trunk(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(tokens)) * self.temperature


class Gated(nn.Module):
    """A gated layer behind a norm that is spelled out: backward can compute most of it from little."""

    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.gate, self.up = (nn.Linear(width, 2 * width + 1, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class GatedLanguage(nn.Module):
    """Tokens through one gated layer."""

    def __init__(self, dropout: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layer = Gated(dropout, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


class Uneven(nn.Module):
    """First dimensions 13, 5, 2 and 1: not divisible by N, smaller than N."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 2))
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.gain + self.shift


class Reused(nn.Module):
    """One block called three times, and one weight read twice by its owner and once by its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)
        self.scale = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.scale(x) + x @ self.scale.weight


class PartlyRead(nn.Module):
    """A parameter that is never read, in a module that runs; and a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.spare = nn.Linear(3, 3)
        self.unread = nn.Parameter(torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


class Frozen(nn.Module):
    """Frozen weights before, between and inside trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.layers[4].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Broken(nn.Module):
    """Graph breaks between two units, and inside one whose parameter is read on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.inside = Straddling()
        self.after = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.after(self.inside(x))


class Straddling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight)
        torch._dynamo.graph_break()
        return x @ self.weight


class Experts(nn.Module):
    """Top-1 mixture of experts: which expert runs depends on the data, and so differs between ranks."""

    def __init__(self, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero()[:, 0]
            if mine.numel():
                result = result.index_add(0, mine, expert(x[mine]) * weights[mine, index, None])
        return result


class Routed(nn.Module):
    """Experts between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.moe = Experts()
        self.leave = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.moe(self.enter(x))))


class Attending(nn.Module):
    """nn.MultiheadAttention reads the weight of its out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.out(mixed.squeeze(1))


class Normalised(nn.Module):
    """Batch norm: buffers that a forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Strided(nn.Module):
    """Gradients that come out transposed, expanded, and shared by two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5) / 3)
        self.left = nn.Parameter(torch.randn(8, 5))
        self.right = nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], 5)
        return torch.softmax(self.weight.t().contiguous(), 0).t().mul(x[:1].t()).sum() + (
            self.left + self.right
        ) * x.sum().expand(shape)


class Unbound(nn.Module):
    """Returns views of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        first, second, _ = self.rows.unbind(0)
        return x * first + second


class Adapter(nn.Module):
    """Touches its input only where the data says so."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x) if x.sum() > 0 else x


class Adapted(nn.Module):
    """A frozen trunk with an adapter that some ranks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = Adapter()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.adapter(self.trunk(x)))


class Checkpointed(nn.Module):
    """Activation checkpointing: the forward runs again inside backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.second = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=self.reentrant)
