"""Training steps in which several features meet, each compared with the replicated model."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests import models
from tests.ranks import fresh_ranks
from tests.replicated import Case, Replicated, assert_equal, batches, hybrid_mesh, loss_of, whole

P = zgraph.passes

STEPS = 2
SCALE = 256.0
# Its factor 2 is exact: eager dropout rounds the factor to the dtype of its input, a graph does not.
DROPOUT = 0.5
BUDGET_BYTES = 2**20
# Larger than a bucket of some parameters, smaller than one of all: several collectives, and islands between them.
BUCKET_BYTES = 8 * 1024
# A node of two ranks that compute and talk at the pace of a laptop; what matters is that every plan is made by costs.
HARDWARE = replace(zgraph.Hardware.preset("cpu"), name="two cores")

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16_wire": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "fp16_scaled": {"param_dtype": torch.float16},
    "autocast": {},
}


@dataclass(frozen=True)
class Combination:
    """One level of each feature."""

    lowering: str
    zero_stage: int
    precision: str
    compression: str
    plan: str
    accumulation: int
    shape: str
    mode: str
    model: str
    ranks: int

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @classmethod
    def of(cls, text: str) -> Combination:
        """The one that `str` wrote."""
        return cls(*(int(value) if value.isdigit() else value for value in text.split("-")))


LEVELS: dict[str, list[Any]] = {
    "lowering": ["inductor", "fx"],  # what stands first is met most often
    "zero_stage": [0, 1, 2, 3],
    "precision": list(PRECISIONS),
    "compression": ["none", "loco", "gathers8"],
    "plan": ["rules", "planned", "budget"],
    "accumulation": [1, 3],
    "shape": ["tied", "frozen", "hybrid", "units", "checkpointing"],
    "mode": ["train", "eval", "no_grad"],
    "model": ["transformer", "convnet"],
    "ranks": [2, 3],
}
assert list(LEVELS) == [field.name for field in fields(Combination)]


class Transformer(nn.Module):
    """One block between embeddings; widths that no number of ranks divides."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 20)
        self.block = models.Block(20, 2, dropout=DROPOUT)
        self.head = nn.Linear(20, models.VOCABULARY, bias=False)
        self.checkpointed = shape == "checkpointing"
        if shape == "tied":
            self.head.weight = self.embed.weight
        if shape == "frozen":
            self.embed.requires_grad_(False)
            self.block.up.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 10)
        self.convolve = nn.Conv2d(10, 10, 3, padding=1)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.convolve(torch.relu(self.norm(x))))


class Convolutions(nn.Module):
    """Convolutions with a norm between them; weights of four dims, whose rows no number of ranks divides."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 10, 3, padding=1)
        self.block = Convolved()
        self.again = nn.Conv2d(10, 10, 3, padding=1)
        self.leave = nn.Linear(10, 7)
        self.checkpointed = shape == "checkpointing"
        if shape == "tied":
            self.again.weight = self.block.convolve.weight
        if shape == "frozen":
            self.enter.requires_grad_(False)
            self.again.weight.requires_grad_(False)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.tanh(self.enter(image))
        x = x + (checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x))
        return self.leave(torch.sigmoid(self.again(x)).mean((2, 3)))


def image_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 1, 5, 5, generator=generator), torch.randint(0, 7, (4,), generator=generator)


def text_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, models.VOCABULARY, (3, 8), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def case_of(one: Combination) -> Case:
    options = dict(PRECISIONS[one.precision])
    if one.shape == "units":
        options["units"] = (models.Block if one.model == "transformer" else Convolved,)
    scale = SCALE if one.precision == "fp16_scaled" else 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * (F.cross_entropy(output.float(), target) if output.dim() == 2 else loss_of(output, target))

    build: Callable[[str], nn.Module] = Transformer if one.model == "transformer" else Convolutions
    return Case(
        build=lambda: build(one.shape),
        batch=text_batch if one.model == "transformer" else image_batch,
        options=options,
        autocast=torch.bfloat16 if one.precision == "autocast" else None,
        steps=STEPS,
        micro_batches=one.accumulation,
        replicas=one.ranks if one.shape == "hybrid" else 1,
        loss=loss,
    )


def pipeline_of(one: Combination) -> zgraph.Pipeline:
    given: dict[str, Any] = {} if one.plan == "rules" else {"hardware": HARDWARE}
    if one.plan == "budget":
        given |= {"budget_bytes": BUDGET_BYTES, "bucket_bytes": BUCKET_BYTES}
    passes = P.presets.default(
        compression=P.LoCo() if one.compression == "loco" else None,
        gather_compression=P.NoFeedback(bits=8) if one.compression == "gathers8" else None,
        **given,
    )
    # By default what is so small travels as it is.
    passes = [replace(entry, min_numel=64) if hasattr(entry, "min_numel") else entry for entry in passes]
    return zgraph.Pipeline(passes)


@dataclass(frozen=True)
class Bound:
    """How far results may be off, in norms: of an output, and of a gradient (see `off`); None: not by a bit."""

    output: float
    gradient: float


def bound_of(one: Combination) -> Bound | None:
    if one.lowering == "fx" and one.compression == "none":
        return None
    rounding = {"fp32": 1e-5, "fp16_scaled": 5e-3}.get(one.precision, 3e-2)
    if one.compression == "loco" and one.mode != "no_grad":
        # Codes of 4 bits with error feedback: an NMSE of at most 10.5e-3 * 2 / 1.8 per rank.
        return Bound(rounding, 0.2)
    if one.compression == "gathers8" and one.zero_stage > 0:
        return Bound(5e-2, 0.1)
    return Bound(rounding, rounding)


def off(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """|found - expected| / |expected|, in norms; where that is less, relative to `floor`."""
    return ((found - expected).float().norm() / max(expected.float().norm().item(), floor)).item()


class Reference(Replicated):
    """The judge, which computes nothing again in backward, and remembers how large the ranks' own gradients were."""

    def __init__(self, case: Case, model: Any, zero_stage: int) -> None:
        super().__init__(case, model, zero_stage)
        model.checkpointed = False  # what it computed again would be computed with other parameters, those at rest
        self.own_norms: dict[str, float] = {}

    def step(self, step: int) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        self.own_norms = {}
        return super().step(step)

    def micro_step(self, index: int) -> tuple[Tensor, list[dict[str, Tensor | None]]]:
        output, found = super().micro_step(index)
        for name in found[0]:
            norms = torch.tensor([0.0 if grads[name] is None else grads[name].float().norm().item() for grads in found])
            self.own_norms[name] = self.own_norms.get(name, 0.0) + norms.square().mean().sqrt().item()
        return output, found


