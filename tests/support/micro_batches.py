"""Loops of several micro-batches: captured and interleaved layer by layer, beside lines that sum, then reduce."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.memory import gloo_buffers
from tests.support.memory.allocations import Count, counted, steady_rise
from tests.support.models import VOCABULARY, Block
from tests.support.whole_tensors import whole

P = zgraph.passes
STEPS = 2
NOTHING: Mapping[str, Any] = {}


class Stack(nn.Module):
    """A GPT whose head is not tied to its embeddings."""

    checkpointed = False

    def __init__(self, layers: int = 2, width: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Wide(Stack):
    """Large enough for its tensors to be most of what is allocated."""

    def __init__(self) -> None:
        super().__init__(layers=3, width=128)


class Checkpointed(Stack):
    checkpointed = True


class Dropping(Stack):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)


class Normed(nn.Module):
    """Statistics of batches are buffers, which every micro-batch updates."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(10) for _ in range(3))
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(torch.tanh(layer(x)).flatten(0, 1)).view_as(x)
        return self.head(x)


class Recurrent(nn.Module):
    """A cell that overwrites its gates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.cell = nn.GRUCell(8, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embed(tokens[:, 0])
        states: list[Tensor] = []
        for place in range(3):
            state = self.cell(self.embed(tokens[:, place]), state)
            states.append(torch.tanh(self.middle(state)))
        return self.head(torch.stack(states, 1))


class Skips(nn.Module):
    """A U-Net in small: later layers also read what earlier ones have made, of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.down = nn.ModuleList(nn.Linear(16 >> n, 8 >> n) for n in range(3))
        self.up = nn.ModuleList(nn.Linear(2 << n, 4 << n) for n in range(3))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embed(tokens), list[Tensor]()
        for layer in self.down:
            kept.append(x)
            x = torch.tanh(layer(x))
        for layer in self.up:
            x = torch.tanh(layer(x)) + kept.pop()
        return self.head(x)


def tokens(step: int, number: int) -> Tensor:
    """[2, 7] tokens of a micro-batch, of this rank."""
    seed = 1000 * step + 10 * number + dist.get_rank()
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loop.

    Attributes:
        loop: its lines.
        build: makes the model, which maps tokens to logits.
        stage: ZeRO stage of the interleaved model.
        k: micro-batches in a step.
        no_sync: whether all but the last of them run under `zgraph.no_sync`.
        replicas: whether two of four ranks hold replicas of the others' shards.
        shard: more options of `zgraph.shard`.
        preset: more options of the preset.
        autocast: whether forwards run under autocast.
        target: target of passes that plan by costs; None: passes go by rules.
        recompute: as for `InterleaveMicroBatches`.
        inductor: whether Inductor compiles the interleaved step.
        sgd: whether SGD steps, whose updates are as close as the gradients are.
    """

    loop: type[Loop] = field(default_factory=lambda: Loop)
    build: Callable[[], nn.Module] = Stack
    stage: int = 3
    k: int = 3
    no_sync: bool = True
    replicas: bool = False
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    autocast: bool = False
    target: zgraph.Target | None = None
    recompute: bool | None = None
    inductor: bool = False
    sgd: bool = False


class Loop:
    """A model, its optimizer and the lines of a step.

    Args:
        case: the case.
        stage: ZeRO stage of the model.
        no_sync: as for the case.
    """

    def __init__(self, case: Case, stage: int, *, no_sync: bool) -> None:
        torch.manual_seed(0)
        self.case, self.no_sync = case, no_sync
        axes = ("replicate", "shard")
        mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)} if case.replicas else NOTHING
        self.model: Any = zgraph.shard(case.build(), zero_stage=stage, **mesh, **case.shard)
        if case.sgd:
            self.opt: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        else:
            self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def step(self, batches: list[Tensor]) -> Tensor:
        total = self.accumulate(batches)
        self.opt.step()
        self.opt.zero_grad()
        return total

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches, 1):
            opens = self.no_sync and number < len(batches)
            with zgraph.no_sync(self.model) if opens else contextlib.nullcontext():
                total = total + self.run(number, batch) / len(batches)
        return total

    def run(self, number: int, batch: Tensor) -> Tensor:
        """Forward and backward of one micro-batch."""
        loss = self.loss(self.logits(batch), batch)
        (loss / self.case.k).backward()
        return loss.detach()

    def logits(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.case.autocast else contextlib.nullcontext():
            return self.model(batch).float()

    def loss(self, logits: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1 : logits.shape[1]].flatten())

    def left(self) -> dict[str, Tensor]:
        """Weights, buffers and state after a step."""
        found = {name: whole(value) for name, value in self.model.state_dict().items()}
        for number, state in enumerate(self.opt.state.values()):
            found |= {f"{number}.{key}": whole(value) for key, value in state.items()}
        return found


class Clipped(Loop):
    """Gradients are clipped, and the norm is returned."""

    def step(self, batches: list[Tensor]) -> Tensor:
        self.accumulate(batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.opt.step()
        self.opt.zero_grad()
        return norm


class Scaled(Loop):
    """With a loss scale."""

    def __init__(self, case: Case, stage: int, *, no_sync: bool) -> None:
        super().__init__(case, stage, no_sync=no_sync)
        self.scaler = zgraph.GradScaler("cpu", init_scale=64.0)

    def run(self, number: int, batch: Tensor) -> Tensor:
        loss = self.loss(self.logits(batch), batch)
        self.scaler.scale(loss / self.case.k).backward()
        return loss.detach()

    def step(self, batches: list[Tensor]) -> Tensor:
        total = self.accumulate(batches)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()
        return total


class TwoLosses(Loop):
    """Two backwards for each forward."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        logits = self.logits(batch)
        loss, spread = self.loss(logits, batch), logits.square().mean()
        loss.backward(retain_graph=True)
        (0.1 * spread).backward()
        return loss.detach()


