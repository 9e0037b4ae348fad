"""Loops that call parts, and run forwards and backwards in other numbers and orders than one each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.ranks import Ranks
from tests.support.user_loops import Refused, Run, adamw, both, ce, check, rows


def one_of_each(run: Run) -> None:
    """The loop that everything else differs from."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def parts_alone(run: Run) -> None:
    """Parts are called one by one, never the root."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, head = run.compiled(model.enter), run.compiled(model.head)
    blocks = [run.compiled(block) for block in model.blocks]

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        h = torch.tanh(enter(x))
        for block in reversed(blocks):
            h = block(h)
        loss = ce(head(h), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def a_part_then_the_whole(run: Run) -> None:
    """A part is called before the whole, and both losses have one backward."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, other = run.compiled(model.enter), run.compiled(model.other)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        early = ce(other(torch.tanh(enter(x))), y)
        loss = both(run.call(x), y) + 0.5 * early
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def two_forwards_one_backward(run: Run) -> None:
    """Two views of the batch, one loss of both."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        first, second = run.call(x), run.call(x * 1.1)
        loss = both(first, y) + (first[0] - second[1]).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def forwards_then_backwards(run: Run) -> None:
    """All forwards come first, then their backwards, the first or the last one first."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor, turned: bool) -> Tensor:
        opt.zero_grad()
        losses = [both(run.call(part), y) / 3 for part in (x, 2 * x, -x)]
        for loss in reversed(losses) if turned else losses:
            loss.backward()
        opt.step()
        return sum(loss.detach() for loss in losses)  # pyright: ignore[reportReturnType]

    for step, x, y in run.batches():
        run.log_loss(train(x, y, step % 2 == 1))
        run.log_grads()


def one_backward_per_loss(run: Run) -> None:
    """Two losses of one forward; each one's gradients are taken for themselves, then weighed."""
    model, opt = run.model, torch.optim.SGD(run.model.parameters(), lr=0.05)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt.zero_grad()
        first, second = run.call(x)
        losses = ce(first, y), ce(second, y)
        losses[0].backward(retain_graph=True)
        kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        opt.zero_grad()
        losses[1].backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                p.grad = 0.5 * p.grad + kept[name] if name in kept else 0.5 * p.grad
            else:
                p.grad = kept.get(name)
        opt.step()
        return losses[0].detach(), losses[1].detach()

    for _, x, y in run.batches():
        for loss in train(x, y):
            run.log_loss(loss)
        run.log_grads()


def retained_in_some_steps(run: Run) -> None:
    """A graph whose first backward kept nothing has a later one that does: torch.compile's own backends refuse that."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)

    @run.step(opt)
    def train(x: Tensor, y: Tensor, again: bool) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward(retain_graph=again)
        if again:
            (0.5 * loss).backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches():
        run.log_loss(train(x, y, step % 2 == 1))
        run.log_grads()


def separate_outputs(run: Run) -> None:
    """Outputs that share no graph: a backward for each, without retain_graph."""
    model, opt = run.model, adamw(run.model.parameters())
    head, other = run.compiled(model.head), run.compiled(model.other)

    @run.step(opt)
    def train(h: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        first, second = head(h), other(h)
        loss = ce(first, y)
        loss.backward()
        F.cross_entropy(second, y).backward()
        opt.step()
        return loss.detach()

    for _, x, y in run.batches():
        run.log_loss(train(F.pad(x, (0, 2)), y))
        run.log_grads()


def several_roots(run: Run) -> None:
    """torch.autograd.backward of a list of losses, one of them with a gradient of its own."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        first, second = run.call(x)
        loss = ce(first, y)
        torch.autograd.backward([loss, second], [torch.ones_like(loss), second.detach().sign() / second.shape[0]])
        opt.step()
        return loss.detach()

    run.each_batch(train)


