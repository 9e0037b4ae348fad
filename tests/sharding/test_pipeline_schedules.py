"""Stages under torch's schedules: every gradient, what is sent in a step, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.compressing import feedback_of
from tests.support.ranks import Ranks, fresh_ranks, worlds
from tests.support.whole_tensors import whole
from zgraph import passes as P
from zgraph.errors import ZgraphError
from zgraph.runtime.groups import OF_REDUCTIONS
from zgraph.torch_compat import release_of

DP, MICRO_BATCHES, STEPS = 2, 4, 2
WIDTH = 8  # divides by the ranks, so that no padding is sent
# A new schedule runs the module to learn its shapes; that of torch 2.11 remembers those of the one before.
GATHERS_FOR_SHAPES = 1 if release_of(torch.__version__) >= (2, 12) else 0


class Chunk(nn.Module):
    """Residual, so that a gradient that is split in two reaches the weights over several paths."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

        self.repeats = False

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mixed, x, use_reentrant=False) if self.repeats else self.mixed(x))

    def mixed(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


PARAMETERS = sum(parameter.numel() for parameter in Chunk(0).parameters())
KEPT = PARAMETERS - Chunk(0).down.weight.numel()  # what comes first in the chunk


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * MICRO_BATCHES * DP, WIDTH, generator=generator)
    return x, y


def step_down(parameters: Any) -> None:
    """Change all parameters, so that nothing of a step serves in the next."""
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def expected(count: int) -> dict[str, Tensor]:
    """Gradients of all chunks in the last step, on one rank."""
    model = nn.Sequential(*[Chunk(number) for number in range(count)])
    for step in range(STEPS):
        if step:
            step_down(model.parameters())
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@dataclass(frozen=True)
class Row:
    """A pipeline that trains.

    Attributes:
        schedule: name of torch's class.
        chunks: of each rank.
        closes: as of the stage.
        compressed: gradients travel as codes of LoCo.
        keep_bytes: as of the stage.
        two_steps: of a schedule are one window.
    """

    schedule: str
    zero_stage: int
    mode: Literal["eager", "fx", "inductor"]
    dtype: torch.dtype = torch.float32
    chunks: int = 2
    closes: Literal["last", "first"] = "last"
    compressed: bool = False
    keep_bytes: int = 0
    two_steps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        if not self.compressed:
            return {"lowering": self.mode}
        small = P.CompressGradients(method=P.LoCo(), min_numel=16)
        pipeline = P.presets.default(compression=P.LoCo())
        pipeline = [small if isinstance(one, P.CompressGradients) else one for one in pipeline]
        return {"lowering": self.mode, "passes": zgraph.PassList(pipeline)}

    def __str__(self) -> str:
        return (
            f"{self.schedule.removeprefix('Schedule')}-{self.zero_stage}-{self.mode}-{self.dtype}"
            + "-keeps" * bool(self.keep_bytes)
            + "-loco" * self.compressed
            + "-two_steps" * self.two_steps
        )


def stage_numbers(row: Row, rank: int, world: int) -> list[int]:
    if row.schedule == "ScheduleZBVZeroBubble":  # a V: the last stage lies beside the first
        return [rank, 2 * world - 1 - rank]
    return [rank + world * chunk for chunk in range(row.chunks)]


