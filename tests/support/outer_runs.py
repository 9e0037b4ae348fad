"""A small loop with outer steps, and its batches."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.models import VOCABULARY, Language
from tests.support.whole_tensors import whole
from zgraph import passes

LOCO = passes.LoCo(bits=4)


def batches(step: int, site: int, rank: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + 10 * site + rank))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Run:
    """A loop of this rank's site."""

    def __init__(self, sites: int, offload: zgraph.Offload | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.mesh = init_device_mesh("cpu", (sites, dist.get_world_size() // sites), mesh_dim_names=("site", "dp"))
        self.model = zgraph.shard(Language(width=12), self.mesh["dp"], zero_stage=2, offload=offload)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.outer = zgraph.OuterSteps(self.model, self.mesh["site"], every=4, fragments=3, delay=2)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(self.model, *batches(step, dist.get_rank(), 0)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step()

    @property
    def folder(self) -> str:
        return f"site{self.mesh['site'].get_local_rank()}"

    def values(self) -> list[Tensor]:
        return [whole(one.detach()) for one in self.model.parameters()]
