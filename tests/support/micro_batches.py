"""Loops of several micro-batches, captured and interleaved, beside plain lines that reduce the sum of their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph
from tests.support.models import VOCABULARY, Block
from tests.support.whole_tensors import whole

P = zgraph.passes
STEPS = 3


class Stack(nn.Module):
    """A GPT whose head is not tied to its embeddings."""

    def __init__(self, layers: int = 3, width: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(step: int, number: int, length: int = 7) -> Tensor:
    seed = 1000 * step + 10 * number + dist.get_rank()
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """One loop.

    Attributes:
        stage: ZeRO stage of the captured model.
        k: micro-batches in a step.
        no_sync: whether all but the last run under `zgraph.no_sync`.
        shard: options of `zgraph.shard`.
        preset: options of the preset.
        build: makes the model, which maps tokens to logits.
        clip: whether gradients are clipped.
        autocast: whether forwards run under autocast.
        planned: whether the passes plan by costs, for the hardware of this target.
        recompute: as for `InterleaveMicroBatches`.
    """

    stage: int = 3
    k: int = 3
    no_sync: bool = True
    shard: Mapping[str, Any] = None  # type: ignore[assignment]
    preset: Mapping[str, Any] = None  # type: ignore[assignment]
    build: Callable[[], nn.Module] = Stack
    clip: bool = False
    autocast: bool = False
    planned: zgraph.Target | None = None
    recompute: bool | None = None
    lowering: str = "fx"


class Loop:
    """A model, its optimizer and the lines of a step."""

    def __init__(self, case: Accumulated, stage: int, *, ours: bool = False) -> None:
        torch.manual_seed(0)
        self.ours = ours
        self.case = case
        self.model: Any = zgraph.shard(case.build(), zero_stage=stage, **(case.shard or {}))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def step(self, batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            open_ = (self.case.no_sync or not self.ours) and number < len(batches) - 1
            with zgraph.no_sync(self.model) if open_ else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16) if self.case.autocast else contextlib.nullcontext():
                    logits = self.model(batch)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()) / len(batches)
                loss.backward()
            total = total + loss.detach()
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.opt.step()
        self.opt.zero_grad()
        return total

    def left(self) -> dict[str, Tensor]:
        found = {name: whole(value) for name, value in self.model.state_dict().items()}
        for number, state in enumerate(self.opt.state.values()):
            found |= {f"{number}.{key}": whole(value) for key, value in state.items()}
        return found


def captured(loop: Loop) -> Any:
    """The loop's step, captured with interleaved micro-batches."""
    case = loop.case
    if case.planned is None:
        passes = P.presets.default(bucket_bytes=4096, **(case.preset or {}))
    else:
        passes = P.presets.planned(bucket_bytes=4096, **(case.preset or {}))
    passes.insert(1, P.InterleaveMicroBatches(recompute=case.recompute))
    options = {
        "lowering": case.lowering,
        "passes": zgraph.PassList(passes, target=case.planned, replay_all=dist.get_rank() == 0),
    }
    return zgraph.training_step(loop.model, loop.opt, options=options)(loop.step)


def difference(case: Accumulated) -> dict[str, float]:
    """Largest differences between the interleaved loop and plain lines at stage 1 under no_sync, where there are any."""
    ours, plain = Loop(case, case.stage, ours=True), Loop(case, min(case.stage, 1))
    step = captured(ours)
    found: dict[str, float] = {}
    for number in range(STEPS):
        batches = [tokens(number, micro) for micro in range(case.k)]
        losses = step(batches), plain.step(batches)
        left = {"loss": losses[0], **ours.left()}, {"loss": losses[1], **plain.left()}
        assert left[0].keys() == left[1].keys()
        for name, value in left[0].items():
            if not torch.equal(value, left[1][name]):
                found[f"{number} {name}"] = float((value.float() - left[1][name].float()).abs().max())
    return found
