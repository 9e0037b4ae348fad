"""Loops that accumulate under `no_sync` through parts of a model, and clear, scale or drop gradients on the way."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.ranks import Ranks
from tests.support.user_loops import Refused, Run, adamw, both, ce, check, rows

MICRO = 3


def micro_batches(run: Run) -> Any:
    for number in range(2):
        yield [run.batch(10 * number + micro) for micro in range(MICRO)]


def parts_accumulate(run: Run) -> None:
    """Encoder and head are called one after the other, and accumulate together."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, head = run.compiled(model.enter), run.compiled(model.head)

    @run.step(opt)
    def train(batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros(())
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                loss = ce(head(torch.tanh(enter(x))), y) / MICRO
                loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    for batches in micro_batches(run):
        run.log_loss(train(batches))


def a_part_closes_what_the_whole_has_begun(run: Run) -> None:
    """The whole model accumulates; its parts, called in another order, close the window."""
    model, opt = run.model, adamw(run.model.parameters())
    parts = [run.compiled(part) for part in (model.other, model.enter, model.head, *model.blocks)]
    for batches in micro_batches(run):
        for x, y in batches[:-1]:
            with run.no_sync():
                loss = ce(run.call(x)[0] + 0.5 * run.call(x)[1], y)
            loss.backward()
        x, y = batches[-1]
        other, enter, head, first, second = parts
        h = second(first(torch.tanh(enter(x))))
        loss = ce(other(h), y) + ce(head(h), y) + 0.1 * ce(run.call(x), y)  # the scalar has no part of its own
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def cleared(run: Run, clear: str) -> None:
    """A micro-batch is not finite; what has been summed is dropped, and the window goes on."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                loss = both(run.call(x * float("nan") if micro == 0 else x), y) / MICRO
                loss.backward()
            if micro == 0 and clear == "None":
                opt.zero_grad()
            elif micro == 0 and clear == "zeros":
                opt.zero_grad(set_to_none=False)
            elif micro == 0:
                for parameter in run.model.parameters():
                    parameter.grad.data.zero_()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def cleared_to_none(run: Run) -> None:
    cleared(run, "None")


def cleared_to_zeros(run: Run) -> None:
    cleared(run, "zeros")


def cleared_in_place(run: Run) -> None:
    cleared(run, "data")


def cleared_on_top_of_a_window(run: Run) -> None:
    """A second window adds to the gradients of a first one; both are set to zero in place in between."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for repeat in range(2):
            for micro, (x, y) in enumerate(batches):
                with run.no_sync(last=micro == MICRO - 1):
                    loss = both(run.call(x + repeat), y)
                    loss.backward()
                if repeat == 1 and micro == 1:
                    opt.zero_grad(set_to_none=False)
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def added_to_a_window(run: Run) -> None:
    """A second window adds to the gradients of a first one."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for repeat in range(2):
            for micro, (x, y) in enumerate(batches):
                with run.no_sync(last=micro == MICRO - 1):
                    loss = both(run.call(x + repeat), y)
                    loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def scaled_in_between(run: Run) -> None:
    """Gradients decay from micro-batch to micro-batch."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                loss = both(run.call(x), y)
                loss.backward()
            if micro < MICRO - 1:
                for parameter in run.model.parameters():
                    parameter.grad.mul_(0.5)
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def masked_in_between(run: Run) -> None:
    """A row of a gradient is dropped between micro-batches."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                loss = both(run.call(x), y)
                loss.backward()
            grad = run.model.enter.weight.grad
            if not run.stage:
                (grad.to_local() if run.is_sharded else grad)[0].zero_()
            elif dist.get_rank() == 0:  # who has the first row; the other rank is told
                grad.to_local()[0].zero_()
        opt.step()
        opt.zero_grad()


def a_part_left_open(run: Run) -> None:
    """The last micro-batch leaves a head out that the others have used."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, head, other = map(run.compiled, (model.enter, model.head, model.other))
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                h = torch.tanh(enter(x))
                loss = ce(head(h), y) + (ce(other(h), y) if micro < MICRO - 1 else 0.0)
                loss.backward()
        run.log_loss(loss)
        opt.step()
        opt.zero_grad()


def updated_by_hand(run: Run) -> None:
    """No optimizer says when parameters have changed; a part of them is not read in the last micro-batch."""
    model = run.model
    enter, head = run.compiled(model.enter), run.compiled(model.head)
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                h = torch.tanh(enter(x))
                if micro == 0:
                    h = h + 0 * run.call(x)[0].detach().sum()  # read, but not trained
                loss = ce(head(h), y)
                loss.backward()
        run.log_loss(loss)
        run.log_grads()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
                else:
                    parameter.mul_(0.9)


def gradients_by_function(run: Run) -> None:
    """Gradients are asked for by torch.autograd.grad, in a window."""
    with run.no_sync():
        x, y = run.batch(0)
        loss = both(run.call(x), y)
        grads = torch.autograd.grad(loss, list(run.model.head.parameters()))
    for parameter, grad in zip(run.model.head.parameters(), grads, strict=True):
        parameter.grad = grad
    run.log_loss(loss)
    run.log_grads()


def gradients_by_function_at_the_end(run: Run) -> None:
    """What waits stays there while the last micro-batch is asked for a gradient by torch.autograd.grad first."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for x, y in batches[:-1]:
            with run.no_sync():
                both(run.call(x), y).backward()
        x, y = batches[-1]
        loss = both(run.call(x), y)
        (grad,) = torch.autograd.grad(loss, [run.model.head.weight], retain_graph=True)
        run.log("gradient by itself", grad)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def gradients_of_inputs(run: Run) -> None:
    """Adversarial examples: the gradient of the input alone is asked for, in each micro-batch before its backward."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                x.requires_grad_()
                (slope,) = torch.autograd.grad(both(run.call(x), y), x)
                loss = both(run.call((x + 0.1 * slope.sign()).detach()), y)
                loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def cleared_in_pairs(run: Run) -> None:
    """Two forwards have one backward, on top of reduced gradients; all is then set to zero in place."""
    opt = adamw(run.model.parameters())
    for batches in micro_batches(run):
        both(run.call(batches[0][0]), batches[0][1]).backward()
        for micro, (x, y) in enumerate(batches):
            with run.no_sync(last=micro == MICRO - 1):
                loss = both(run.call(x), y) + 0.5 * both(run.call(-x), y)
            loss.backward()
            if micro == 0:
                for parameter in run.model.parameters():
                    parameter.grad.zero_()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        opt.zero_grad()


def _own_forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    h = model.features(x)  # type: ignore[operator]
    return nn.functional.linear(h, model.head.weight) * model.gain, model.other(h)  # type: ignore[union-attr, operator]


def a_forward_on_the_instance(run: Run) -> None:
    """A front end fuses the head with the loss, in a forward that it sets on the model after it was sharded."""
    run.model.forward = MethodType(_own_forward, run.model)
    plain_mix = run.model.blocks[0].mix.forward
    run.model.blocks[0].mix.forward = lambda x: plain_mix(x).sigmoid()
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


LOOPS = {
    loop.__name__: loop
    for loop in (
        parts_accumulate,
        a_part_closes_what_the_whole_has_begun,
        cleared_to_none,
        cleared_to_zeros,
        cleared_in_place,
        cleared_on_top_of_a_window,
        added_to_a_window,
        scaled_in_between,
        masked_in_between,
        a_part_left_open,
        updated_by_hand,
        gradients_by_function,
        gradients_by_function_at_the_end,
        gradients_of_inputs,
        cleared_in_pairs,
        a_forward_on_the_instance,
    )
}
ASKED = "torch.autograd.grad was asked for the gradient of"
NOT_REDUCED = "are not reduced: no backward of a forward outside of no_sync has reached it"
REFUSED: Refused = {
    ("masked_in_between", mode): {1: "was changed in place between the forwards of a window"}
    for mode in ("eager", "fx", "inductor")
} | {("a_part_left_open", mode): {0: NOT_REDUCED, 1: NOT_REDUCED} for mode in ("eager", "fx", "inductor")}
REFUSED |= {("gradients_by_function", mode): {0: ASKED, 1: ASKED} for mode in ("eager", "fx", "inductor")}
TELLING = {
    ("parts_accumulate", "fx"): 1,
    ("parts_accumulate", "step"): 0,
    ("gradients_by_function", "fx"): 1,
    ("a_forward_on_the_instance", "fx"): 3,
}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_windows_follow_what_autograd_does(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)
