"""Pipelines beside what else changes a step: the bits of one model on one rank, or of lines without a schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

import zgraph
from tests.support.budget import long
from tests.support.compressing import feedback_of
from tests.support.judges.replicated import Case, Replicated, assert_equal, batches
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.errors import CheckpointError, ZgraphWarning
from zgraph.passes import CompressGradients, LoCo, presets

MICRO_BATCHES, STEPS, WIDTH = 4, 2, 8


class Chunk(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(number + 1))  # of another shape on each stage

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def micro_batch(index: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, WIDTH, generator=generator)
    return x, y


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a chunk is sharded, compiled and run.

    Attributes:
        lowering: None: not compiled.
        planned: the order of passes goes by costs.
        budget_bytes: of the planned one's target.
        compressed: by LoCo.
        autocast: to this dtype.
        shard: more options of `zgraph.shard`.
    """

    zero_stage: int
    lowering: Literal["fx", "inductor"] | None = "fx"
    planned: bool = False
    budget_bytes: int | None = None
    compressed: bool = False
    autocast: torch.dtype | None = None
    shard: dict[str, Any] = field(default_factory=dict[str, Any])

    def built(self, number: int, mesh: DeviceMesh) -> tuple[Chunk, Any]:
        """A chunk, and what runs it."""
        chunk = Chunk(number)
        zgraph.shard(chunk, mesh, zero_stage=self.zero_stage, **self.shard)
        if self.lowering is None:
            return chunk, chunk
        make = presets.planned if self.planned else presets.default
        passes = make(compression=LoCo() if self.compressed else None)
        passes = [replace(one, min_numel=16) if isinstance(one, CompressGradients) else one for one in passes]
        target = None
        if self.planned:
            target = zgraph.Target(hardware=zgraph.calibrate(), budget_bytes=self.budget_bytes)
        options: dict[str, Any] = {"lowering": self.lowering, "passes": zgraph.PassList(passes, target=target)}
        return chunk, torch.compile(chunk, backend="zgraph", options=options)

    def casts(self) -> Any:
        return torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext()


class Scheduled:
    """This rank's stage of [pp, dp] ranks."""

    def __init__(self, row: Row, dp: int) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size() // dp, dp), mesh_dim_names=("pp", "dp"))
        self.number, self.dp_rank = self.mesh.get_local_rank("pp"), self.mesh.get_local_rank("dp")
        count, group = self.mesh["pp"].size(), self.mesh.get_group("pp")
        self.is_last = self.number == count - 1
        self.row = row
        self.chunk, called = row.built(self.number, self.mesh["dp"])
        stage = zgraph.PipelineStage(called, self.number, count, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.chunk.parameters(), lr=1e-2, foreach=False)

    def step(self, index: int) -> None:
        numbers = range(index * MICRO_BATCHES, (index + 1) * MICRO_BATCHES)
        micro = [micro_batch(0, 0, torch.Generator().manual_seed(1000 * one + self.dp_rank)) for one in numbers]
        x, y = (torch.cat(parts) for parts in zip(*micro, strict=True))
        with self.row.casts():
            more: dict[str, Any] = {"target": y} if self.is_last else {}
            self.schedule.step(*((x,) if self.number == 0 else ()), **more)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(one.grad) for name, one in module.named_parameters() if one.grad is not None}


def compared(row: Row) -> int:
    """Steps of one stage on all ranks, beside one model that computes the rows of all; the number of gradients."""
    run = Scheduled(row, dist.get_world_size())
    case = Case(
        build=Chunk,
        batch=micro_batch,
        options=row.shard,
        autocast=row.autocast,
        micro_batches=MICRO_BATCHES,
        loss=loss_of,
    )
    one_model = Replicated(case, Chunk(), row.zero_stage)
    optimizer = torch.optim.AdamW(one_model.model.parameters(), lr=1e-2, foreach=False)
    found = 0
    for step in range(STEPS):
        run.step(step)
        _, expected = one_model.step(step)
        for name, gradient in gradients(run.chunk).items():
            wanted = expected[name]
            assert wanted is not None
            wanted /= MICRO_BATCHES  # as the schedule does
            assert_equal(f"gradient of {name} in step {step}", gradient, wanted)
            one_model.model.get_parameter(name).grad = wanted
            found += 1
        run.update()
        optimizer.step()
    return found


BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
ROWS = {
    "stage 1, planned": Row(zero_stage=1, planned=True),
    "stage 3, budget, autocast": Row(zero_stage=3, planned=True, budget_bytes=20_000, autocast=torch.bfloat16),
    "stage 2, budget, bf16": Row(zero_stage=2, planned=True, budget_bytes=20_000, shard=BF16),
    "stage 0, autocast": Row(zero_stage=0, autocast=torch.bfloat16),
    "stage 3, bf16": Row(zero_stage=3, shard=BF16),
    "stage 2, eager, autocast": Row(zero_stage=2, lowering=None, autocast=torch.bfloat16),
}


# Ten seconds each: two ranks compile forwards and backwards of both positions in the window.
@pytest.mark.parametrize(
    "name",
    ["stage 2, eager, autocast", "stage 1, planned", "stage 3, budget, autocast", *long(*list(ROWS)[2:5])],
)
def test_a_step_has_the_bits_of_one_model(ranks: Ranks, name: str) -> None:
    assert ranks.run(compared, ROWS[name]) == [STEPS * len(list(Chunk().parameters()))] * ranks.world


def compared_with_lines(row: Row) -> int:
    """Steps of a stage whose gradients lose digits, beside the same without a schedule; how many are compressed."""
    run = Scheduled(row, dist.get_world_size())
    chunk, called = row.built(0, run.mesh["dp"])
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2, foreach=False)
    case = Case(build=Chunk, batch=micro_batch)
    for step in range(STEPS):
        run.step(step)
        for micro in range(MICRO_BATCHES):
            x, y = batches(case, step * MICRO_BATCHES + micro)[dist.get_rank()]
            with zgraph.no_sync(chunk) if micro < MICRO_BATCHES - 1 else contextlib.nullcontext(), row.casts():
                loss = loss_of(called(x), y)
                loss.backward()
        expected = gradients(chunk)
        for name, gradient in gradients(run.chunk).items():
            assert_equal(f"gradient of {name} in step {step}", gradient, expected[name] / MICRO_BATCHES)
        with torch.no_grad():
            for parameter in chunk.parameters():
                assert parameter.grad is not None
                parameter.grad /= MICRO_BATCHES
        run.update()
        optimizer.step()
        optimizer.zero_grad()
    return len(feedback_of(run.chunk))


@pytest.mark.parametrize(
    "row",
    [
        Row(zero_stage=0, compressed=True),
        *long(Row(zero_stage=2, compressed=True, planned=True, autocast=torch.bfloat16)),
        *long(Row(zero_stage=3, compressed=True)),
    ],
    ids=["stage 0", "stage 2, planned, autocast", "stage 3"],
)
def test_compressed_gradients_have_the_bits_of_lines_without_a_schedule(ranks: Ranks, row: Row) -> None:
    assert min(ranks.run(compared_with_lines, row)) >= 2


# --- checkpoints --------------------------------------------------------------------------------------------------


