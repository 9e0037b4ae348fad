"""Loops that treat gradients and optimizers in ways of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import STEPS, Refused, Run, adamw, both, ce, check, copied, rows


def clipped_by_value(run: Run) -> None:
    """torch.nn.utils.clip_grad_value_."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        opt.step()
        return loss.detach()

    run.each_batch(train)


def scaled_in_place(run: Run) -> None:
    """Gradients are divided in place by what was counted, as torchtune does with tokens."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        total = torch.zeros(())
        for part in (x, -x):
            loss = 8.0 * both(run.call(part), y)
            loss.backward()
            total = total + loss.detach()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / 16)
        opt.step()
        return total / 16

    run.each_batch(train)


def normalized_gradients(run: Run) -> None:
    """Each gradient is divided by its own norm, and what is not finite replaced."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.05)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad = p.grad / (p.grad.norm() + 1.0)
        opt.step()
        return loss.detach()

    run.each_batch(train)


def summed_outside(run: Run) -> None:
    """Gradients of each micro-batch are moved to sums of the loop's own, and given back before the step."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        sums: dict[str, Tensor] = {}
        total = torch.zeros(())
        for part in (x, -x):
            loss = both(run.call(part), y) / 2
            loss.backward()
            total = total + loss.detach()
            for name, p in run.model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad if name in sums else p.grad.clone()
                    p.grad = None
        for name, p in run.model.named_parameters():
            p.grad = sums.get(name)
        opt.step()
        return total

    run.each_batch(train)


def without_an_optimizer(run: Run) -> None:
    """SGD by hand, under no_grad."""
    model = run.model
    for _, x, y in run.batches():
        loss = both(run.call(x), y)
        loss.backward()
        run.log_grads()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.05)
                p.grad = None
        run.log_loss(loss)


def without_an_optimizer_by_data(run: Run) -> None:
    """SGD by hand, through `.data`, as tutorials have it; gradients are cleared with zero_()."""
    model = run.model
    for _, x, y in run.batches():
        loss = both(run.call(x), y)
        loss.backward()
        run.log_grads()
        for p in model.parameters():
            p.data.add_(p.grad.data, alpha=-0.05)
            p.grad.zero_()
        run.log_loss(loss)


def zeroed_everywhere(run: Run) -> None:
    """zero_grad before forward, between forward and backward, after the step; to None and to zeros in turns."""
    opt = adamw(run.model.parameters())
    for step, x, y in run.batches(4):
        if step % 2:
            opt.zero_grad(set_to_none=False)
        loss = both(run.call(x), y)
        run.model.zero_grad(set_to_none=step == 2)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        if step == 0:
            opt.zero_grad()


def never_zeroed(run: Run) -> None:
    """Gradients add up over steps: a momentum by hand, scaled down after each step."""
    opt = torch.optim.SGD(run.model.parameters(), lr=0.02)
    for _, x, y in run.batches(4):
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        for p in run.model.parameters():
            p.grad.mul_(0.5)


def closures(run: Run) -> None:
    """optimizer.step(closure) does forward and backward, as Lightning does for every optimizer."""
    opt = adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = both(run.call(x), y)
            loss.backward()
            return loss

        return opt.step(closure).detach()  # pyright: ignore[reportOptionalMemberAccess]

    run.each_batch(train)


def last_micro_batch_in_a_closure(run: Run) -> None:
    """Lightning accumulates outside of the closure, and runs the closing micro-batch inside."""
    opt = adamw(run.model.parameters())
    if run.is_sharded:
        zgraph.step_on_shards(opt)
    for number in range(STEPS):
        (x, y), (last_x, last_y) = run.batch(2 * number), run.batch(2 * number + 1)
        opt.zero_grad()
        with run.no_sync():
            (both(run.call(x), y) / 2).backward()

        def closure(x: Tensor = last_x, y: Tensor = last_y) -> Tensor:
            loss = both(run.call(x), y) / 2
            loss.backward()
            run.log_grads()
            return loss

        run.log_loss(opt.step(closure))


def lbfgs(run: Run) -> None:
    """An optimizer that runs its closure several times, and looks at norms of all gradients."""
    opt = torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=2, tolerance_grad=0, tolerance_change=0)
    for _, x, y in run.batches(2):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = both(run.call(x), y)
            loss.backward()
            return loss

        run.log_loss(opt.step(closure))


def sharpness_aware(run: Run) -> None:
    """SAM: weights are moved along their gradients, a second backward runs there, and they are moved back."""
    model, opt = run.model, adamw(run.model.parameters())
    for _, x, y in run.batches():
        opt.zero_grad()
        both(run.call(x), y).backward()
        moves = [p.grad * 0.05 for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def two_optimizers_in_turns(run: Run) -> None:
    """A GAN by Lightning's toggle_optimizer: what the other optimizer has is frozen for the time of a turn."""
    model = run.model
    parts = [
        [*model.enter.parameters(), *model.blocks.parameters()],
        [*model.head.parameters(), *model.other.parameters()],
    ]
    opts = [adamw(part) for part in parts]
    for step, x, y in run.batches(4):
        turn = step % 2
        for place, part in enumerate(parts):
            for p in part:
                p.requires_grad_(place == turn)
        loss = both(run.call(x), y) * (1 if turn else -0.1)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opts[turn].step()
        opts[turn].zero_grad()


