"""Captured loops of users, each beside its plain lines on a second model: right to the last bit, or refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.whole_tensors import whole

STEPS = 4


class Loop:
    """Plain lines; subclasses change a part of them, and what happens between steps."""

    steps = STEPS

    def __init__(self, stage: int, **options: Any) -> None:
        torch.manual_seed(3)
        self.model: Any = zgraph.shard(self.build(), zero_stage=stage, **options)
        self.opt: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05, eps=1e-3)
        self.prepare()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def prepare(self) -> None:
        """Make what else the loop has."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.opt]

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def step(self, x: Tensor) -> Any:
        loss = self.loss(x)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def advance(self, number: int) -> None:
        """What happens between steps."""

    def left(self) -> dict[str, Any]:
        """What else is there after a step."""
        return {}


def batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def verdict(kind: type[Loop], stage: int, check: bool | int = False, **options: Any) -> str:
    """ "right", what differs, or the error."""
    captured, plain = kind(stage, **options), kind(stage, **options)
    step = zgraph.training_step(captured.model, captured.optimizers(), options={"lowering": "fx", "check": check})(
        captured.step
    )
    for number in range(kind.steps):
        torch.manual_seed(number)
        try:
            found = step(batch(number))
        except (zgraph.ZgraphError, ValueError) as error:
            return str(error)
        torch.manual_seed(number)
        if difference := _difference(captured, plain, found, plain.step(batch(number))):
            return f"step {number}: {difference}"
        for one in (captured, plain):
            one.advance(number)
    return "right"


def _difference(captured: Loop, plain: Loop, found: Any, expected: Any) -> str:
    pairs = {"result": (found, expected)}
    ours, theirs = captured.left(), plain.left()
    pairs |= {name: (ours.get(name), theirs[name]) for name in theirs}
    for (name, one), other in zip(captured.model.named_parameters(), plain.model.parameters(), strict=True):
        pairs[name] = one, other
        pairs[f"gradient of {name}"] = one.grad, other.grad
    for name, (one, other) in pairs.items():
        if not isinstance(other, Tensor):
            if one != other:
                return f"{name} is {one}, not {other}"
        elif not isinstance(one, Tensor) or not torch.equal(whole(one.detach()), whole(other.detach())):
            return name
    return ""


def verdicts(kinds: list[type[Loop]], stages: list[int], check: bool | int = False) -> dict[str, str]:
    """By name and stage."""
    return {f"{kind.__name__}, stage {stage}": verdict(kind, stage, check) for kind in kinds for stage in stages}
