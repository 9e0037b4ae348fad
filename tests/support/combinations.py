"""Training steps in which several features meet, each compared with the replicated model."""

from __future__ import annotations

import contextlib
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support import models
from tests.support.compressing import feedback_of
from tests.support.judges.low_rank import Paper
from tests.support.judges.replicated import Case, Replicated, assert_equal, batches, hybrid_mesh, loss_of
from tests.support.ranks import fresh_ranks
from tests.support.whole_tensors import whole

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

# By default what is so small travels as it is.
MIN_NUMEL = 64
# Factors pay for the matrices of the block in every precision, and elsewhere for those of wide gradients alone.
LOW_RANK = P.LowRank(rank=2, least_saving=1.0)
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "loco": {"compression": P.LoCo()},
    "loco_on_host": {"compression": P.LoCo(error_device="cpu")},
    "low_rank": {"compression": LOW_RANK},
    "gathers8": {"gather_compression": P.NoFeedback(bits=8)},
}
LOCO = ("loco", "loco_on_host")

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
    resumed: str
    stepped: str

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
    "compression": list(COMPRESSIONS),
    "plan": ["rules", "planned", "budget"],
    "accumulation": [1, 3],
    "shape": ["tied", "frozen", "hybrid", "units", "checkpointing"],
    "mode": ["train", "eval", "no_grad"],
    "model": ["transformer", "convnet"],
    "ranks": [2, 3],
    "resumed": ["never", "midway"],
    "stepped": ["on_tensors", "on_shards"],
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


def pipeline_of(one: Combination) -> zgraph.PassList:
    options: dict[str, Any] = dict(COMPRESSIONS[one.compression])
    target = None
    if one.plan != "rules":
        target = zgraph.Target(hardware=HARDWARE, budget_bytes=BUDGET_BYTES if one.plan == "budget" else None)
    if one.plan == "budget":
        options |= {"bucket_bytes": BUCKET_BYTES}
    preset = P.presets.default if target is None else P.presets.planned
    passes = [replace(each, min_numel=MIN_NUMEL) if hasattr(each, "min_numel") else each for each in preset(**options)]
    return zgraph.PassList(passes, target=target)


@dataclass(frozen=True)
class Bound:
    """How far results may be off, in norms: of an output, and of a gradient (see `off`); None: not by a bit."""

    output: float
    gradient: float


def bound_of(one: Combination) -> Bound | None:
    if one.lowering == "fx" and one.compression in ("none", "low_rank"):
        return None
    rounding = {"fp32": 1e-5, "fp16_scaled": 5e-3}.get(one.precision, 3e-2)
    if one.compression in LOCO and one.mode != "no_grad":
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

    def __init__(self, case: Case, model: Any, one: Combination) -> None:
        super().__init__(case, model, one.zero_stage)
        model.checkpointed = False  # what it computed again would be computed with other parameters, those at rest
        self.own_norms: dict[str, float] = {}
        self.paper: Paper | None = None
        if one.compression == "low_rank":
            itemsize = 4 if one.precision in ("fp32", "autocast") else 2
            self.paper = Paper(LOW_RANK, one.ranks, one.zero_stage, itemsize, MIN_NUMEL)

    def step(self, step: int) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        self.own_norms = {}
        return super().step(step)

    def micro_step(self, index: int) -> tuple[Tensor, list[dict[str, Tensor | None]]]:
        output, found = super().micro_step(index)
        for name in found[0]:
            norms = torch.tensor([0.0 if grads[name] is None else grads[name].float().norm().item() for grads in found])
            self.own_norms[name] = self.own_norms.get(name, 0.0) + norms.square().mean().sqrt().item()
        return output, found

    def reduce(self, name: str, grads: list[Tensor | None]) -> Tensor | None:
        given = [grad for grad in grads if grad is not None]
        if self.paper is None or not self.paper.covers(given[0].shape):
            return super().reduce(name, grads)
        return self.paper.mean(name, given)


