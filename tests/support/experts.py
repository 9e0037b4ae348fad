"""A mixture of experts whose experts lie on an `ep` axis, and its judge: the same model on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph

WIDTH, EXPERTS, TOKENS, CAPACITY = 6, 4, 10, 3
BALANCE = 0.05  # weight of the loss that spreads tokens over experts


class Experts(nn.Module):
    """Two layers for each expert; on an `ep` axis each rank holds some experts, and gets tokens from all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH) / 3)
        self.group: dist.ProcessGroup | None = None

    def split(self, ep: DeviceMesh) -> None:
        for name in ("up", "down"):
            split = distribute_tensor(getattr(self, name).detach(), ep, [Shard(0)])
            setattr(self, name, nn.Parameter(split))
        self.group = ep.get_group()

    def forward(self, tokens: Tensor) -> Tensor:
        """[experts, capacity, width] of this rank's tokens -> what the experts make of them."""
        up, down = (one.to_local() if isinstance(one, DTensor) else one for one in (self.up, self.down))
        own = up.shape[0]
        at_home = self.exchanged(tokens).unflatten(0, (-1, own)).transpose(0, 1).flatten(1, 2)
        made = torch.bmm(F.silu(torch.bmm(at_home, up)), down)
        return self.exchanged(made.unflatten(1, (-1, CAPACITY)).transpose(0, 1).flatten(0, 1))

    def exchanged(self, tokens: Tensor) -> Tensor:
        if self.group is None:
            return tokens
        splits = [tokens.shape[0] // self.group.size()] * self.group.size()
        return all_to_all_single_autograd(tokens.contiguous(), splits, splits, self.group)


class Mixture(nn.Module):
    """Each token goes to its best expert while that has room; beside that, a shared layer computes all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, width] -> the same, and the loss that balances experts (Switch, arXiv 2101.03961, section 2.2)."""
        x = torch.tanh(self.enter(x))
        chances = self.router(x).float().softmax(-1)
        best = F.one_hot(chances.argmax(-1), EXPERTS)
        place = (best.cumsum(0) * best).sum(-1) - 1  # of each token among those of its expert
        # What comes after the last place is dropped: the expert adds nothing to it.
        slot = best.unsqueeze(-1) * (place.unsqueeze(-1) == torch.arange(CAPACITY)).unsqueeze(1)
        slot = slot.to(x.dtype)  # [tokens, experts, capacity]
        made = self.experts(torch.einsum("tec,tw->ecw", slot, x))
        weight = chances.amax(-1, keepdim=True).to(x.dtype)
        mixed = self.shared(x) + weight * torch.einsum("tec,ecw->tw", slot, made)
        balance = EXPERTS * (best.float().mean(0) * chances.mean(0)).sum()
        return mixed, balance


def tokens_of(rank: int, index: int) -> Tensor:
    """Tokens that crowd on few experts: some of these overflow, and others get none."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator) + 0.5 * rank


def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
    mixed, balance = output
    return mixed.float().square().mean() + BALANCE * balance


def built(zero_stage: int, ep: int = 2, **options: Any) -> tuple[Mixture, Mixture]:
    """The model on dp x ep ranks, and whole on each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(5)
    plain = Mixture()
    torch.manual_seed(5)
    model = Mixture()
    model.experts.split(mesh["ep"])
    zgraph.shard(model.experts, mesh["dp"], zero_stage=zero_stage, reduction=mesh.size(), **options)
    zgraph.shard(model, mesh, zero_stage=zero_stage, **options)
    return model, plain
