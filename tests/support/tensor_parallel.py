"""Models that torch's tensor parallelism splits, and the judge of what becomes of them: the whole model on one rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.compiled import with_fx
from tests.support.whole_tensors import whole

VOCABULARY, WIDTH, HEADS, HIDDEN = 24, 16, 4, 20


class Mlp(nn.Module):
    """Two layers, split by columns and by rows; a plain one that every rank computes; and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 5)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(torch.tanh(self.first(x))))) * self.gain


class Attention(nn.Module):
    """Causal attention without biases, as Llama's; counts its heads by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and head; the backward of the first `repeats` blocks runs their forward again."""

    def __init__(self, layers: int = 1, tied: bool = False, repeats: int = 0) -> None:
        super().__init__()
        self.repeats = repeats
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number < self.repeats else block(x)
        return self.head(self.norm(x))


def split_mlp(model: nn.Module, tp: DeviceMesh) -> None:
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split_llama(model: nn.Module, tp: DeviceMesh) -> None:
    """Attention and MLP of each block; norms, embedding and head are whole on every rank."""
    assert isinstance(model, Llama)
    columns = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
    rows = ("attention.o", "feed_forward.down")
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(block, tp, plan)


def split_sequence(model: nn.Module, tp: DeviceMesh) -> None:
    """Activations between attention and MLP are split along the sequence; vocabulary of embedding and head, too."""
    assert isinstance(model, Llama)
    tied = model.head.weight is model.embed.weight
    by_sequence: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, by_sequence)
    if tied:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        plan: dict[str, Any] = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(block, tp, plan)


def split_loss(model: nn.Module, tp: DeviceMesh) -> None:
    """The head returns logits that are split along the vocabulary, for `loss_parallel`."""
    split_llama(model, tp)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, tp, {"head": head})


def features(index: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * index + replica)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)