def generator_and_critic(run: Run) -> None:
    """Two optimizers over one model, two backwards a step, of which one goes through what the other has updated."""
    model = run.model
    makers = [*model.enter.parameters(), *model.blocks.parameters()]
    opt_g, opt_d = adamw(makers), adamw([*model.head.parameters(), model.gain])
    features, head = run.compiled(model.enter), run.compiled(model.head)

    @run.step([opt_g, opt_d])
    def train(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        opt_d.zero_grad()
        made = torch.tanh(features(x))
        loss_d = ce(head(made.detach()), y)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = -0.1 * ce(head(made), y)
        loss_g.backward()
        opt_g.step()
        return loss_d.detach(), loss_g.detach()

    for _, x, y in run.batches():
        for loss in train(x, y):
            run.log_loss(loss)
        run.log_grads()


def gradient_noise_and_sign(run: Run) -> None:
    """signSGD by hand, with an average of gradients that the loop keeps in the shape of the parameters."""
    model = run.model
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for _, x, y in run.batches():
        loss = both(run.call(x), y)
        model.zero_grad()
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        with torch.no_grad():
            for p, average in zip(model.parameters(), kept, strict=True):
                average.lerp_(p.grad, 0.3)
                p.sub_(0.01 * torch.tanh(30 * average))


def rolled_back(run: Run) -> None:
    """The best weights so far are kept in memory, and loaded again, with the optimizer's state."""
    model, opt = run.model, adamw(run.model.parameters())
    kept: dict[str, object] = {}
    for step, x, y in run.batches(4):
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        if step == 0:
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            state = {key: dict(value) for key, value in opt.state_dict()["state"].items()}
            state = {key: {k: v.clone() for k, v in value.items()} for key, value in state.items()}
        if step == 2:
            model.load_state_dict(kept)
            opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})


def lookahead(run: Run) -> None:
    """Slow weights follow the fast ones every second step, and are copied back into them."""
    model, opt = run.model, adamw(run.model.parameters())
    slow = copied(model.parameters())
    for step, x, y in run.batches(4):
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()
        if step % 2:
            with torch.no_grad():
                for p, old in zip(model.parameters(), slow, strict=True):
                    old.lerp_(p, 0.5)
                    p.copy_(old)


LOOPS = {
    loop.__name__: loop
    for loop in (
        clipped_by_value,
        scaled_in_place,
        normalized_gradients,
        summed_outside,
        without_an_optimizer,
        without_an_optimizer_by_data,
        zeroed_everywhere,
        never_zeroed,
        closures,
        last_micro_batch_in_a_closure,
        lbfgs,
        sharpness_aware,
        two_optimizers_in_turns,
        generator_and_critic,
        gradient_noise_and_sign,
        rolled_back,
        lookahead,
    )
}
REFUSED: Refused = {
    ("closures", "step"): "passes a closure to optimizer.step(); compute the loss before the step",
}
TELLING = {
    ("closures", "step"): 1,
    ("sharpness_aware", "fx"): 1,
    ("generator_and_critic", "step"): 3,
}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_gradients_and_optimizers_of_a_loop(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)
