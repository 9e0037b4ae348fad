"""Whole steps of models with modules that ranks may skip: the bits of the plain loop, few graphs, clear refusals."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zgraph
from tests.support.ranks import Ranks, worlds
from tests.support.skipped_modules import Net
from zgraph.errors import ZgraphError

P = zgraph.passes
STEPS = 20
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "adamw": lambda given: torch.optim.AdamW(given, lr=0.01),
    "fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "foreach": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
}


@dataclass(frozen=True)
class Row:
    """How a step trains.

    Attributes:
        kind: "plain"; "summed" gradients of two backwards; "scaled" by a GradScaler; "two" towers; "recomputed" in a
            checkpointed region; "frozen" in part; "cleared": gradients of one loss are cleared before the next.
        bucket_bytes: of the default passes.
        graphs: the largest number of graphs on a rank.
    """

    stage: int = 3
    optimizer: str = "adamw"
    kind: str = "plain"
    dtype: torch.dtype | None = None
    lowering: str = "fx"
    bucket_bytes: int | None = None
    check: bool = False
    graphs: int = 4


class Two(nn.Module):
    """Two towers that ranks skip independently."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, text: Tensor, image: Tensor | None, sound: Tensor | None) -> Tensor:
        found = torch.zeros(2, 5)
        if image is not None:
            found = found + self.other(image)
        if sound is not None:
            found = found + self.one(sound)
        return self.head(torch.tanh(found + text.sum())).square().mean()


def masks(world: int) -> list[list[bool]]:
    """Which ranks run the tower in each step: at first none, later all."""
    draw = random.Random(world)
    found = [[draw.random() < 0.4 for _ in range(world)] for _ in range(STEPS)]
    found[0] = found[1] = found[9] = [False] * world
    found[6] = found[12] = [True] * world
    return found


class Training:
    """A model, its optimizer, and the lines of a step; `whole` runs them as one graph."""

    def __init__(self, row: Row, *, whole: bool, mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        self.row, self.report = row, zgraph.Report()
        self.model: Any = Two() if row.kind == "two" else Net()
        if row.kind == "two":
            optional = [self.model.one, self.model.other]
        else:
            optional = [self.model.tower]
            self.model.recomputes = row.kind == "recomputed"
            self.model.tower.enter.requires_grad_(row.kind != "frozen")
        zgraph.shard(self.model, mesh, zero_stage=row.stage, param_dtype=row.dtype, optional=optional)
        self.optimizer = OPTIMIZERS[row.optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=row.kind == "scaled")
        passes = zgraph.passes.presets.default(bucket_bytes=row.bucket_bytes)
        options = {"lowering": row.lowering, "report": self.report, "passes": passes, "check": row.check}
        limit = max(8, row.graphs)
        made = zgraph.training_step(self.model, self.optimizer, options=options, recompile_limit=limit)
        self.step: Any = made(self.lines)
        if not whole:
            self.step = self.lines

    def lines(self, text: Tensor, first: Tensor | None, second: Tensor | None) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(text, first, second if self.row.kind == "two" else None)
        self.scaler.scale(loss).backward()
        if self.row.kind in ("summed", "cleared"):
            if self.row.kind == "cleared":
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.model(text + 1, second, None).backward()
        self.scaler.unscale_(self.optimizer)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def run(self, number: int, mask: list[bool], later: list[bool]) -> list[Tensor | None]:
        """Run a step, and return all that it leaves: its result, parameters, gradients and state."""
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(100 * number + rank)
        text, image = torch.randn(2, 4, generator=generator), torch.randn(2, 6, generator=generator)
        other = torch.randn(2, 4 if self.row.kind == "two" else 6, generator=generator)
        has_other = later[rank] and self.row.kind in ("summed", "cleared", "two")
        result = self.step(text, image if mask[rank] else None, other if has_other else None)
        held: list[Any] = list(self.model.parameters())
        found: list[Any] = [result, *held, *(one.grad for one in held)]
        for one in held:
            state = self.optimizer.state.get(one, {})
            found += [torch.tensor(float(len(state))), *(state[key] for key in sorted(state))]
        return [None if one is None else _local(one).clone() for one in found]


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value.detach()


def compared(row: Row) -> list[str]:
    """All bits of each step; the reasons of this rank's graphs."""
    whole, plain = Training(row, whole=True), Training(row, whole=False)
    every = masks(dist.get_world_size())
    for number, mask in enumerate(every):
        later = every[(number * 7 + 3) % STEPS]
        ours, theirs = whole.run(number, mask, later), plain.run(number, mask, later)
        assert len(ours) == len(theirs), number
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert (one is None) == (other is None), (number, place)
            if one is not None and other is not None:
                same = torch.equal if row.lowering == "fx" else close
                assert same(one, other), (number, place, (one - other).abs().max())
    return [one.reason for one in whole.report.graphs]


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)