def assert_equal_parameters(one: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    for found, expected in zip(one, other, strict=True):
        assert torch.equal(whole(found), whole(expected))


def continued(folder: str, row: Row, dp: int) -> list[str]:
    """A run that goes on and one that loads its checkpoint end with the same bits; what is compressed."""
    run, other = Scheduled(row, dp), Scheduled(row, dp)
    models = [nn.ModuleDict({str(one.number): one.chunk}) for one in (run, other)]
    for step in range(2):
        run.step(step)
        run.update()
    path = zgraph.save_checkpoint(folder, models[0], run.optimizer, step=2)
    with torch.no_grad():
        for parameter in other.chunk.parameters():
            parameter.zero_()
    zgraph.load_checkpoint(path, models[1], other.optimizer)
    assert_equal_parameters(run.chunk.parameters(), other.chunk.parameters())
    for one in (run, other):
        for step in range(2, 4):
            one.step(step)
            one.update()
    assert_equal_parameters(run.chunk.parameters(), other.chunk.parameters())
    full = torch.cat([whole(one).flatten() for one in run.chunk.parameters()])
    torch.save(full, f"{folder}/stage_{run.number}_{run.dp_rank}.pt")
    return sorted(feedback_of(run.chunk))


def loaded_as_one(folder: str, compressed: bool) -> None:
    """The stages of a pipeline in one model, sharded over all ranks."""
    model = nn.ModuleDict({str(number): Chunk(number) for number in range(2)})
    zgraph.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with pytest.warns(ZgraphWarning, match="start as zeros") if compressed else contextlib.nullcontext():
        zgraph.load_checkpoint(f"{folder}/step_00000002", model, optimizer)
    states = optimizer.state_dict()["state"]
    assert len(states) == len(list(model.parameters())) and all(whole(one["exp_avg"]).any() for one in states.values())


@worlds(2)
def test_stages_continue_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(continued, str(tmp_path), Row(zero_stage=2, lowering=None), 1) == [[], []]
    ranks.run(loaded_as_one, str(tmp_path), False)


@worlds(4)  # two of each stage, which keep errors of compression; all compile
def test_sharded_and_compressed_stages_continue_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(continued, str(tmp_path), Row(zero_stage=2, compressed=True), 2)
    assert found == [["down.weight", "up.weight"]] * 4
    ranks.run(loaded_as_one, str(tmp_path), True)


def refused(folder: str, what: str) -> str:
    run = Scheduled(Row(zero_stage=1, lowering=None), 1)
    model: nn.Module = run.chunk if what == "names" else nn.ModuleDict({str(run.number): run.chunk})
    if what == "options":
        run.optimizer.param_groups[0]["lr"] = 0.1 * (run.number + 1)
    if what == "groups" and run.number:
        run.optimizer = torch.optim.AdamW([{"params": [one]} for one in run.chunk.parameters()])
    with pytest.raises(CheckpointError) as error:
        zgraph.save_checkpoint(folder, model, run.optimizer, step=1)
    return str(error.value)


@worlds(2)
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("names", "norm.weight is a parameter of ranks [0] and another one of ranks [1], and one would overwrite the"),
        ("options", "group 0 of the optimizer has lr=0.2 on rank 1 and 0.1 on rank 0; make them groups of their own"),
        ("groups", "the optimizer has 6 groups on rank 1 and 1 on rank 0"),
    ],
)
def test_stages_that_would_overwrite_each_other_are_refused(ranks: Ranks, tmp_path: Path, what: str, text: str) -> None:
    for found in ranks.run(refused, str(tmp_path), what):
        assert found.startswith("zgraph.save_checkpoint: ") and text in found
    assert not list(tmp_path.iterdir())


# --- clipping -----------------------------------------------------------------------------------------------------


def clipped(norm_type: float, max_norm: float) -> tuple[float, dict[str, Tensor]]:
    run = Scheduled(Row(zero_stage=3, lowering=None), 1)
    run.step(0)
    norm = zgraph.clip_grad_norm_(run.chunk.parameters(), max_norm, norm_type, pipeline=run.mesh["pp"])
    return norm.item(), {f"{run.number}.{name}": one for name, one in gradients(run.chunk).items()}


@worlds(2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_stages_are_clipped_by_the_norm_of_the_whole_model(ranks: Ranks, norm_type: float) -> None:
    model, case = nn.Sequential(Chunk(0), Chunk(1)), Case(build=Chunk, batch=micro_batch)
    for index in range(MICRO_BATCHES):
        x, y = case.batch(index, 0, torch.Generator().manual_seed(1000 * index))
        (loss_of(model(x), y) / MICRO_BATCHES).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item()
    assert expected > 0.1
    seen: set[str] = set()
    for norm, found in ranks.run(clipped, norm_type, 0.1):
        assert norm == pytest.approx(expected, rel=1e-6)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-8)
            seen.add(name)
    assert seen == {name for name, _ in model.named_parameters()}


def not_finite() -> str:
    run = Scheduled(Row(zero_stage=1, lowering=None), 1)
    run.step(0)
    if run.number:
        grad: Any = run.chunk.up.bias.grad
        grad.to_local().fill_(float("nan"))
    with pytest.raises(RuntimeError) as error:
        zgraph.clip_grad_norm_(run.chunk.parameters(), 1.0, error_if_nonfinite=True, pipeline=run.mesh.get_group("pp"))
    return str(error.value)


@worlds(2)
def test_non_finite_norm_on_one_stage_fails_all_stages(ranks: Ranks) -> None:
    for text in ranks.run(not_finite):
        assert "the norm of order 2.0 is nan on every rank" in text