class Run:
    """A sharded model, compiled, with its optimizer and scaler."""

    def __init__(self, one: Combination, case: Case, model: nn.Module) -> None:
        self.one, self.case = one, case
        self.model: Any = zgraph.shard(model, hybrid_mesh(case.replicas), zero_stage=one.zero_stage, **case.options)
        self.report = zgraph.Report()
        options = {"lowering": one.lowering, "passes": pipeline_of(one), "report": self.report}
        self.called: Any = torch.compile(self.model, backend="zgraph", options=options)
        if one.mode != "train":
            self.model.eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, foreach=False)
        if one.stepped == "on_shards":
            zgraph.step_on_shards(self.optimizer)
        self.scaler = zgraph.GradScaler("cpu", init_scale=SCALE, enabled=one.precision == "fp16_scaled")
        if self.scaler.is_enabled():
            zgraph.set_loss_scale(self.model, self.scaler)
            self.scaler.scale(torch.zeros(()))  # the losses here are scaled already; this makes it ready

    def forwards_and_backwards(self, step: int) -> Iterator[Tensor]:
        """The output of each micro-batch; afterwards the gradients are there, without the loss's scale."""
        for micro in range(self.case.micro_batches):
            index = step * self.case.micro_batches + micro
            inputs, target = batches(self.case, index)[dist.get_rank()]
            torch.manual_seed(77 + index)
            with contextlib.ExitStack() as stack:
                if self.one.mode == "no_grad":
                    stack.enter_context(torch.no_grad())
                elif micro < self.case.micro_batches - 1:
                    stack.enter_context(zgraph.no_sync(self.model))
                output = self.case.call(self.called, inputs)
            yield output.detach()
            if self.one.mode != "no_grad":
                self.case.loss(output, target).backward()
        if self.one.mode != "no_grad":
            self.scaler.unscale_(self.optimizer)

    def gradients(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else whole(parameter.grad)
            for name, parameter in self.model.named_parameters()
        }

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def resumed(self) -> Run:
        """A run that has never trained, and takes over from a checkpoint of this one."""
        with shared_folder() as folder:
            extra = {"scaler": self.scaler.state_dict()}
            path = zgraph.save_checkpoint(folder, self.called, self.optimizer, step=1, extra=extra)
            other = Run(self.one, self.case, self.case.build())
            loaded = zgraph.load_checkpoint(path, other.called, other.optimizer)
            other.scaler.load_state_dict(loaded.extra["scaler"])
            dist.barrier()  # before the folder goes
        return other


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """One for all ranks, which ends with rank 0's."""
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(names)
        assert names[0] is not None
        yield names[0]


class Compare(Protocol):
    def __call__(
        self, what: str, kind: str, value: Tensor | None, expected: Tensor | None, floor: float = 0.0
    ) -> None: ...


def train(one: Combination) -> dict[str, float]:
    """Run a combination beside the replicated model.

    A run that is resumed midway goes on twice, resumed and as if nothing had been: both are the same, bit for bit.

    Returns:
        The largest distances found, and how many tensors were compared.
    """
    torch.manual_seed(5)
    case, bound = case_of(one), bound_of(one)
    model = case.build()
    reference = Reference(case, copy.deepcopy(model), one)
    reference.model.train(one.mode == "train")
    run, uninterrupted = Run(one, case, model), None
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

    expected_optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for step in range(STEPS):
        if step == 1 and one.resumed == "midway":
            run, uninterrupted = run.resumed(), run
        outputs, grads = reference.step(step)
        for micro, output in enumerate(run.forwards_and_backwards(step)):
            compare(f"output {micro} of step {step}", "output", output, outputs[micro])
        values = run.gradients()
        if uninterrupted is not None:
            assert len(list(uninterrupted.forwards_and_backwards(step))) == case.micro_batches
            for name, expected in uninterrupted.gradients().items():
                assert_equal(f"gradient of {name} after the resume", values[name], expected)
        if one.mode == "no_grad":
            continue
        compare_gradients(step, values, grads, reference, compare, SCALE if run.scaler.is_enabled() else 1.0)
        for name, value in values.items():
            reference.model.get_parameter(name).grad = value  # whatever was lost, both go on from here
        run.step()
        expected_optimizer.step()
        for name, parameter in run.model.named_parameters():
            assert_equal(f"{name} after step {step}", whole(parameter.detach()), reference.model.get_parameter(name))
        if reference.paper is not None:
            assert feedback_of(run.model).keys() == reference.paper.errors.keys()
    return found | {"islands": run.report.distinct_islands, "graphs": len(run.report.graphs)}


def compare_gradients(
    step: int,
    values: dict[str, Tensor | None],
    grads: dict[str, Tensor | None],
    reference: Reference,
    compare: Compare,
    scale: float,
) -> None:
    # What a rank sends is off by a part of its own gradient, of which the mean may be smaller; a gradient that is
    # zero but for rounding is off by a part of what it was computed from.
    least = 0.01 * torch.tensor([*reference.own_norms.values()]).norm().item()
    for name, value in values.items():
        expected, floor = grads.get(name), max(least, reference.own_norms.get(name, 0.0)) / scale
        if expected is not None and scale != 1:
            expected = expected / scale
        compare(f"gradient of {name} in step {step}", "gradient", value, expected, floor)


if __name__ == "__main__":
    chosen = Combination.of(sys.argv[1])
    with fresh_ranks(chosen.ranks) as ranks:
        print(chosen, *ranks.run(train, chosen), sep="\n")
