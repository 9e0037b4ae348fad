"""Captured steps in which several features meet, for twenty steps, compared with the plain loop bit for bit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import zgraph
from tests.support.ranks import fresh_ranks
from tests.support.step_scripts import LR, Groups, Script, Setting, compare

STEPS = 20
SKIPPED = 4  # with an inf in the gradients of one rank
# Of one parameter: signs of a bucket are drawn by how often its first parameter was reduced, and where some had no
# gradient, buckets that begin with another parameter draw others.
PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "loco": {"compression": zgraph.passes.LoCo(), "bucket_bytes": 1},
}
DECAY: dict[str, Any] = {"lr": LR, "weight_decay": 0.1}


class Lion(optim.Optimizer):
    """A user's own."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": LR, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = state["mean"].mul(group["beta"]).add(parameter.grad, alpha=1 - group["beta"]).sign()
                parameter.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])


def _on_shards(make: Callable[[Groups], optim.Optimizer]) -> Callable[[Groups], optim.Optimizer]:
    """For those that DTensor has no rules for, or rounds differently."""
    return lambda groups: zgraph.step_on_shards(make(groups))


OPTIMIZERS: dict[str, Callable[[Groups], optim.Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, **DECAY, momentum=0.9, foreach=False),
    "sgd_foreach": lambda groups: optim.SGD(groups, **DECAY, momentum=0.9, nesterov=True, foreach=True),
    # torch's kernel does not take the first momentum of some parameters beside later ones of others.
    "sgd_fused": _on_shards(lambda groups: optim.SGD(groups, **DECAY, fused=True)),
    "adam": lambda groups: optim.Adam(groups, **DECAY, amsgrad=True, foreach=False),
    "adamw_foreach": lambda groups: optim.AdamW(groups, **DECAY, foreach=True),
    "adamw_fused": lambda groups: optim.AdamW(groups, **DECAY, fused=True),
    "adamax": lambda groups: optim.Adamax(groups, **DECAY),
    "nadam": lambda groups: optim.NAdam(groups, **DECAY),
    "radam": lambda groups: optim.RAdam(groups, **DECAY),
    "adagrad": lambda groups: optim.Adagrad(groups, **DECAY, lr_decay=0.1),
    "adadelta": lambda groups: optim.Adadelta(groups, **DECAY),
    "rmsprop": lambda groups: optim.RMSprop(groups, **DECAY, momentum=0.9, centered=True),
    "rprop": _on_shards(lambda groups: optim.Rprop(groups, lr=LR)),
    "asgd": _on_shards(lambda groups: optim.ASGD(groups, **DECAY, foreach=False)),
    "muon": _on_shards(lambda groups: optim.Muon(groups, lr=LR)),  # with AdamW for what is not a matrix
    "own": Lion,
}


class Chain(nn.Module):
    """Layers of odd widths, of which two may share their weight, and a branch that need not be used."""

    def __init__(self, widths: tuple[int, ...], shape: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, (5, *widths), widths))
        self.left = nn.Linear(widths[-1], widths[-1], bias=False)
        self.right = nn.Linear(widths[-1], widths[-1])
        self.side = nn.Linear(widths[-1], 3)
        self.head = nn.Linear(widths[-1], 3)
        self.gain = nn.Parameter(torch.ones(()))
        if shape == "tied":
            self.right.weight = self.left.weight
        if shape == "frozen":
            self.layers[0].requires_grad_(False)
            self.left.requires_grad_(False)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x + torch.tanh(self.right(torch.tanh(self.left(x)))) * self.gain
        return self.head(x) + self.side(x) if side else self.head(x)


@dataclass(frozen=True)
class Gate:
    """One level of each feature."""

    optimizer: str
    stage: int
    ranks: int
    accumulation: str  # "1", "3", "window": three under no_sync
    clip: str
    shape: str
    unused: str
    schedule: str
    scaler: str
    compression: str
    weights: str
    widths: tuple[int, ...] = (7,)

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in LEVELS)

    @classmethod
    def of(cls, text: str) -> Gate:
        """The one that `str` wrote."""
        return cls(
            *(
                int(value) if name in ("stage", "ranks") else value
                for name, value in zip(LEVELS, text.split("-"), strict=True)
            )
        )


