"""Training with Muon on several ranks, compared with `torch.optim.Muon` on whole matrices with the same gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.whole_tensors import whole

P = zgraph.passes
LR = 0.02
STEPS = 3
NOTHING: Mapping[str, Any] = {}


class Layers(nn.Module):
    """Tall, wide and square matrices, with more and with fewer rows than ranks, and what AdamW steps."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(24, 33), (33, 17), (17, 33), (33, 33)]
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=shape != (17, 33)) for shape in shapes)
        self.side = nn.Linear(33, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(2 * layer(x))
        return torch.cat([x, self.side(x)], 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train.

    Attributes:
        shard: options of zgraph.shard besides the stage.
        replicas: replicas of shards (hybrid sharding).
        k, waits: micro-batches, and whether all but the last are under no_sync.
        preset: options of `presets.default`.
        target: plan by costs, on this target; None: by rules.
        captured: as a whole step; else plain lines with `zgraph.step_on_shards`.
        muon: options of Muon.
        clips: clip gradients.
        ignores: each rank keeps its own values of a layer.
    """

    stage: int = 3
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replicas: int = 1
    k: int = 1
    waits: bool = False
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target: zgraph.Target | None = None
    bucket_bytes: int | None = None
    captured: bool = True
    lowering: str = "fx"
    autocast: bool = False
    dtype: torch.dtype = torch.float32
    muon: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clips: bool = False
    ignores: bool = False


class Training:
    """A model, its optimizers, and its step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, Layers().to(case.dtype)
        self.plain = {name: one.detach().clone() for name, one in self.model.named_parameters() if one.ndim == 2}
        mesh = None
        if case.replicas > 1:
            shape = (case.replicas, dist.get_world_size() // case.replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "dp"))
        ignored = [self.model.layers[1]] if case.ignores else []
        zgraph.shard(self.model, mesh, zero_stage=case.stage, ignored=ignored, **case.shard)
        self.matrices = {name: one for name, one in self.model.named_parameters() if one.ndim == 2}
        others = [one for one in self.model.parameters() if one.ndim != 2]
        first, *rest = self.matrices.values()
        groups = [{"params": [first]}, {"params": rest, "weight_decay": 0.01}]
        self.muon = optim.Muon(groups, lr=LR, **case.muon)
        self.adamw = optim.AdamW(others, lr=LR)
        zgraph.step_on_shards(self.muon)
        self.step: Any = self.plain_step
        if case.captured:
            options: dict[str, Any] = {"lowering": case.lowering, "passes": self.passes()}
            self.step = zgraph.training_step(self.model, [self.muon, self.adamw], options=options)(self.plain_step)

    def passes(self) -> zgraph.PassList:
        case = self.case
        preset = P.presets.default if case.target is None else P.presets.planned
        found = preset(**case.preset)
        if case.bucket_bytes is not None:
            own = P.OrthogonalizeOnOwners(bucket_bytes=case.bucket_bytes)
            found = [own if isinstance(one, P.OrthogonalizeOnOwners) else one for one in found]
        return zgraph.PassList(found, target=case.target)

    def plain_step(self, x: Tensor) -> Tensor:
        case, total = self.case, torch.zeros(())
        for number, rows in enumerate(x.chunk(case.k)):
            waits = case.waits and number < case.k - 1
            with zgraph.no_sync(self.model) if waits else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    # Random targets give gradients of full rank; in others Newton-Schulz enlarges rounding errors.
                    loss = (self.model(rows[:, :24]).float() * rows[:, 24:].float()).mean() / case.k
                loss.backward()
            total = total + loss.detach()
        if case.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        self.muon.step()
        self.adamw.step()
        return total

    def train(self, number: int) -> dict[str, Tensor]:
        """Take a step, and return the gradients of the matrices."""
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        self.model.zero_grad()
        self.step(torch.randn(64, 24 + 35, generator=generator).to(self.case.dtype))
        return {name: whole(one.grad) for name, one in self.matrices.items() if one.grad is not None}

    def values(self) -> dict[str, Tensor]:
        return {name: whole(one).detach().clone() for name, one in self.matrices.items()}


class Twin:
    """`torch.optim.Muon` on whole matrices."""

    def __init__(self, training: Training) -> None:
        self.matrices = {name: nn.Parameter(value.clone()) for name, value in training.plain.items()}
        first, *rest = self.matrices.values()
        groups = [{"params": [first]}, {"params": rest, "weight_decay": 0.01}]
        self.muon = optim.Muon(groups, lr=LR, **training.case.muon)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, one in self.matrices.items():
            one.grad = gradients[name].clone()
        self.muon.step()


def differences(case: Case) -> dict[str, float]:
    """The largest difference of each matrix and momentum from the twin's, for those that are not equal bit for bit."""
    training = Training(case)
    twin = Twin(training)
    for number in range(STEPS):
        twin.step(training.train(number))
    found: dict[str, float] = {}
    for name, one in training.matrices.items():
        plain = twin.matrices[name]
        momenta = training.muon.state[one]["momentum_buffer"], twin.muon.state[plain]["momentum_buffer"]
        for what, left, right in ((name, one, plain), (f"momentum of {name}", *momenta)):
            if not torch.equal(whole(left), right):
                found[what] = (whole(left) - right).abs().max().item()
    return found


def ulps(case: Case) -> float:
    """How far weights are from the twin's after a step, in units of their last place at 1."""
    training = Training(case)
    twin = Twin(training)
    twin.step(training.train(0))
    found = training.values()
    most = max(
        ((found[name] - one).abs() / one.abs().clamp(min=0.01)).max().item() for name, one in twin.matrices.items()
    )
    return most / torch.finfo(case.dtype).eps


def relative(case: Case, other: Case | None = None) -> float:
    """The largest norm of a first update's difference from the twin's or `other`'s, as a share of the update's norm."""
    training = Training(case)
    gradients = training.train(0)
    if other is None:
        twin = Twin(training)
        twin.step(gradients)
        expected: Mapping[str, Tensor] = twin.matrices
    else:
        another = Training(other)
        another.train(0)
        expected = another.values()
    found, plain = training.values(), training.plain
    return max(((found[name] - expected[name]).norm() / (expected[name] - plain[name]).norm()).item() for name in found)


def graph_of(case: Case, keep: Sequence[zgraph.GraphPass]) -> None:
    """Capture a step, with more passes at the end of the list."""
    training = Training(case)
    options: dict[str, Any] = {"lowering": "fx", "passes": [*training.passes().passes, *keep]}
    training.step = zgraph.training_step(training.model, [training.muon, training.adamw], options=options)(
        training.plain_step
    )
    training.train(0)
