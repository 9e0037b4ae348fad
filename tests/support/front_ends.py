"""What the tests of front ends share: ranks as torchrun starts them, a tied model, and data for two of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TOKENS, WIDTH, LENGTH = 11, 8, 5


@contextlib.contextmanager
def launched() -> Generator[None]:
    """The variables that torchrun sets, if there is a group; and afterwards no state in the classes of Accelerate."""
    before = dict(os.environ)
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": "0", "WORLD_SIZE": world}
        os.environ |= {"LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # a port nobody asks
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


class Tied(nn.Module):
    """A head that shares the embedding's weight, dropout where asked for, and a number to learn."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)) * self.gain)


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


def tied(dropout: float = 0.0) -> Tied:
    torch.manual_seed(0)
    return Tied(dropout)


def tokens(rows: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randint(0, TOKENS, (rows, LENGTH), generator=generator) for _ in range(2)))


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far the worst tensor is off, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())