LEVELS: dict[str, list[Any]] = {
    "optimizer": list(OPTIMIZERS),
    "stage": [0, 1, 2, 3],
    "ranks": [2, 3],
    "accumulation": ["1", "3", "window"],
    "clip": ["none", "clipped"],
    "shape": ["plain", "tied", "frozen"],
    "unused": ["never", "sometimes"],
    "schedule": ["none", "cycle"],
    "scaler": ["none", "inf"],
    "compression": list(PRESETS),
    "weights": ["float32", "bfloat16"],
}
assert list(LEVELS) == [field.name for field in fields(Gate)][: len(LEVELS)]


@dataclass(frozen=True, kw_only=True)
class GateSetting(Setting):
    gate: Gate


class Trained(Script):
    """The lines of a loop with all of these features."""

    gate: Gate

    def build(self) -> nn.Module:
        assert isinstance(self.setting, GateSetting)
        self.gate = self.setting.gate
        return Chain(self.gate.widths, self.gate.shape).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.gate.weights)

    def prepare(self) -> None:
        gate, trained = self.gate, [one for one in self.model.parameters() if one.requires_grad]
        matrices = [one for one in trained if one.ndim == 2]
        self.given = [self.opt]
        if gate.optimizer == "muon":
            others = [one for one in trained if one.ndim != 2]
            self.opt = OPTIMIZERS["muon"]([{"params": matrices[:1]}, {"params": matrices[1:], "lr": LR / 2}])
            self.given = [self.opt, OPTIMIZERS["adamw_fused"]([{"params": others}])]
        self.scaler = zgraph.GradScaler("cpu", init_scale=256.0, growth_interval=6, enabled=gate.scaler == "inf")
        if gate.scaler == "inf" and gate.compression == "loco":
            zgraph.set_loss_scale(self.model, self.scaler)

    def optimizers(self) -> list[optim.Optimizer]:
        return self.given

    def arguments(self, number: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        x = torch.randn(6, 5, generator=generator)
        if self.gate.scaler == "inf" and number == SKIPPED and dist.get_rank() == 1:
            x[0, 0] = torch.inf
        return x.to(self.dtype), self.gate.unused == "never" or number % 3 != 0

    def step(self, x: Tensor, side: bool) -> Any:
        gate, found = self.gate, dict[str, Any](loss=torch.zeros(()))
        count = 1 if gate.accumulation == "1" else 3
        for number, rows in enumerate(x.chunk(count)):
            waits = gate.accumulation == "window" and number < count - 1
            with zgraph.no_sync(self.model) if waits else contextlib.nullcontext():
                loss = (self.called(rows, side) - rows[:, :3]).square().mean() / count
                self.scaler.scale(loss).backward()
            found["loss"] = found["loss"] + loss.detach()
        if gate.clip == "clipped":
            for optimizer in self.given:
                self.scaler.unscale_(optimizer)
            found["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.given:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.model.zero_grad()
        return found

    def advance(self, number: int) -> None:
        if self.gate.schedule == "cycle":
            for optimizer in self.given:
                for group in optimizer.param_groups:
                    group["lr"] *= 1.1 if number % 4 < 2 else 0.9

    def left(self) -> dict[str, Any]:
        return super().left() | {f"scaler {key}": value for key, value in self.scaler.state_dict().items()}


def train(gate: Gate, steps: int = STEPS) -> int:
    """Run a case both ways; the number of graphs that the captured one needed."""
    make = OPTIMIZERS[gate.optimizer if gate.optimizer != "muon" else "sgd"]
    setting = GateSetting(
        Trained, make, stage=gate.stage, steps=steps, preset=PRESETS[gate.compression], recompiles=16, gate=gate
    )
    return len(compare(setting))


if __name__ == "__main__":
    chosen = Gate.of(sys.argv[1])
    with fresh_ranks(chosen.ranks) as started:
        print(chosen, *started.run(train, chosen), sep="\n")