class Pipeline:
    """This rank's part of a row."""

    def __init__(self, row: Row, prepare: Callable[[Chunk], None] = lambda chunk: None) -> None:
        world = dist.get_world_size() // DP
        self.mesh = init_device_mesh("cpu", (world, DP), mesh_dim_names=("pp", "dp"))
        self.last = row.chunks * world - 1
        self.numbers = stage_numbers(row, self.mesh.get_local_rank("pp"), world)
        self.chunks = [Chunk(number) for number in self.numbers]
        self.stages: list[Any] = []
        for number, chunk in zip(self.numbers, self.chunks, strict=True):
            prepare(chunk)
            zgraph.shard(chunk, self.mesh["dp"], zero_stage=row.zero_stage, param_dtype=row.dtype)
            called: Any = chunk
            if row.mode != "eager":
                called = torch.compile(chunk, backend="zgraph", options=row.options)
            self.stages.append(
                zgraph.PipelineStage(
                    called,
                    number,
                    self.last + 1,
                    torch.device("cpu"),
                    closes=row.closes,
                    keep_bytes=row.keep_bytes,
                    group=self.mesh.get_group("pp"),
                )
            )
        self.row = row
        self.begin()

    def begin(
        self, loss_fn: Callable[[Tensor, Tensor], Tensor] = lambda output, y: F.mse_loss(output.float(), y)
    ) -> None:
        """Make a schedule."""
        make: Any = getattr(pipelining, self.row.schedule, None) or getattr(pipelining.schedules, self.row.schedule)
        given = self.stages if issubclass(make, pipelining.schedules.PipelineScheduleMulti) else self.stages[0]
        self.schedule = make(given, MICRO_BATCHES, loss_fn=loss_fn)

    def step(self, number: int) -> None:
        x, y = (rows.chunk(DP)[self.mesh.get_local_rank("dp")] for rows in batch(number))
        more: dict[str, Any] = {"target": y} if self.last in self.numbers else {}
        self.schedule.step(*((x,) if 0 in self.numbers else ()), **more)

    def gradients(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": whole(parameter.grad)
            for number, chunk in zip(self.numbers, self.chunks, strict=True)
            for name, parameter in chunk.named_parameters()
            if parameter.grad is not None
        }