def tokens(index: int, replica: int) -> tuple[Tensor, Tensor]:
    found = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * index + replica))
    return found[:, :-1], found[:, 1:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())
    return (output.float() - target).square().mean()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how tensor parallelism splits it, and how it is trained.

    Attributes:
        build: makes the plain model.
        split: applies tensor parallelism.
        batch: (index, data-parallel rank) -> inputs, targets.
        options: for zgraph.shard.
        compile: "eager", or the lowering.
        budget_bytes: of the target, by whose costs passes then go; None: the default passes. The costs are those of a
            preset, so that the budget binds on every machine.
        micro_batches: per step; all but the last under no_sync.
        autocast: dtype to autocast to.
        max_norm: to which gradients are clipped by `clip`, whose norm must be the whole model's; None: no clipping.
        replicas: of each shard (hybrid sharding); divides the number of data-parallel ranks.
        rounding: how far a gradient may be from that of the whole model, relative to its largest entry.
    """

    build: Callable[[], nn.Module] = Llama
    split: Callable[[nn.Module, DeviceMesh], None] = split_llama
    batch: Callable[[int, int], tuple[Tensor, Tensor]] = tokens
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    compile: str = "fx"
    budget_bytes: int | None = None
    micro_batches: int = 1
    autocast: torch.dtype | None = None
    max_norm: float | None = None
    clip: Callable[..., Tensor] = zgraph.clip_grad_norm_
    replicas: int = 1
    rounding: float = 2e-6
    steps: int = 3


def mesh_of(tp: int = 2, replicas: int = 1) -> DeviceMesh:
    """[world / tp, tp] ranks; or [replicas, world / tp / replicas, tp]."""
    dp = dist.get_world_size() // tp
    if replicas == 1:
        return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (replicas, dp // replicas, tp), mesh_dim_names=("replicate", "dp", "tp"))


def built(case: Case, mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """The model as it is trained, and a plain copy of it."""
    torch.manual_seed(5)
    model = case.build()
    plain = copy.deepcopy(model)
    case.split(model, mesh["tp"])
    own = mesh["replicate", "dp"] if case.replicas > 1 else mesh["dp"]
    return zgraph.shard(model, own, **case.options), plain


def compiled(case: Case, model: nn.Module, report: zgraph.Report | None = None) -> Callable[..., Tensor]:
    if case.compile == "eager":
        return model
    if case.compile == "fx":
        passes, target = zgraph.passes.presets.default(), None
        if case.budget_bytes is not None:
            passes = zgraph.passes.presets.planned()
            target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"), budget_bytes=case.budget_bytes)
        pipeline = zgraph.PassList(passes, target=target, replay_all=dist.get_rank() == 0)
        return with_fx(model, passes=pipeline, report=report)
    return torch.compile(model, backend="zgraph")


def compare(case: Case, report: zgraph.Report | None = None) -> None:
    """Train a model on dp x tp ranks and, beside it, the plain model on the batches of all dp ranks.

    Args:
        case: what is trained.
        report: of the compile, where it is one with the fx lowering.
    """
    mesh = mesh_of(replicas=case.replicas)
    model, plain = built(case, mesh)
    called = compiled(case, model, report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            index = step * case.micro_batches + micro
            train_micro(case, model, called, index, waits=micro < case.micro_batches - 1)
            plain_gradients(case, plain, index, mesh.size() // mesh["tp"].size())
        compare_gradients(case, model, plain, step)
        if case.max_norm is not None:
            found = case.clip(model.parameters(), case.max_norm)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.max_norm)
            torch.testing.assert_close(whole(found), expected, rtol=1e-5, atol=0)
        for one in (optimizer, of_plain):
            one.step()
            one.zero_grad()
        assert_replicas_equal(model)
        follow(model, plain)


def train_micro(case: Case, model: nn.Module, called: Callable[..., Tensor], index: int, *, waits: bool) -> None:
    inputs, target = case.batch(index, dp_rank(model))
    casts = torch.autocast("cpu", dtype=case.autocast) if case.autocast else contextlib.nullcontext()
    with zgraph.no_sync(model) if waits else contextlib.nullcontext(), casts:
        loss = loss_of(called(inputs), target)
    loss.backward()


def plain_gradients(case: Case, plain: nn.Module, index: int, replicas: int) -> None:
    casts = torch.autocast("cpu", dtype=case.autocast) if case.autocast else contextlib.nullcontext()
    for replica in range(replicas):
        inputs, target = case.batch(index, replica)
        with casts:
            loss = loss_of(plain(inputs), target)
        (loss / replicas).backward()


def compare_gradients(case: Case, model: nn.Module, plain: nn.Module, step: int) -> float:
    worst = 0.0
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad, wanted = whole(parameter.grad), expected[name].grad
        assert wanted is not None and grad.shape == wanted.shape, name
        off = ((grad - wanted).abs().max() / wanted.abs().max()).item()
        assert off <= case.rounding, f"gradient of {name} in step {step} is off by {off:.3g}"
        worst = max(worst, off)
    return worst


def follow(model: nn.Module, plain: nn.Module) -> None:
    """Compare parameters after a step, and let the plain model go on from the same values."""
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        found = whole(parameter.detach())
        torch.testing.assert_close(found, expected[name].detach(), rtol=0, atol=2e-2, msg=name)
        with torch.no_grad():
            expected[name].copy_(found)


def assert_replicas_equal(model: nn.Module) -> None:
    """What tensor parallelism does not split has the same bits on all of its ranks."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if parameter.placements[-1].is_replicate():
            local = parameter.to_local().detach().contiguous()
            found = [torch.empty_like(local) for _ in range(parameter.device_mesh.size(-1))]
            dist.all_gather(found, local, group=parameter.device_mesh.get_group(-1))
            assert all(torch.equal(one, local) for one in found), name


def dp_rank(model: nn.Module) -> int:
    """This rank's place on all axes but the last."""
    parameter = next(model.parameters())
    assert isinstance(parameter, DTensor)
    return dist.get_rank() // parameter.device_mesh.size(-1)