ROWS = (
    Row(3, "adamw", check=True),
    Row(0, "adamw"),
    Row(3, "sgd", graphs=3),
    Row(0, "momentum", graphs=6),
    Row(2, "fused", dtype=torch.bfloat16, bucket_bytes=64),
    Row(1, "foreach", "recomputed"),
    Row(3, "fused", "frozen"),
    Row(3, "adamw", "summed", graphs=8),
    Row(1, "sgd", "cleared", graphs=8),
    Row(3, "adamw", "scaled", graphs=8),
    Row(2, "sgd", "two", graphs=8),
    Row(2, "fused", "summed", bucket_bytes=64, graphs=16),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_two_ranks_have_the_bits_of_the_plain_loop(ranks: Ranks, row: Row) -> None:
    for rank, reasons in enumerate(ranks.run(compared, row)):
        assert len(reasons) <= row.graphs, (rank, reasons)


@worlds(3)
@pytest.mark.parametrize("row", ROWS[:5], ids=str)
def test_three_ranks_have_the_bits_of_the_plain_loop(ranks: Ranks, row: Row) -> None:
    for rank, reasons in enumerate(ranks.run(compared, row)):
        assert len(reasons) <= row.graphs, (rank, reasons)


def compiled_by_inductor() -> list[str]:
    return compared(Row(3, "sgd", lowering="inductor"))


@pytest.mark.long  # a C++ compiler takes seconds for each graph
def test_inductor_compiles_the_same_few_graphs(ranks: Ranks) -> None:
    assert all(len(reasons) <= 3 for reasons in ranks.run(compiled_by_inductor))


# --- graphs -----------------------------------------------------------------------------------------------------------


def alone_with_the_tower() -> tuple[int, int]:
    """Rank 0 runs the tower in each third step, rank 1 never; the numbers of graphs and of exchanged gradients."""
    training, rank = Training(Row(), whole=True), dist.get_rank()
    for number in range(12):
        training.run(number, [number % 3 == 2 and rank == 0] * 2, [False] * 2)
    state = [bool(training.optimizer.state.get(one)) for one in training.model.tower.never_read.parameters()]
    assert state == [False, False]
    return len(training.report.graphs), rank


def test_a_rank_has_a_graph_for_what_is_run_here_and_elsewhere(ranks: Ranks) -> None:
    """Without the tower, before and after its state is made, and with it: here, or on the other rank."""
    assert ranks.run(alone_with_the_tower) == [(3, 0), (3, 1)]


def captures_late() -> None:
    """One rank has all graphs when the other one begins to capture."""
    training, rank = Training(Row(), whole=True), dist.get_rank()
    for number, mask in enumerate([[True, False], [True, False], [True, True], [False, True]]):
        if rank == number % 2:
            time.sleep(0.5)
        training.run(number, mask, [False] * 2)


def test_a_rank_that_captures_is_waited_for(ranks: Ranks) -> None:
    ranks.run(captures_late)


def among_plain_steps() -> None:
    """Plain lines and whole steps in turns, of a model and a copy of it, whose parameters a state dict replaces."""
    found: list[list[Tensor]] = []
    for turns in (2, STEPS + 1):  # whole in each second step; never
        training = Training(Row(), whole=False)
        training.model = copy.deepcopy(training.model)
        training.model.load_state_dict(training.model.state_dict(), assign=True)
        training.optimizer = OPTIMIZERS["adamw"](training.model.parameters())
        options = {"lowering": "fx"}
        step: Any = zgraph.training_step(training.model, training.optimizer, options=options)(training.lines)
        for number, mask in enumerate(masks(2)[1:9]):
            training.step = step if number % turns == 1 else training.lines
            training.run(number, mask, mask)
        found.append([_local(one).clone() for one in training.model.parameters()])
    assert all(map(torch.equal, *found))


def with_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    found: list[list[Tensor]] = []
    for is_whole in (True, False):
        training = Training(Row(), whole=is_whole, mesh=mesh)
        for number, mask in enumerate(masks(4)[:8]):
            training.run(number, mask, mask)
        found.append([_local(one).clone() for one in training.model.parameters()])
    assert all(map(torch.equal, *found))


def test_plain_steps_and_whole_ones_take_turns(ranks: Ranks) -> None:
    ranks.run(among_plain_steps)


@worlds(4)
def test_replicas_skip_modules(ranks: Ranks) -> None:
    ranks.run(with_replicas)


# --- refusals ---------------------------------------------------------------------------------------------------------


def whole(model: Any, lines: Callable[[Any, bool], None], **options: Any) -> Any:
    """A step of a model, with the lines between its forward and its optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limit = options.pop("recompile_limit", 8)

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", **options}, recompile_limit=limit)
    def step(text: Tensor, image: Tensor | None) -> None:
        lines(model(text, image, None), image is not None)
        optimizer.step()
        optimizer.zero_grad()

    return step


def batch(runs: bool, length: int = 2) -> tuple[Tensor, Tensor | None]:
    return torch.randn(length, 4), torch.randn(length, 6) if runs else None


def plain(loss: Tensor, runs: bool) -> None:
    loss.backward()


def hook(model: Any, last: bool) -> None:
    model.tower.enter.weight.register_hook(lambda grad: grad * 0.5)
    whole(model, plain)(*batch(last))


def grad(model: Any, last: bool) -> None:
    def lines(loss: Tensor, runs: bool) -> None:
        found: Any = torch.autograd.grad(loss, [model.tower.enter.weight], retain_graph=True)[0]
        (loss + found.full_tensor().sum()).backward()

    whole(model, lines)(*batch(True))


def under_no_sync(model: Any, last: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @zgraph.training_step(model, optimizer, options={"lowering": "fx"})
    def step(text: Tensor, image: Tensor | None) -> None:
        with zgraph.no_sync(model):
            model(text, image, None).backward()
        model(text, image, None).backward()
        optimizer.step()

    step(*batch(last))


def planned(model: Any, last: bool) -> None:
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
    whole(model, plain, passes=zgraph.PassList(P.presets.planned(), target=target))(*batch(last))


def compressed(model: Any, last: bool) -> None:
    whole(model, plain, passes=P.presets.default(compression=P.LoCo()))(*batch(last))


def interleaved(model: Any, last: bool) -> None:
    whole(model, plain, passes=P.presets.default(interleave_micro_batches=True))(*batch(last))


def read_on_one_rank(model: Any, last: bool) -> None:
    def lines(loss: Tensor, runs: bool) -> None:
        loss.backward()
        if runs and loss > 0:
            loss.item()

    whole(model, lines)(*batch(last))


def backward_twice_on_one_rank(model: Any, last: bool) -> None:
    def lines(loss: Tensor, runs: bool) -> None:
        loss.backward(retain_graph=runs)
        if runs:
            loss.backward()

    whole(model, lines)(*batch(last))


def too_many_graphs(model: Any, last: bool) -> None:
    step = whole(model, plain, recompile_limit=2)
    for runs, length in ((False, 2), (last, 2), (last, 3 if last else 2)):
        step(*batch(runs, length))


REFUSALS = (
    (hook, "tower.enter.weight is optional and has a gradient hook", ""),
    (grad, "which is optional and reduced when backward\\(\\) has ended", ""),
    (under_no_sync, "Leave out no_sync", ""),
    (planned, "leave out target", ""),
    (compressed, "leave out compression", ""),
    (interleaved, "leave out interleave_micro_batches", ""),
    (read_on_one_rank, "another rank has refused this step", "reads a tensor's value"),
    (backward_twice_on_one_rank, "in different numbers in one step, 1 to 2 times", ""),
    (too_many_graphs, "2 graphs were made on another rank", "2 graphs were made on this rank"),
)


def refuse_all() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    for lines, text, here in REFUSALS:
        begun = time.monotonic()
        torch.manual_seed(0)
        model = Net()
        zgraph.shard(model, optional=[model.tower])
        with pytest.raises((ZgraphError, ValueError)) as found:
            lines(model, last)
        assert re.search(here if here and last else text, str(found.value)), (lines, str(found.value))
        assert time.monotonic() - begun < 60, lines


def test_refusals_reach_all_ranks(ranks: Ranks) -> None:
    ranks.run(refuse_all)