def sent_bytes(run: Callable[[], None]) -> Counter[str]:
    """What this rank sends, by group."""
    found = Counter[str]()
    send = dist.ProcessGroup.send

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        found[group.group_name] += sum(tensor.nbytes for tensor in tensors)
        return send(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", counted)
        run()
    return found


def trained(row: Row) -> tuple[dict[str, Tensor], int, int]:
    """Gradients of the last step, and the bytes that it has sent for gathers and for reductions."""
    pipeline = Pipeline(row)
    for step in range(STEPS - 1):
        pipeline.step(step)
        step_down(parameter for chunk in pipeline.chunks for parameter in chunk.parameters())
    sent = sent_bytes(lambda: pipeline.step(STEPS - 1))
    pipeline_group = pipeline.mesh.get_group("pp").group_name
    reduced = sum(count for name, count in sent.items() if name.endswith(OF_REDUCTIONS))
    gathered = sum(sent.values()) - reduced - sent[pipeline_group]
    return pipeline.gradients(), gathered, reduced


def assert_one_window(ranks: Ranks, row: Row) -> None:
    """Gradients are those of one model; stages 0 to 2 gather once, 0 and 1 reduce once, the others each micro-batch."""
    wanted = expected(row.chunks * ranks.world // DP)
    stage, own_bytes = row.zero_stage, row.chunks * PARAMETERS * (DP - 1) // DP
    gathers = {0: 0, 1: 1, 2: 1}.get(stage, MICRO_BATCHES) * (2 if row.closes == "first" else 1)
    for gradients, gathered, reduced in ranks.run(trained, row):
        assert len(gradients) == row.chunks * len(list(Chunk(0).parameters()))
        for name, gradient in gradients.items():
            if row.dtype == torch.float32:
                torch.testing.assert_close(gradient, wanted[name])
            else:
                assert (gradient - wanted[name]).norm() < 2**-6 * wanted[name].norm()
        narrow = row.dtype.itemsize
        if stage == 0:  # gathers nothing, and reduces on the mesh's own group
            gathered, reduced = reduced, gathered
        if row.keep_bytes:  # some parameters once, the others in each micro-batch
            once = KEPT * (DP - 1) // DP * row.chunks * narrow * (2 if row.closes == "first" else 1)
            rest = MICRO_BATCHES * (PARAMETERS - KEPT) * (DP - 1) // DP * row.chunks * narrow
            assert once + rest <= gathered <= once + (rest if row.mode == "eager" else 2 * rest)
        elif stage < 3 or row.mode == "eager":  # autograd keeps what it has gathered
            assert gathered == gathers * own_bytes * narrow
        else:
            assert gathers * own_bytes * narrow < gathered <= 2 * gathers * own_bytes * narrow
        # What has waited is summed in the parameter's own dtype, and reduced in it.
        assert reduced == {0: 2 * 4, 1: 4}.get(stage, MICRO_BATCHES * narrow) * own_bytes


@worlds(2 * DP)
@pytest.mark.parametrize(
    "row",
    [
        Row("Schedule1F1B", 1, "fx", chunks=1),
        Row("ScheduleInterleavedZeroBubble", 2, "fx"),
        Row("ScheduleZBVZeroBubble", 0, "eager"),
        Row("ScheduleLoopedBFS", 1, "eager", closes="first"),
        # Each pairs what the rows above have apart.
        Row("ScheduleGPipe", 0, "fx", chunks=1),
        Row("ScheduleGPipe", 3, "eager", torch.bfloat16, chunks=1),
        Row("Schedule1F1B", 2, "inductor", torch.bfloat16, chunks=1),
        Row("ScheduleInterleaved1F1B", 0, "inductor"),
        Row("ScheduleInterleaved1F1B", 1, "eager", torch.bfloat16),
        Row("ScheduleInterleavedZeroBubble", 1, "eager"),
        Row("ScheduleInterleavedZeroBubble", 3, "inductor"),
        Row("ScheduleZBVZeroBubble", 1, "fx", torch.bfloat16),
        Row("ScheduleZBVZeroBubble", 3, "eager"),
        Row("ScheduleLoopedBFS", 2, "fx", closes="first"),
        Row("ScheduleLoopedBFS", 3, "fx"),
        Row("ScheduleInterleaved1F1B", 3, "inductor", torch.bfloat16, keep_bytes=2 * KEPT),
    ],
    ids=str,
)
def test_a_step_is_one_window(ranks: Ranks, row: Row) -> None:
    assert_one_window(ranks, row)


@pytest.mark.parametrize(
    "row",
    [
        Row("Schedule1F1B", 1, "fx", chunks=1),
        Row("ScheduleLoopedBFS", 2, "eager", chunks=1, closes="first"),
        Row("ScheduleGPipe", 3, "eager", chunks=1, keep_bytes=4 * KEPT + 100),
        Row("Schedule1F1B", 3, "fx", chunks=1, keep_bytes=4 * KEPT),
    ],
    ids=str,
)
def test_step_of_a_one_rank_pipeline_is_one_window(ranks: Ranks, row: Row) -> None:
    assert_one_window(ranks, row)


def with_and_without(row: Row, keep_bytes: int) -> tuple[list[str], int, int]:
    """Two steps of a row, and the same where some parameters stay gathered.

    Returns:
        Gradients whose bits differ; bytes that the second step, or where both are one window all, has sent in gathers,
        without what is kept and with it.
    """
    found: list[dict[str, Tensor]] = []
    gathered: list[int] = []
    for room in (0, keep_bytes):
        pipeline = Pipeline(replace(row, keep_bytes=room))
        pipeline.step(0)
        step_down(parameter for chunk in pipeline.chunks for parameter in chunk.parameters())

        def second(pipeline: Pipeline = pipeline) -> None:
            if row.two_steps:
                with contextlib.ExitStack() as stack:
                    for chunk in pipeline.chunks:
                        stack.enter_context(zgraph.no_sync(chunk))
                    pipeline.step(1)
            pipeline.step(2)

        sent = sent_bytes(second)
        reduced = sum(count for name, count in sent.items() if name.endswith(OF_REDUCTIONS))
        gathered.append(sum(sent.values()) - reduced - sent[pipeline.mesh.get_group("pp").group_name])
        found.append(pipeline.gradients())
    assert len(found[0]) == len(list(Chunk(0).parameters())) * row.chunks
    different = [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]
    return different, gathered[0], gathered[1]


# Those that compile take ten seconds each: ranks compile their chunks for both positions in a window.
@pytest.mark.parametrize(
    "row",
    [
        Row("ScheduleInterleavedZeroBubble", 3, "eager", torch.bfloat16, two_steps=True),
        Row("Schedule1F1B", 3, "fx", torch.bfloat16, chunks=1, compressed=True, two_steps=True),
        Row("Schedule1F1B", 3, "inductor", chunks=1),
        Row("ScheduleInterleaved1F1B", 3, "inductor", compressed=True, two_steps=True),
        Row("ScheduleInterleaved1F1B", 3, "fx", torch.bfloat16),
        Row("ScheduleInterleavedZeroBubble", 3, "fx", two_steps=True),
        Row("ScheduleInterleavedZeroBubble", 3, "inductor", torch.bfloat16, compressed=True),
    ],
    ids=str,
)
def test_parameters_kept_gathered_change_no_bits(ranks: Ranks, row: Row) -> None:
    """It is gathered once in a window, which two steps may be; the rest by each micro-batch, once or twice."""
    narrow = row.dtype.itemsize
    once, rest = (count * (DP - 1) // DP * row.chunks * narrow for count in (KEPT, PARAMETERS - KEPT))
    runs = MICRO_BATCHES * (1 + row.two_steps)
    for different, without, kept in ranks.run(with_and_without, row, KEPT * narrow):
        assert different == []
        assert once + runs * rest <= kept <= once + 2 * runs * rest
        assert runs * (once + rest) <= without <= 2 * runs * (once + rest)


# --- repeated forwards, several steps, failures ---------------------------------------------------------------------


def checkpointed(row: Row) -> tuple[dict[str, Tensor], int]:
    """Gradients, and what a step sends, where each backward repeats its forward."""

    def repeat(chunk: Chunk) -> None:
        chunk.repeats = True

    pipeline = Pipeline(row, repeat)
    sent = sent_bytes(lambda: pipeline.step(0))
    return pipeline.gradients(), sum(sent.values())


def test_a_repeated_forward_has_the_position_of_its_micro_batch(ranks: Ranks) -> None:
    """All forwards are over when the first backward begins: the repeated ones gather once more, for all of them.

    torch's look at the shapes before the first step gathers, too.
    """
    for gradients, sent in ranks.run(checkpointed, Row("ScheduleGPipe", 1, "eager", chunks=1)):
        model = Chunk(0)
        F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients["0." + name], parameter.grad)
        assert sent == 4 * PARAMETERS * 4 // DP


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(row: Row) -> str:
    try:
        Pipeline(row).step(0)
    except ZgraphError as error:
        return str(error)
    return ""


def test_a_schedule_that_ends_with_another_micro_batch_is_refused(ranks: Ranks) -> None:
    for text in ranks.run(refused, Row("ScheduleLoopedBFS", 1, "eager", chunks=1)):
        assert text.startswith("zgraph.PipelineStage: stage 0 must close its window with the last micro-batch")
        assert "runs backward 1 of 4 for micro-batch 3. Pass closes='first'" in text


def failed_once(row: Row) -> tuple[str, dict[str, Tensor], int]:
    """A step whose loss raises, an optimizer's step behind it, and the same step once more."""
    pipeline = Pipeline(row)
    parameters = [parameter for chunk in pipeline.chunks for parameter in chunk.parameters()]
    losses = iter([False, False, True])

    def raises(output: Tensor, y: Tensor) -> Tensor:
        if next(losses):
            raise FloatingPointError("of the third micro-batch")
        return F.mse_loss(output, y)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    pipeline.step(0)
    step_down(parameters)
    pipeline.begin(raises)
    with pytest.raises(FloatingPointError):
        pipeline.step(0)
    with pytest.raises(ZgraphError) as refusal:
        optimizer.step()
    optimizer.zero_grad()
    pipeline.begin()
    sent = sent_bytes(lambda: pipeline.step(1))
    return str(refusal.value), pipeline.gradients(), sum(sent.values())


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_step_that_fails_leaves_nothing_to_the_next(ranks: Ranks, zero_stage: int) -> None:
    row = Row("Schedule1F1B", zero_stage, "eager", chunks=1)
    for text, gradients, sent in ranks.run(failed_once, row):
        assert "are not reduced" in text and "or clear the gradients by zero_grad()" in text
        for name, gradient in expected(1).items():
            torch.testing.assert_close(gradients[name], gradient)
        # Nothing that was gathered before serves: once for the shapes that a new schedule learns, once for the window.
        gathers = (1 + GATHERS_FOR_SHAPES) * (zero_stage > 0)
        reductions = 1 if zero_stage else 2
        assert sent == (gathers + reductions) * PARAMETERS * 4 // DP


def counted_steps(row: Row) -> set[tuple[int, int]]:
    """Reductions and steps that error feedback has counted, of all parameters."""
    pipeline = Pipeline(row)
    for step in range(STEPS):
        pipeline.step(step)
        step_down(pipeline.chunks[0].parameters())
    slots = [one for found in feedback_of(pipeline.chunks[0]).values() for one in found.values()]
    return {(one.reductions, one.steps) for one in slots}


@pytest.mark.parametrize("zero_stage", [0, 2, 3])  # in stage 2 forwards tell their backward, as in 0
def test_error_feedback_counts_a_step_once(ranks: Ranks, zero_stage: int) -> None:
    row = Row("Schedule1F1B", zero_stage, "fx", chunks=1, compressed=True)
    reductions = STEPS * (1 if zero_stage == 0 else MICRO_BATCHES)
    assert ranks.run(counted_steps, row) == [{(reductions, STEPS)}] * ranks.world


def two_steps(row: Row) -> tuple[dict[str, Tensor], int]:
    """Gradients of two steps, the first under no_sync, and what both have sent; another step has learned the shapes."""
    pipeline = Pipeline(row)
    pipeline.step(0)
    pipeline.chunks[0].zero_grad()

    def both() -> None:
        with zgraph.no_sync(pipeline.chunks[0]):
            pipeline.step(1)
        pipeline.step(1)

    sent = sent_bytes(both)
    return pipeline.gradients(), sum(sent.values())


def test_step_under_no_sync_leaves_its_window_open(ranks: Ranks) -> None:
    """torch divides by the number of micro-batches in each step, so that the first one's part is divided twice."""
    model = Chunk(0)
    F.mse_loss(model(batch(1)[0]), batch(1)[1]).backward()
    for gradients, sent in ranks.run(two_steps, Row("Schedule1F1B", 2, "eager", chunks=1)):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients["0." + name], parameter.grad * (1 + 1 / MICRO_BATCHES))
        assert sent == (1 + 2 * MICRO_BATCHES) * PARAMETERS * 4 // DP


@pytest.mark.parametrize(
    ("zero_stage", "keep_bytes", "text"),
    [
        (2, 64, "keep_bytes=64, and no parameter is at stage 3"),
        (3, -1, "keep_bytes=-1; use a positive number"),
        (3, "budget", "keep_bytes='budget'; use a positive number of bytes, or 0 to keep nothing. How many a budget"),
        (3, True, "keep_bytes=True; use a positive number"),
        (3, None, "keep_bytes=None, as in a plan that was made without a budget; give the plan a target"),
    ],
)
def test_room_for_what_is_not_gathered_is_refused(ranks: Ranks, zero_stage: int, keep_bytes: Any, text: str) -> None:
    for found in ranks.run(refused_to_keep, Row("Schedule1F1B", zero_stage, "eager", chunks=1, keep_bytes=keep_bytes)):
        assert found.startswith("zgraph.PipelineStage: ") and text in found


def refused_to_keep(row: Row) -> str:
    with pytest.raises(ValueError) as error:
        Pipeline(row)
    return str(error.value)


def test_gradients_that_bypass_autograd_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("zgraph.PipelineStage: a dw_builder computes gradients")):
        zgraph.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), dw_builder=lambda: lambda: None)
    with pytest.raises(ValueError, match=re.escape("closes='middle'; use 'last', or 'first'")):
        zgraph.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), closes="middle")  # pyright: ignore[reportArgumentType]


# --- a rank that fails ----------------------------------------------------------------------------------------------


def fails(folder: str) -> None:
    """Rank 3 raises in the second step; every rank that sees an error writes it down and ends, as Python would."""
    pipeline = Pipeline(Row("Schedule1F1B", 2, "eager", chunks=1))
    pipeline.step(0)
    rank = dist.get_rank()
    if rank == dist.get_world_size() - 1:
        pipeline.chunks[0].mixed = None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        pipeline.step(1)
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def test_all_ranks_of_a_pipeline_learn_that_one_has_failed(tmp_path: Path) -> None:
    """From the end of its process: neighbours in the pipeline, its data-parallel peers, and then theirs."""
    with fresh_ranks(2 * DP, timeout_s=200.0) as ranks:  # longer than the test would wait
        assert [text for _, text in ranks.outcomes(fails, str(tmp_path))] == ["died"] * ranks.world
    texts = [Path(tmp_path, str(rank)).read_text() for rank in range(2 * DP)]
    assert "failed to run forward" in texts[3]
    assert not [text for text in texts if "imed out" in text]
    # Which of its neighbours a rank misses first depends on who is faster; what it says is gloo's.
    assert all("onnection" in text or "failed to run forward" in text for text in texts[:3])
