"""A language model and its batches, trained whole by plain lines, and with its sequences shared by ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.whole_tensors import whole

VOCABULARY, WIDTH, LENGTH, BATCH = 50, 16, 16, 2
LR, STEPS = 0.5, 2


class Block(nn.Module):
    def __init__(self, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.features = heads, key_heads, WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH + 2 * key_heads * self.features)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        keys = self.key_heads * self.features
        projected = self.project(self.norm(x)).split([width, keys, keys], -1)
        query, key, value = (one.unflatten(2, (-1, self.features)).transpose(1, 2) for one in projected)
        seen = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.key_heads != self.heads
        )
        return x + self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Language(nn.Module):
    """A model as users write it: positions by `arange`, the loss in forward if there are targets."""

    def __init__(self, heads: int = 4, key_heads: int = 4, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed, self.reduction = is_checkpointed, "mean"
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.block, self.head = Block(heads, key_heads), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.embed(x) + self.positions(torch.arange(x.shape[1]))
        h = checkpoint(self.block, h, mask, use_reentrant=False) if self.is_checkpointed else self.block(h, mask)
        scores = self.head(h)
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction=self.reduction)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training loop.

    Attributes:
        stage: ZeRO stage.
        run: "eager", "compile" or "step".
        heads, key_heads: number of heads of queries, and of keys. If the axis divides those of queries, and keys are
            not much fewer, tokens are exchanged for heads. Else keys pass by, or are gathered if there is a mask.
        dtype: dtype of parameters; autocast: dtype of autocast, or None.
        micro_batches: number of forwards for each step, all but the last under `no_sync`, or within one step.
        is_masked: whether sequences are packed documents, by a mask.
        is_outside: whether the loss is computed outside the model.
    """

    stage: int = 3
    run: str = "compile"
    lowering: str = "fx"
    heads: int = 4
    key_heads: int = 4
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    is_clipped: bool = False
    is_checkpointed: bool = False
    is_masked: bool = False
    is_outside: bool = False
    compression: Any = None


def batch(number: int, *, is_even: bool) -> dict[str, Tensor]:
    """Whole sequences and their targets; the next token's, so that the last token has none unless `is_even`."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if not is_even:
        targets[0, 3:8] = targets[:, -1] = -100
    return {"x": tokens[:, :-1], "targets": targets}


def documents() -> Tensor:
    """The mask of three documents of 5, 5 and 6 tokens: [1, 1, LENGTH, LENGTH]."""
    of_token = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 5, 6]))
    return ((of_token[:, None] == of_token) & torch.ones(LENGTH, LENGTH).tril().bool())[None, None]


def mesh_of(ranks: int, context: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks // context, context), mesh_dim_names=("dp", "cp"))


def loss_of(model: Callable[..., Tensor], given: dict[str, Tensor], case: Case) -> Tensor:
    if not case.is_outside:
        return model(**given)
    scores = model(**{name: one for name, one in given.items() if name != "targets"})
    return F.cross_entropy(scores.flatten(0, 1), given["targets"].flatten())


def plain(case: Case, copies: int) -> list[Tensor]:
    """Parameters after training the whole model on the batches of all `copies`."""
    model = started(case)
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for given in [one for place in range(copies) for one in batches(case, step, place)]:
            with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
                (loss_of(model, given, case) / (copies * case.micro_batches)).backward()
        if case.is_clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
    return [one.detach() for one in model.parameters()]


def started(case: Case) -> Language:
    torch.manual_seed(0)
    return Language(case.heads, case.key_heads, is_checkpointed=case.is_checkpointed).to(case.dtype)


def batches(case: Case, step: int, copy: int) -> list[dict[str, Tensor]]:
    numbers = range(step * case.micro_batches, (step + 1) * case.micro_batches)
    found = [batch(10 * number + copy, is_even=case.is_outside) for number in numbers]
    return [one | ({"mask": documents()} if case.is_masked else {}) for one in found]


def shared(case: Case, mesh: DeviceMesh, again: Callable[[nn.Module, Any], None] | None = None) -> list[Tensor]:
    """The same after training on `mesh`, whose axis cp shares sequences, and whose axis dp has a copy for each rank.

    Args:
        again: called with the model and the optimizer between steps.
    """
    model = started(case)
    zgraph.shard(model, mesh, context="cp", zero_stage=case.stage)
    opt = torch.optim.SGD(model.parameters(), lr=LR)
    options: dict[str, Any] = {"lowering": case.lowering}
    if case.compression is not None:
        default = zgraph.passes.presets.default(compression=case.compression.method)
        passes = [case.compression if isinstance(one, zgraph.passes.CompressGradients) else one for one in default]
        options["passes"] = zgraph.PassList(passes)
    run = torch.compile(model, backend="zgraph", options=options) if case.run == "compile" else model

    def step(given: list[dict[str, Tensor]]) -> None:
        for place, one in enumerate(given):
            is_last = place == len(given) - 1 or case.run == "step"
            with contextlib.nullcontext() if is_last else zgraph.no_sync(model):
                with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
                    loss = loss_of(run, one, case)
                (loss / case.micro_batches).backward()
        if case.is_clipped:
            zgraph.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()

    taken = zgraph.training_step(model, opt, options=options)(step) if case.run == "step" else step
    for number in range(STEPS):
        given = batches(case, number, mesh["dp"].get_local_rank())
        taken([zgraph.context_batch(model, one) for one in given])
        if again is not None:
            again(model, opt)
    return [whole(one.detach()) for one in model.parameters()]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its parameter."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other.double()).abs().max() / other.abs().max()) for one, other in pairs)
