"""Loops that change the model between steps, or run copies and parts of it beside it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ranks import Ranks
from tests.support.user_loops import MODES, Refused, Run, adamw, both, ce, check, rows


def plain_steps(run: Run, opt: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        x, y = run.batch(number)
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def frozen_and_unfrozen(run: Run) -> None:
    """requires_grad_ between steps, after shard and compile; the optimizer has everything."""
    model, opt = run.model, adamw(run.model.parameters())

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches(4):
        model.enter.requires_grad_(step % 2 == 1)
        model.blocks[0].mix.weight.requires_grad_(step != 1)
        run.log_loss(train(x, y))
        run.log_grads()


def unfrozen_into_a_new_group(run: Run) -> None:
    """Lightning's BaseFinetuning: what is unfrozen later joins the optimizer as a new group."""
    model = run.model
    model.enter.requires_grad_(False)
    model.blocks.requires_grad_(False)
    opt = adamw([p for p in model.parameters() if p.requires_grad])

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches(4):
        if step == 2:
            model.blocks.requires_grad_(True)
            opt.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})
        run.log_loss(train(x, y))
        run.log_grads()


def a_part_of_the_parameters(run: Run) -> None:
    """The optimizer has a part of the parameters, while all of them get gradients, which nobody clears."""
    model = run.model
    opt = adamw([*model.head.parameters(), *model.blocks[1].parameters()])
    for _, x, y in run.batches():
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def evaluated_between(run: Run) -> None:
    """Training and evaluation by torch.set_grad_enabled, in one loop over phases."""
    model, opt = run.model, adamw(run.model.parameters())
    for number in range(4):
        x, y = run.batch(number)
        training = number % 2 == 0
        model.train(training)
        opt.zero_grad()
        with torch.set_grad_enabled(training):
            loss = both(run.call(x), y)
            if training:
                loss.backward()
                opt.step()
        run.log_loss(loss)
        run.log_grads()


def inference_between(run: Run) -> None:
    """An evaluation under inference_mode before the first step, and between forward and backward."""
    model, opt = run.model, adamw(run.model.parameters())

    def evaluate(x: Tensor, y: Tensor) -> None:
        model.eval()
        with torch.inference_mode():
            loss = both(run.call(x), y).clone()
        model.train()
        run.log_loss(loss)

    for step, x, y in run.batches():
        if step == 0:
            evaluate(x, y)
        opt.zero_grad()
        loss = both(run.call(x), y)
        evaluate(x, y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def averaged_copy(run: Run) -> None:
    """A deepcopy of the sharded model follows it by lerp_, and teaches it."""
    model, opt = run.model, adamw(run.model.parameters())
    teacher = copy.deepcopy(model).requires_grad_(False)
    called = run.compiled(teacher)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        with torch.no_grad():
            target = called(x)[1]
        first, second = run.call(x)
        loss = ce(first, y) + (second - target).square().mean()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.25)
        return loss.detach()

    run.each_batch(train)
    for name, parameter in teacher.named_parameters():
        run.log(f"teacher's {name}", parameter)


def functional_call(run: Run) -> None:
    """A forward with weights moved along their gradients (MAML of first order), by torch.func.functional_call."""
    model, opt = run.model, adamw(run.model.parameters())
    for _, x, y in run.batches():
        opt.zero_grad()
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = torch.autograd.grad(both(run.call(x), y), parameters)
        moved = {name: p - 0.1 * grad for name, p, grad in zip(names, parameters, grads, strict=True)}
        loss = both(torch.func.functional_call(model, moved, (x,)), y)
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


def transformed(run: Run) -> None:
    """torch.func.grad_and_value along the input."""
    model, opt = run.model, adamw(run.model.parameters())

    def of(x: Tensor, y: Tensor) -> Tensor:
        return both(model(x), y)

    for _, x, y in run.batches():
        slope, loss = torch.func.grad_and_value(of)(x, y)
        run.log_loss(loss)
        opt.zero_grad()
        loss = both(run.call(x + 0.1 * slope.sign()), y)
        loss.backward()
        run.log_grads()
        opt.step()


def new_module_after_shard(run: Run) -> None:
    """A head that is put in place of another after sharding, and is not sharded."""
    torch.manual_seed(11)
    run.model.head = nn.Linear(7, 3)
    plain_steps(run, adamw(run.model.parameters()), 0, 3)


def new_modules_sharded_later(run: Run) -> None:
    """As the refusals say: a new head and a new parameter, and zgraph.shard once more."""
    opt = adamw(run.model.parameters())
    plain_steps(run, opt, 0, 1)
    torch.manual_seed(11)
    run.model.head = nn.Linear(7, 3)
    run.model.blocks[0].norm.weight = nn.Parameter(torch.full((7,), 1.5))
    run.model.blocks[0].scale = nn.Parameter(torch.full((7,), 1.5))
    run.model.blocks[0].register_forward_hook(lambda module, args, result: result * module.scale)
    run.shard_again()
    run.call = run.compiled(run.model)
    plain_steps(run, adamw(run.model.parameters()), 1, 4)


def new_parameter_after_shard(run: Run) -> None:
    """A parameter that a module gets after sharding."""
    run.model.blocks[0].scale = nn.Parameter(torch.full((7,), 1.5))
    run.model.blocks[0].register_forward_hook(lambda module, args, result: result * module.scale)
    plain_steps(run, adamw(run.model.parameters()), 0, 3)


