"""Forwards, and lines between steps, that write to weights: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks
from tests.support.user_loops import Run, check_right, follow, refusal

MODES = ("eager", "fx")


class Writer(nn.Module):
    """Two layers, of which a forward writes to the second in the way that it is told."""

    def __init__(self, write: Callable[[Writer], None] | None = None, max_norm: float | None = None) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        self.embed = nn.Embedding(3, 3, max_norm=max_norm)
        self.gain = nn.Parameter(torch.tensor(5.0))
        self.write = write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self)
        return F.cross_entropy(self.head(torch.tanh(self.enter(x))) * self.gain + self.embed(y), y)


class Owner(nn.Module):
    """Writes to the parameter of its own that it has just used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x @ self.weight.t(), y)
        self.weight.data[0].zero_()
        return loss


def normalize(model: Writer) -> None:
    with torch.no_grad():
        model.head.weight.copy_(F.normalize(model.head.weight, dim=1))


def clamp(model: Writer) -> None:
    model.gain.data.clamp_(max=2.0)


def clamp_rows(model: Writer) -> None:
    model.head.weight.data[1:].clamp_(-0.1, 0.1)


def add_in_place(model: Writer) -> None:
    with torch.no_grad():
        model.head.weight += 1.0


def assign(model: Writer) -> None:
    model.head.weight.data = model.head.weight.data * 0.5


def through_detach(model: Writer) -> None:
    model.head.weight.detach().mul_(0.5)


WRITES = {
    "normalized rows": (lambda: Writer(normalize), "head.weight"),
    "clamped scalar": (lambda: Writer(clamp), "gain"),
    "clamped rows": (lambda: Writer(clamp_rows), "head.weight"),
    "added to": (lambda: Writer(add_in_place), "head.weight"),
    "assigned": (lambda: Writer(assign), "head.weight"),
    "through detach": (lambda: Writer(through_detach), "head.weight"),
    "max_norm": (lambda: Writer(max_norm=0.8), "embed.weight"),
    "its own": (Owner, "weight"),
}


def one_step(run: Run) -> None:
    run.call(*run.batch(0)).backward()
    run.log_grads()


def written_in_forward(what: str, mode: str, stage: int) -> tuple[str, bool]:
    build, name = WRITES[what]
    text = refusal(lambda: follow(one_step, mode, stage, build))
    return text, f"forward writes to {name}," in text


@pytest.mark.parametrize(
    ("what", "stage", "mode"),
    [
        *((what, stage, "eager") for what in WRITES for stage in range(4)),
        *((what, place % 4, "fx") for place, what in enumerate(WRITES)),
        # A graph more each: every way of writing is compiled above, two at each stage.
        *long(*((what, (place + turn) % 4, "fx") for place, what in enumerate(WRITES) for turn in (1, 2, 3))),
    ],
)
def test_forward_that_writes_to_gathered_weights_is_refused(ranks: Ranks, what: str, stage: int, mode: str) -> None:
    for text, names_it in ranks.run(written_in_forward, what, mode, stage):
        assert names_it, text


def without_gradients(mode: str) -> tuple[str, bool]:
    def evaluate(run: Run) -> None:
        with torch.no_grad():
            run.call(*run.batch(0))

    text = refusal(lambda: follow(evaluate, mode, 3, lambda: Writer(normalize)))
    return text, "forward writes to head.weight," in text


@pytest.mark.parametrize("mode", MODES)
def test_evaluating_forward_that_writes_to_weights_is_refused(ranks: Ranks, mode: str) -> None:
    for text, names_it in ranks.run(without_gradients, mode):
        assert names_it, text


# --- what is no write to a gathered copy --------------------------------------------------------------------------


