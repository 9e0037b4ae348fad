"""Ranks that change gradients or weights by different numbers, or on one rank only: every rank gets an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import CLASSES, FEATURES, Net, both, draw, refusal

Line = Callable[[Any, Any], None]


def first() -> bool:
    return dist.get_rank() == 0


def scaled(model: Any, opt: Any) -> None:
    """Each rank divides by its own number of tokens."""
    for parameter in model.parameters():
        parameter.grad.mul_(1 / (dist.get_rank() + 2))


def scaled_anew(model: Any, opt: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / (dist.get_rank() + 2)


def scaled_by_a_tensor(model: Any, opt: Any) -> None:
    torch._foreach_mul_([one.grad for one in model.parameters()], torch.tensor(0.5 if first() else 0.25))


def cleared(model: Any, opt: Any) -> None:
    """One rank skips what is not finite."""
    if first():
        opt.zero_grad()


def zeroed(model: Any, opt: Any) -> None:
    if first():
        model.gain.grad.zero_()


def one_is_missing(model: Any, opt: Any) -> None:
    if first():
        model.gain.grad = None


def clipped(model: Any, opt: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 if first() else 0.2)


def clipped_by_zgraph(model: Any, opt: Any) -> None:
    zgraph.clip_grad_norm_(model.parameters(), 0.1 if first() else 0.2)


def clipped_by_value(model: Any, opt: Any) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.1 if first() else 0.2)


def decayed(model: Any, opt: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9 if first() else 0.99)


def decayed_rows(model: Any, opt: Any) -> None:
    with torch.no_grad():
        model.enter.weight[:, 1].mul_(0.9 if first() else 0.99)


def other_rows(model: Any, opt: Any) -> None:
    model.enter.weight.grad[: 2 + dist.get_rank()] = 0


def scaled_in_a_hook(model: Any, opt: Any) -> None:
    factor = 0.5 if first() else 0.25
    if not model.hooked:
        model.hooked = model.gain.register_hook(lambda grad: grad * factor)


def read_in_another_order(model: Any, opt: Any) -> None:
    """As `for parameter in set(model.parameters())` does."""
    for parameter in list(model.parameters())[:: 1 if first() else -1]:
        parameter.grad.norm().item()


def read_by_another_number(model: Any, opt: Any) -> None:
    (model.enter.weight > (0.1 if first() else 0.2)).sum().item()


def read_of_another_row(model: Any, opt: Any) -> None:
    model.enter.weight[:, dist.get_rank()].sum().item()


def another_state(model: Any, opt: Any) -> None:
    for values in opt.state.values():
        values["momentum_buffer"].mul_(0.5 if first() else 0.25)


def another_plain_gradient(model: Any, opt: Any) -> None:
    model.gain.grad = torch.full_like(model.gain.full_tensor(), dist.get_rank())


def rightly(model: Any, opt: Any) -> None:
    """Ranks may differ in factors of the loss, and in lines that only read."""
    if first():
        assert (model.gain.grad * 100).to_local().numel() >= 0
        _ = [one.grad.detach().clone().mul_(2.0) for one in model.parameters()]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def train(line: Line, mode: str, stage: int) -> None:
    """A loop whose ranks differ in a line between backward and step."""
    torch.manual_seed(0)
    model: Any = Net()
    model.hooked = None
    zgraph.shard(model, zero_stage=stage)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"lowering": "fx", "agreement_timeout_s": 60}
    called: Any = torch.compile(model, backend="zgraph", options=options) if mode == "fx" else model

    def lines(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(called(x), y) * (0.5 if first() else 0.25)
        loss.backward()
        line(model, opt)
        opt.step()
        return loss.detach()

    step = zgraph.training_step(model, opt, options=options)(lines) if mode == "step" else lines
    for number in range(3):
        step(draw(number, 4, FEATURES), draw(number, 4, classes=CLASSES))


def refused(line: Line, mode: str, stage: int) -> str:
    return refusal(lambda: train(line, mode, stage))


LINES = (
    scaled,
    scaled_anew,
    scaled_by_a_tensor,
    cleared,
    zeroed,
    one_is_missing,
    clipped,
    clipped_by_zgraph,
    clipped_by_value,
    decayed,
    decayed_rows,
    other_rows,
    scaled_in_a_hook,
    read_in_another_order,
    read_by_another_number,
    read_of_another_row,
    another_state,
    another_plain_gradient,
)
# A captured step refuses or sees these in other ways: see `test_hooks_on_parameters.py`, `test_step_effects.py`.
IN_STEP = [line for line in LINES[: LINES.index(read_in_another_order)] if line not in (zeroed, scaled_in_a_hook)]
READS = (read_in_another_order, read_by_another_number, read_of_another_row)  # which replicas may do
PLACES = [(scaled, "eager", 3), (read_in_another_order, "eager", 3), (cleared, "fx", 0), (clipped, "step", 3)]
EVERY = [
    (line, mode, 3 if line in READS else (0, 1, 3)[(place + turn) % 3])
    for turn, (mode, lines) in enumerate((("eager", LINES), ("fx", LINES), ("step", IN_STEP)))
    for place, line in enumerate(lines)
]


# Each waits for the watch, which looks twice before it says that ranks differ. Every line is a test of its own because
# the error ends its loop; the four in front stand for the four places where ranks are compared.
@pytest.mark.parametrize(
    ("line", "mode", "stage"),
    [*PLACES, *(row for row in EVERY if row not in PLACES)],
)
def test_ranks_that_change_otherwise_are_told(ranks: Ranks, line: Line, mode: str, stage: int) -> None:
    for text in ranks.run(refused, line, mode, stage):
        assert text.startswith("zgraph: rank") and "rank 0" in text and "rank 1" in text, text


@pytest.mark.parametrize(("mode", "stage"), [("eager", 0), ("eager", 3), ("fx", 1)])
def test_differences_without_effect_are_allowed(ranks: Ranks, mode: str, stage: int) -> None:
    ranks.run(train, rightly, mode, stage)


def copied_from_lists(stage: int) -> str:
    grads = [one.detach().clone() for one in zgraph.shard(nn.Linear(5, 7), zero_stage=stage).parameters()]
    try:
        torch._foreach_copy_(grads, [torch.full(one.shape, float(dist.get_rank())) for one in grads])
    except RuntimeError as error:
        return str(error)
    return "copied"


@pytest.mark.parametrize("stage", [0, 3])
def test_plain_tensors_in_lists_are_never_copied_unchecked(ranks: Ranks, stage: int) -> None:
    assert all("torch.Tensor and DTensor" in text for text in ranks.run(copied_from_lists, stage))