class Preferences(Loop):
    """Two forwards for each backward, of two halves of the batch that are compared."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        better, worse = (self.loss(self.logits(half), half) for half in (batch, batch.flip(1)))
        loss = F.softplus(better - worse)
        (loss / self.case.k).backward()
        return loss.detach()


class Noisy(Loop):
    """Tokens are drawn anew at random places, before each forward."""

    def logits(self, batch: Tensor) -> Tensor:
        return self.model(torch.where(torch.rand(batch.shape) < 0.2, torch.zeros_like(batch), batch)).float()


class Several(nn.Module):
    """A trunk, and a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Stack()
        self.heads = nn.ModuleList(nn.Linear(VOCABULARY, VOCABULARY) for _ in range(2))

    def forward(self, given: tuple[Tensor, int]) -> Tensor:
        return self.heads[given[1]](self.trunk(given[0]))


class Tasks(Loop):
    """Micro-batches of different tasks."""

    def run(self, number: int, batch: Tensor) -> Tensor:
        loss = self.loss(self.model((batch, number % 2)), batch)
        (loss / self.case.k).backward()
        return loss.detach()


class Watched(Loop):
    """The norm of the gradients so far is returned for each micro-batch."""

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        norms: list[Tensor] = []
        for batch in batches:
            (self.loss(self.logits(batch), batch) / self.case.k).backward()
            norms.append(torch.stack([p.grad.square().sum() for p in self.model.parameters()]).sum())
        return torch.stack(norms)


class Stepping(Loop):
    """Two updates in a step, each after two micro-batches."""

    def step(self, batches: list[Tensor]) -> Tensor:
        losses = [super().step(batches[:2]), super().step(batches[2:])]
        return torch.stack(losses)


class EightBit(Loop):
    """With state of 8 bits."""

    def __init__(self, case: Case, stage: int, *, no_sync: bool) -> None:
        super().__init__(case, stage, no_sync=no_sync)
        self.opt = zgraph.AdamW8bit(self.model.parameters(), lr=1e-2)


class Averaged(Loop):
    """With an average of the weights."""

    def __init__(self, case: Case, stage: int, *, no_sync: bool) -> None:
        super().__init__(case, stage, no_sync=no_sync)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, batches: list[Tensor]) -> Tensor:
        total = super().step(batches)
        self.average.update_parameters(self.model)
        return total

    def left(self) -> dict[str, Tensor]:
        averages = {f"average of {name}": whole(value) for name, value in self.average.named_parameters()}
        return super().left() | averages


def compiled(loop: Loop, *, interleaves: bool = True, report: zgraph.Report | None = None) -> Any:
    """The loop's step, captured."""
    case = loop.case
    preset = P.presets.default if case.target is None else P.presets.planned
    passes = preset(bucket_bytes=4096, interleave_micro_batches=False, **case.preset)
    if interleaves:
        passes.insert(1, P.InterleaveMicroBatches(recompute=case.recompute))
        every = P.OffloadActivations(least_bytes=1)
        passes = [every if isinstance(one, P.OffloadActivations) else one for one in passes]
    options: dict[str, Any] = {
        "lowering": "inductor" if case.inductor else "fx",
        "passes": zgraph.PassList(passes, target=case.target, replay_all=dist.get_rank() == 0),
    }
    if report is not None:
        options["report"] = report
    return zgraph.training_step(loop.model, loop.opt, options=options)(loop.step)


def differences(case: Case, stage: int = 1, no_sync: bool = True) -> tuple[dict[str, float], int]:
    """Compare an interleaved loop with its lines; called on all ranks.

    The lines run eagerly, or are captured if gradients are compressed, which eager lines do not do.

    Args:
        case: the interleaved loop.
        stage: ZeRO stage of the model of the lines. At stages 0 and 1 gradients are summed and then reduced.
        no_sync: whether their micro-batches but the last run under `zgraph.no_sync`.

    Returns:
        The largest difference of each value that is not equal, and the number of windows that were interleaved.
    """
    ours = case.loop(case, case.stage, no_sync=case.no_sync)
    plain = case.loop(case, stage, no_sync=no_sync)
    report = zgraph.Report()
    step = compiled(ours, report=report)
    expect = compiled(plain, interleaves=False) if case.preset else plain.step
    found: dict[str, float] = {}
    for number in range(STEPS):
        batches = [tokens(number, micro) for micro in range(case.k)]
        results: list[dict[str, Tensor]] = []
        for run, loop in ((step, ours), (expect, plain)):
            torch.manual_seed(number)
            results.append({"result": run(batches), **loop.left()})
        assert results[0].keys() == results[1].keys()
        for name, value in results[0].items():
            other = results[1][name]
            if not torch.equal(value, other):
                found[f"{name}, step {number}"] = float((value.float() - other.float()).abs().max())
    lines = [text for graph in report.graphs[-1:] for text in graph.decisions]
    return found, sum("layers together" in text for text in lines)


def peaks(case: Case) -> tuple[int, int]:
    """Predicted and measured peak of an interleaved step, in bytes above what the rank holds; called on all ranks."""
    loop, report = case.loop(case, case.stage, no_sync=case.no_sync), zgraph.Report()
    step = compiled(loop, report=report)
    batches = [tokens(0, micro) for micro in range(case.k)]
    step(batches)
    counts: list[Count] = []
    for _ in range(3):
        gloo_buffers.flush()
        with counted() as count:
            step(batches)
        counts.append(count)
    peak = report.graphs[-1].peak
    assert peak is not None
    return peak.bytes, steady_rise(counts)