class Teacher(nn.Module):
    """The teacher follows the student in forward, or where a loop says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.how = how

    @torch.no_grad()
    def follow(self) -> None:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if "assign" in self.how:
                t.data = t.data * 0.5 + s.data * 0.5
            else:
                t.mul_(0.5).add_(s, alpha=0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if "in forward" in self.how:
            self.follow()
        out = self.student(x)
        with torch.no_grad():
            target = self.teacher(x)
        return F.cross_entropy(out, y) + (out - target).square().mean()


def teach(run: Run) -> None:
    opt = torch.optim.SGD(run.model.student.parameters(), lr=0.1)
    for _, x, y in run.batches():
        opt.zero_grad()
        run.call(x, y).backward()
        run.log_grads()
        opt.step()
        if "in forward" not in run.model.how:
            run.model.follow()


def teacher_in_place(how: str, mode: str, stage: int) -> None:
    check_right(lambda: Teacher(how), teach, mode, stage)


@pytest.mark.parametrize(
    ("how", "stage", "mode"),
    [
        *((how, stage, "eager") for how in ("in forward", "after the step") for stage in (0, 2, 3)),
        ("in forward", 3, "fx"),
        # What a loop writes between its steps is no part of a graph; the rest differs in the stage.
        ("after the step", 0, "fx"),
        ("in forward", 0, "fx"),
        *long(("in forward", 2, "fx"), ("after the step", 2, "fx"), ("after the step", 3, "fx")),
    ],
)
def test_a_teacher_written_in_place_follows(ranks: Ranks, how: str, stage: int, mode: str) -> None:
    ranks.run(teacher_in_place, how, mode, stage)


def teacher_assigned(how: str, mode: str, stage: int) -> str:
    return refusal(lambda: follow(teach, mode, stage, lambda: Teacher(how)))


@pytest.mark.parametrize(
    ("how", "stage", "mode"),
    [
        *((how, stage, "eager") for how in ("assign in forward", "assign after the step") for stage in (0, 2, 3)),
        ("assign in forward", 2, "fx"),
        # As above.
        ("assign after the step", 0, "fx"),
        *long(("assign in forward", 0, "fx"), ("assign in forward", 3, "fx")),
        *long(("assign after the step", 2, "fx"), ("assign after the step", 3, "fx")),
    ],
)
def test_a_teacher_assigned_through_data_is_refused(ranks: Ranks, how: str, stage: int, mode: str) -> None:
    for text in ranks.run(teacher_assigned, how, mode, stage):
        assert "something was assigned to the .data of a sharded tensor" in text


def assigned_to_a_gradient() -> str:
    model = zgraph.shard(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    return refusal(lambda: setattr(model.weight.grad, "data", model.weight.grad * 2))


def test_gradients_are_not_assigned_without_a_word(ranks: Ranks) -> None:
    for text in ranks.run(assigned_to_a_gradient):
        assert "something was assigned to the .data of a sharded tensor" in text


def written_in_a_window(stage: int) -> bool:
    """A write through .data between two forwards that gather once."""
    model = zgraph.shard(nn.Linear(3, 3, bias=False), zero_stage=stage)
    with torch.no_grad():
        model(torch.ones(2, 3))
        model.weight.data.fill_(2.0)
        whole = model(torch.ones(2, 3))
        model.weight.data[0].zero_()
        return whole.eq(6.0).all().item() and bool(model(torch.ones(2, 3))[:, 0].eq(0.0).all())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_writes_through_data_are_read_by_the_next_forward(ranks: Ranks, stage: int) -> None:
    assert ranks.run(written_in_a_window, stage) == [True] * 2


def moved_and_copied() -> None:
    """Conversions that change nothing, and copies, are no assignments."""
    import copy

    model = zgraph.shard(nn.Linear(3, 3))
    before = model(torch.ones(2, 3))
    model.to("cpu")
    model.float()
    twin = copy.deepcopy(model)
    model.double().float()
    for one in (model, twin):
        torch.testing.assert_close(one(torch.ones(2, 3)), before, rtol=0, atol=0)


def test_conversions_and_copies_are_no_assignments(ranks: Ranks) -> None:
    ranks.run(moved_and_copied)


def activations_in_place(mode: str) -> None:
    """In-place operators on what forward has computed from weights are nobody's business."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(5, 3), nn.ReLU(inplace=True))
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            weight = self.layer[0].weight.clone()
            weight.mul_(2.0)
            out = (self.layer(x) + 1.0).add_(x @ weight.t())
            with torch.no_grad():
                self.seen.add_(out.mean(0))
            return F.cross_entropy(out, y)

    check_right(Net, one_step, mode, 3)


@pytest.mark.parametrize("mode", MODES)
def test_other_tensors_may_be_written_to(ranks: Ranks, mode: str) -> None:
    ranks.run(activations_in_place, mode)