def part_of_the_output(run: Run) -> None:
    """The loss takes both outputs in even steps, one in odd ones."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)

    @run.step(opt)
    def train(x: Tensor, y: Tensor, both: bool) -> Tensor:
        opt.zero_grad(set_to_none=True)
        first, second = run.call(x)
        loss = ce(first, y) + (F.cross_entropy(second, y) if both else 0.0)
        loss.backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches(4):
        run.log_loss(train(x, y, step % 2 == 0))
        run.log_grads()


def forwards_without_backward(run: Run) -> None:
    """A forward with gradients whose output is dropped, kept for later, or only looked at."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        run.call(3 * x)
        loss = both(run.call(x), y)
        kept = run.call(2 * x)[0]
        loss.backward()
        opt.step()
        return loss.detach() + kept.detach().sum() * 0

    run.each_batch(train)


def detached_targets(run: Run) -> None:
    """A second forward gives the target, and is detached, as BYOL and bootstrapped values do."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        target = run.call(1.1 * x)[1].detach()
        first, second = run.call(x)
        loss = ce(first, y) + (second - target).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def split_by_hand(run: Run) -> None:
    """The features are cut from their graph; what their copy has got is sent through it in a second backward."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, head = run.compiled(model.enter), run.compiled(model.head)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        h = enter(x)
        cut = h.detach().requires_grad_()
        loss = ce(head(torch.tanh(cut)), y)
        loss.backward()
        h.backward(cut.grad)
        opt.step()
        return loss.detach()

    run.each_batch(train)


def cached_features(run: Run) -> None:
    """GradCache: features without gradients, the loss of all of them, then forwards again, chunk by chunk."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        chunks = x.chunk(2)
        with torch.no_grad():
            outputs = torch.cat([sum(run.call(chunk)) for chunk in chunks])
        outputs = outputs.requires_grad_()
        loss = ce(outputs, y)
        (cache,) = torch.autograd.grad(loss, outputs)
        for chunk, grad in zip(chunks, cache.chunk(2), strict=True):
            (sum(run.call(chunk)) * grad).sum().backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def carried_state(run: Run) -> None:
    """Truncated backpropagation through time: a state goes from step to step, detached."""
    model, opt = run.model, adamw(run.model.parameters())
    block, head = run.compiled(model.blocks[0]), run.compiled(model.head)
    state = torch.zeros(4 * len(run.ranks), 7)

    @run.step(opt)
    def train(state: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt.zero_grad()
        loss = torch.zeros(())
        for number in range(3):
            state = block(state + (number + 1) * F.pad(x, (0, 2)))
            loss = loss + ce(head(state), y) / 3
        loss.backward()
        opt.step()
        return loss.detach(), state.detach()

    for _, x, y in run.batches():
        loss, state = train(state, x, y)
        run.log_loss(loss)
        run.log_grads()


def losses_summed_over_batches(run: Run) -> None:
    """Accumulation by one sum of losses and one backward."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = torch.stack([both(run.call(number * x), y) for number in (1, 2, 3)]).mean()
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def accumulated_in_pairs(run: Run) -> None:
    """Micro-batches of two forwards and one backward, of which the last one closes the window."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        with run.no_sync():
            (both(run.call(x), y) + 0.5 * both(run.call(-x), y)).backward()
        loss = both(run.call(2 * x), y) + 0.5 * both(run.call(-2 * x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


LOOPS = {
    loop.__name__: loop
    for loop in (
        one_of_each,
        parts_alone,
        a_part_then_the_whole,
        two_forwards_one_backward,
        forwards_then_backwards,
        one_backward_per_loss,
        retained_in_some_steps,
        separate_outputs,
        several_roots,
        part_of_the_output,
        forwards_without_backward,
        detached_targets,
        split_by_hand,
        cached_features,
        carried_state,
        losses_summed_over_batches,
        accumulated_in_pairs,
    )
}
REFUSED: Refused = {}
TELLING = {
    ("parts_alone", "fx"): 1,
    ("forwards_then_backwards", "fx"): 2,
    ("part_of_the_output", "fx"): 0,
    ("separate_outputs", "step"): 0,
    ("split_by_hand", "step"): 2,
}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_forwards_and_backwards_in_any_order(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)