def train(one: Combination) -> dict[str, float]:
    """Run a combination beside the replicated model.

    Returns:
        The largest distances found, and how many tensors were compared.
    """
    torch.manual_seed(5)
    case, bound = case_of(one), bound_of(one)
    model = case.build()
    reference = Reference(case, copy.deepcopy(model), one.zero_stage)
    model = zgraph.shard(model, hybrid_mesh(case.replicas), zero_stage=one.zero_stage, **case.options)
    report = zgraph.Report()
    called = torch.compile(
        model, backend="zgraph", options={"lowering": one.lowering, "pipeline": pipeline_of(one), "report": report}
    )
    if one.mode != "train":
        model.eval()
        reference.model.eval()
    found: dict[str, float] = {"output": 0.0, "gradient": 0.0, "compared": 0}

    def compare(what: str, kind: str, value: Tensor | None, expected: Tensor | None, floor: float = 0.0) -> None:
        found["compared"] += expected is not None
        if bound is None or value is None or expected is None:
            assert_equal(what, value, expected)
            return
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), what
        distance = off(value, expected, floor)
        found[kind] = max(found[kind], distance)
        assert distance <= getattr(bound, kind), f"{what}: {distance:.3g} off"

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    expected_optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    scaler = zgraph.GradScaler("cpu", init_scale=SCALE, enabled=one.precision == "fp16_scaled")
    if scaler.is_enabled():
        zgraph.set_loss_scale(model, scaler)
        scaler.scale(torch.zeros(()))  # the losses here are scaled already; this makes it ready
    for step in range(STEPS):
        outputs, grads = reference.step(step)
        for micro, expected in enumerate(outputs):
            index = step * case.micro_batches + micro
            inputs, target = batches(case, index)[dist.get_rank()]
            torch.manual_seed(77 + index)
            with contextlib.ExitStack() as stack:
                if one.mode == "no_grad":
                    stack.enter_context(torch.no_grad())
                elif micro < case.micro_batches - 1:
                    stack.enter_context(zgraph.no_sync(model))
                output = case.call(called, inputs)
            compare(f"output {micro} of step {step}", "output", output.detach(), expected)
            if one.mode != "no_grad":
                loss = case.loss(output, target)
                loss.backward()
        if one.mode == "no_grad":
            continue
        scaler.unscale_(optimizer)
        expected_grads = {
            name: None if grad is None else grad / SCALE if scaler.is_enabled() else grad
            for name, grad in grads.items()
        }
        # What a rank sends is off by a part of its own gradient, of which the mean may be smaller; a gradient that is
        # zero but for rounding is off by a part of what it was computed from.
        least = 0.01 * torch.tensor([*reference.own_norms.values()]).norm().item()
        for name, parameter in model.named_parameters():
            value = None if parameter.grad is None else whole(parameter.grad)
            floor = max(least, reference.own_norms.get(name, 0.0)) / (SCALE if scaler.is_enabled() else 1.0)
            compare(f"gradient of {name} in step {step}", "gradient", value, expected_grads.get(name), floor)
            reference.model.get_parameter(name).grad = value  # whatever was lost, both go on from here
        scaler.step(optimizer)
        scaler.update()
        expected_optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert_equal(f"{name} after step {step}", whole(parameter.detach()), reference.model.get_parameter(name))
    return found | {"islands": report.distinct_islands, "graphs": len(report.graphs)}


if __name__ == "__main__":
    chosen = Combination.of(sys.argv[1])
    with fresh_ranks(chosen.ranks) as ranks:
        print(chosen, *ranks.run(train, chosen), sep="\n")
