"""What lines between backward and step compute of weights and gradients: what they compute of the plain model's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zgraph
from tests.support.ranks import Ranks, worlds

NUMBERS = """
p.norm().item() ** 2 | bool(p.norm() > 2) | p.max().item() - p.min().item() | (-p.max()).item() | p.mean().item()
torch.isnan(p).any().item() | (not torch.isfinite(p).all()) | (p > 0).sum().item() | p.count_nonzero().item()
float(p.abs().max().clamp(max=0.2)) | torch.linalg.vector_norm(p, float("inf")).item() | (p.norm() + 1e-6).item()
sum(x.norm().item() ** 2 for x in (p, b)) ** 0.5 | torch.stack([x.norm() for x in (p, b)]).norm().item()
p[2, 1].item() | p[-1].sum().item() | p.std().item() | p.var().item() | p.median().item() | p.argmax().item()
torch.allclose(p, p * 1.0) | torch.linalg.matrix_norm(p, 2).item() | (p - torch.ones(7, 1)).norm().item()
float(f"{p.norm():.4f}") | sum(b.tolist())
p.quantile(0.9).item() | p.numpy().sum() | torch.bucketize(b, torch.tensor([0.0, 0.1])).sum().item()
torch.dot(b, b).item() | b[3].item() | int(p.sum() > 0) | p.prod().item() | (p.sum() == p.sum()).item() | len(p)
"""
TENSORS = """
p / (p.norm() + 1e-6) | p / p.norm(dim=1, keepdim=True) | p - p.mean() | p * p.sum() | p / p.max() | p.sum(0) * 2
p.mean(0) + 1 | p.max(0).values | p.softmax(0) | p.cumsum(0) | p.sort(0).values | p.topk(2, 0).values | p.t() @ p
p @ p.t() | torch.outer(b, b) | torch.where(p > p.mean(), p, 0.0) | torch.cat([p, p]) | p.flip(0) | p.roll(1, 0)
p[2] | p[1:6:2] | p[[0, 3]] | p[:, [0, 2]] | p[p > 0] | p.index_select(0, torch.tensor([0, 3])) | p.flatten()[3:20]
p.view(5, 7) | p.reshape(-1) | p.unfold(0, 2, 1) | p.gather(0, torch.zeros(1, 5, dtype=torch.int64)) | p.nonzero()
p * mask | torch.where(mask > 0, p, 0.0) | p.masked_fill(mask > 0, 0.0) | p @ torch.ones(5, 2) | p.renorm(2, 0, 0.1)
F.linear(torch.ones(3, 5), p, b) | F.embedding(torch.tensor([0, 6, 2]), p) | torch.cdist(p, p) | p.unique()
torch.cat([p, torch.ones(2, 5)]) | p.index_add(0, torch.tensor([1]), torch.ones(1, 5)) | p.clone().fill_diagonal_(0.0)
nn.utils.parameters_to_vector([p, b]) | torch.stack([row.abs().sum() for row in p]) | p.take(torch.tensor([3, 9]))
"""


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\n", "|").split("|") if line.strip()]


def value_of(line: str, model: Any) -> Any:
    mask = (torch.arange(model.weight.shape[0]) > 2).float().unsqueeze(1)
    names = {"p": model.weight.detach(), "b": model.bias.detach(), "mask": mask, "torch": torch, "nn": nn, "F": F}
    return eval(line, names)  # of the tables above


THIN = """
p.abs().max().item() | p.min().item() | p.argmax().item() | p.amax(0).sum().item() | p.max(0).values.sum().item()
b.item() | bool(b > 0)
p.median().item() | p.aminmax().max.item() | p.sort(0).values.sum().item() | p.norm(float("inf")).item()
p.flatten().topk(1).values.item() | p.mean().item() | bool((p > 0).any()) | p.prod().item()
p.logsumexp(0).sum().item()
"""  # of fewer rows than ranks


def computed(stage: int) -> list[str]:
    """Lines whose value is not that of the plain model; numbers are compared as they are, on every rank."""
    torch.manual_seed(1)
    thin = nn.Linear(5, 1)
    sharded = zgraph.shard(copy.deepcopy(thin), zero_stage=stage)
    of_thin = [(line, value_of(line, sharded), value_of(line, thin)) for line in lines_of(THIN)]
    plain = nn.Linear(5, 7)
    model = zgraph.shard(copy.deepcopy(plain), zero_stage=stage)
    wrong = [f"{line} is {found}, not {truth}" for line, found, truth in of_thin if abs(found - truth) > 1e-5]
    for line in lines_of(NUMBERS):
        found, truth = value_of(line, model), value_of(line, plain)
        if isinstance(found, Tensor) or abs(found - truth) > 1e-5 * max(1, abs(truth)):
            wrong.append(f"{line} is {found}, not {truth}")
    for line in lines_of(TENSORS):
        found, truth = value_of(line, model), value_of(line, plain)
        found = DTensor.full_tensor(found)
        if found.shape != truth.shape or not torch.allclose(found, truth, atol=1e-6):
            wrong.append(f"{line} is {found}, not {truth}")
    dist.barrier()
    return wrong


@worlds(2, 3)
def test_lines_compute_what_they_compute_of_the_plain_model(ranks: Ranks) -> None:
    for stage in (0, 1, 3):
        assert ranks.run(computed, stage) == [[]] * ranks.world


OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"fused": True, "lr": 0.01, "momentum": 0.9}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    *(
        (kind, {"foreach": True})
        for kind in (torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adamax, torch.optim.ASGD)
    ),
    *((kind, {"foreach": True}) for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop)),
    (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9, "centered": True}),
)


def written(model: nn.Linear, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """The model and plain tensors after two steps and other lines that write."""
    teacher, weight, bias = nn.Linear(5, 7), model.weight, model.bias
    for number in range(2):
        (model(torch.full((2, 5), number + 1.0)).square().sum() * 0.1).backward()
        if number == 1 and optimizer is None:  # PCGrad and the like put together gradients by themselves
            weight.grad = torch.arange(35.0).view(7, 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if optimizer is not None:
            optimizer.step()
    weight.data *= 0.5
    assert bias.grad is not None
    bias.grad.data += 1
    sums = torch.zeros(7, 5)
    sums += weight.detach()
    with torch.no_grad():
        teacher.weight.copy_(weight)
        teacher.weight[2:4].lerp_(weight[4:6], 0.5)
        torch._foreach_copy_([teacher.bias], [bias])
    return [weight.detach(), bias.detach(), bias.grad, sums, teacher.weight.detach(), teacher.bias.detach()]


def written_alike(stage: int) -> list[str]:
    """Optimizers after which the plain model has other values."""
    wrong: list[str] = []
    for kind, options in (*OPTIMIZERS, (None, {})):
        torch.manual_seed(1)
        plain = nn.Linear(5, 7)
        model = zgraph.shard(copy.deepcopy(plain), zero_stage=stage)
        found, truth = ([*written(one, kind and kind(one.parameters(), **options))] for one in (model, plain))
        whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in found)
        if not all(torch.allclose(one, other, atol=1e-6) for one, other in zip(whole, truth, strict=True)):
            wrong.append(f"{kind} {options}")
    return wrong


def written_to_a_dtensor() -> bool:
    """Optimizers load their state like this: the target has the source's layout, and belongs to no model."""
    weight = zgraph.shard(nn.Linear(5, 7)).weight.detach()
    target = distribute_tensor(torch.zeros(7, 5), weight.device_mesh, weight.placements)
    target.copy_(weight)
    return torch.equal(target.to_local(), weight.to_local()) and bool(target.to_local().any())


def test_sharded_tensors_are_copied_to_dtensors(ranks: Ranks) -> None:
    assert all(ranks.run(written_to_a_dtensor))


@worlds(2, 3)
def test_optimizers_and_writes_act_as_on_the_plain_model(ranks: Ranks) -> None:
    for stage in (0, 3):
        assert ranks.run(written_alike, stage) == [[]] * ranks.world