def tied_after_shard(run: Run) -> None:
    """Two weights are tied after sharding."""
    run.model.other.weight = run.model.head.weight
    plain_steps(run, adamw(run.model.parameters()), 0, 3)


def removed_after_shard(run: Run) -> None:
    """A part is replaced by nn.Identity after sharding."""
    run.model.blocks[1] = nn.Identity()
    plain_steps(run, adamw(run.model.parameters()), 0, 3)


def swapped_after_shard(run: Run) -> None:
    """Two equal parts change places between steps."""
    opt = adamw(run.model.parameters())
    plain_steps(run, opt, 0, 2)
    run.model.blocks[0], run.model.blocks[1] = run.model.blocks[1], run.model.blocks[0]
    plain_steps(run, opt, 2, 4)


def numbers_changed(run: Run) -> None:
    """Python numbers of the loop and of the model change: how many layers, the weight of a loss, a temperature."""
    model, opt = run.model, adamw(run.model.parameters())
    weight = 1.0

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        first, second = run.call(x)
        loss = F.cross_entropy(first, y) + weight * F.cross_entropy(second, y)
        loss.backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches(4):
        model.depth = 1 + step % 3
        weight = 0.5 * step
        run.log_loss(train(x, y))
        run.log_grads()


def hooks_on_modules(run: Run) -> None:
    """Forward hooks that change inputs and outputs, and a backward hook that scales what goes back."""
    model, opt = run.model, adamw(run.model.parameters())
    model.blocks[0].register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    model.blocks[1].register_forward_hook(lambda module, args, result: result - 0.1 * args[0])
    model.head.register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0],))
    run.call = run.compiled(model)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def hooks_on_activations(run: Run) -> None:
    """A forward hook keeps an activation, to which the loss adds a penalty; its own hook keeps its gradient."""
    model, opt = run.model, adamw(run.model.parameters())
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        kept["features"] = result

    model.blocks[0].register_forward_hook(keep)
    run.call = run.compiled(model)

    @run.step(opt)
    def train(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = both(run.call(x), y) + 0.1 * kept["features"].square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    run.each_batch(train)


def heads_in_turns(run: Run) -> None:
    """Tasks in turns: what the other task's head has had as gradient stays None."""
    model, opt = run.model, adamw(run.model.parameters())
    enter, heads = run.compiled(model.enter), [run.compiled(model.head), run.compiled(model.other)]

    @run.step(opt)
    def train(x: Tensor, y: Tensor, task: int) -> Tensor:
        opt.zero_grad()
        loss = ce(heads[task](torch.tanh(enter(x))), y)
        loss.backward()
        opt.step()
        return loss.detach()

    for step, x, y in run.batches(4):
        run.log_loss(train(x, y, step % 2))
        run.log_grads()


def ranks_without_rows(run: Run) -> None:
    """A rank without usable rows keeps in step by zero times its output."""
    opt = adamw(run.model.parameters())
    for step, x, y in run.batches():
        opt.zero_grad()
        keep = torch.cat([torch.full((4,), float(rank != step % 2)) for rank in run.ranks])
        rows = sum(F.cross_entropy(output, y, reduction="none") for output in run.call(x))
        loss = (rows * keep).sum() / 4
        if not run.is_sharded:
            loss = loss / 2
        loss.backward()
        run.log_loss(loss)
        run.log_grads()
        opt.step()


LOOPS = {
    loop.__name__: loop
    for loop in (
        frozen_and_unfrozen,
        unfrozen_into_a_new_group,
        a_part_of_the_parameters,
        evaluated_between,
        inference_between,
        averaged_copy,
        functional_call,
        transformed,
        new_module_after_shard,
        new_parameter_after_shard,
        new_modules_sharded_later,
        tied_after_shard,
        removed_after_shard,
        swapped_after_shard,
        numbers_changed,
        hooks_on_modules,
        hooks_on_activations,
        heads_in_turns,
        ranks_without_rows,
    )
}
FUNCTIONAL = "inside a transform of torch.func"
ADDED = r"zgraph: head.weight, head.bias of a sharded Net came after zgraph.shard"
NEW = r"zgraph: blocks.0.scale of a sharded Net came after zgraph.shard"
OUTSIDE = "neither an argument of the step, nor a parameter or buffer of its model"
REFUSED: Refused = {
    **{("transformed", mode): FUNCTIONAL for mode in MODES},
    **{("new_module_after_shard", mode): ADDED for mode in MODES},
    **{("new_parameter_after_shard", mode): NEW for mode in MODES},
    ("averaged_copy", "step"): OUTSIDE,  # what the copy's forward reads is no variable of the function
}
TELLING = {
    ("transformed", "fx"): 0,
    ("new_module_after_shard", "fx"): 1,
    ("new_parameter_after_shard", "fx"): 3,
    ("frozen_and_unfrozen", "fx"): 2,
    ("heads_in_turns", "fx"): 1,
    ("averaged_copy", "step"): 3,
}


@pytest.mark.parametrize(("name", "mode", "stages"), rows(LOOPS, TELLING))
def test_a_model_that_changes_between_steps(ranks: Ranks, name: str, mode: str, stages: tuple[int, ...]) -> None:
    check(ranks, LOOPS[name], mode, stages, REFUSED)
