"""A small model of residual blocks, and its plain twin, which knows masks and scales by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.whole_tensors import whole

WIDTH, LAYERS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, layers: int = LAYERS, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers: Any = nn.ModuleList(kind() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 3)
        self.repeats: bool | None = None  # checkpointing of blocks: use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            found = block(x) if self.repeats is None else checkpoint(block, x, use_reentrant=self.repeats)
            x = found[0] if isinstance(found, tuple) else found
        return self.last(x)


class Dropped(nn.Module):
    """The same without `zgraph.LayerDrop`: told what is kept, and with which probability."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net: Any = net

    def forward(self, x: Tensor, kept: Sequence[bool], probabilities: Sequence[float]) -> Tensor:
        x = self.net.first(x)
        for block, is_kept, probability in zip(self.net.layers, kept, probabilities, strict=True):
            if is_kept and probability < 1:
                x = torch.lerp(x, block(x.view_as(x)), 1 / probability)
            elif is_kept:
                x = block(x)
        return self.net.last(x)


def net(*args: Any) -> Net:
    torch.manual_seed(3)
    return Net(*args)


def batch(rank: int, step: int, micro: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank))


def compiled(model: Any, mode: str, **options: Any) -> Any:
    """The model as it is called: uncompiled, compiled as a whole, block by block, or as a whole by Inductor."""
    options = {"lowering": "inductor" if mode == "inductor" else "fx", **options}
    if mode == "blocks":
        for block in model.layers:
            block.compile(backend="zgraph", options=options)
    return torch.compile(model, backend="zgraph", options=options) if mode in ("whole", "inductor") else model


def accumulate(model: nn.Module, called: Any, step: int, micro_batches: int, autocast: bool = False) -> None:
    for micro in range(micro_batches):
        waits = zgraph.no_sync(model) if micro < micro_batches - 1 else contextlib.nullcontext()
        with waits, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = called(batch(dist.get_rank(), step, micro))
        output.float().square().mean().backward()


def expected_gradients(
    twin: Dropped, step: int, micro_batches: int, stage: int, kept: Sequence[bool], probabilities: Sequence[float]
) -> list[Tensor | None]:
    """Means over ranks of the sums over micro-batches; from stage 2 on sums of means, which is how they are rounded."""
    ranks = dist.get_world_size()
    parameters = [*twin.parameters()]

    def gradients(rank: int, micro: int) -> Sequence[Tensor | None]:
        loss = twin(batch(rank, step, micro), kept, probabilities).square().mean()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    of_ranks = [[gradients(rank, micro) for micro in range(micro_batches)] for rank in range(ranks)]
    if stage < 2:
        sums = [[added(parts) for parts in zip(*of_rank, strict=True)] for of_rank in of_ranks]
        return [mean(parts) for parts in zip(*sums, strict=True)]
    means = [[mean(parts) for parts in zip(*of_micro, strict=True)] for of_micro in zip(*of_ranks, strict=True)]
    return [added(parts) for parts in zip(*means, strict=True)]


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    assert len(found) in (0, len(parts))
    return sum(found[1:], found[0]) if found else None


def mean(parts: Sequence[Tensor | None]) -> Tensor | None:
    total = added(parts)
    return None if total is None else total / len(parts)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
