"""1-bit Adam on several ranks in plain PyTorch, with whole parameters on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zgraph.passes import SignMomentum


class Sender:
    """One sender, element by element as the docstring says it."""

    def __init__(self, method: SignMomentum, chunks: int, numel: int) -> None:
        self.beta, self.group, self.messages = method.beta1, method.group, 0
        self.momentum, self.error = torch.zeros(2, chunks, numel)
        self.weight = torch.zeros(1)

    def send(self, grad: Tensor) -> Tensor:
        self.weight = self.weight * self.beta + (1 - self.beta)
        self.momentum = torch.lerp(self.momentum, grad.float(), 1 - self.beta)
        wanted = (self.momentum / self.weight if self.beta else grad.float()) + self.error
        sent = torch.zeros_like(wanted)
        for chunk in range(len(wanted)):
            for begin in range(0, wanted.shape[1], self.group):
                block = wanted[chunk, begin : begin + self.group]
                # Summed as a whole block: the sum of the same numbers in another order may round otherwise.
                whole = torch.nn.functional.pad(block, (0, self.group - len(block)))
                scale = (whole.abs()[None].sum(1) / len(block)).bfloat16().float()
                sent[chunk, begin : begin + self.group] = torch.where(block < 0, -scale, scale)
        self.error = wanted - sent
        return sent


@dataclass
class Momenta:
    """The compressed mean of one parameter's gradient on this rank.

    Attributes:
        rows: whether each rank averages rows of the parameter; else it averages a stretch of elements, and all ranks
            receive the signs of its mean.
    """

    method: SignMomentum
    shape: torch.Size
    rows: bool
    senders: list[Sender] = field(default_factory=list[Sender])

    def mean(self, grad: Tensor) -> Tensor:
        world, rank = dist.get_world_size(), dist.get_rank()
        unit = grad[0].numel() if self.rows else 1
        numel = -(-(grad.numel() // unit) // world) * unit
        if not self.senders:
            back = SignMomentum(warmup=1, beta1=0.0, group=self.method.group)
            self.senders = [Sender(self.method, world, numel), Sender(back, 1, numel)]
        flat = torch.nn.functional.pad(grad.flatten(), (0, world * numel - grad.numel()))
        total = torch.zeros(numel)
        for one in gathered(self.senders[0].send(flat.view(world, numel))):
            total = total + one[rank]
        mean = total / world
        if not self.rows:
            mean = self.senders[1].send(mean[None])[0]
        return torch.cat(gathered(mean))[: grad.numel()].view(self.shape)


def gathered(value: Tensor) -> list[Tensor]:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


def update(parameter: Tensor, momentum: Tensor, square: Tensor, step: float, group: Mapping[str, Any]) -> Tensor:
    """Return the parameter after an update with a frozen second moment of `step` updates."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    root = (square / (1 - torch.tensor(beta2, dtype=torch.float64) ** step)).sqrt() + group["eps"]
    bound = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
    decayed = parameter * (1 - lr * group["weight_decay"])
    return decayed + (momentum / root).clamp(-bound, bound) * -lr
