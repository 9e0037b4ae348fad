"""Ranks that decide by a number of their own: what they keep, load, step and average is compared, or made the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zgraph
from tests.support.ranks import Ranks
from tests.support.user_loops import refusal

Loop = Callable[[Any, Any, int], None]


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 4, generator=generator, dtype=torch.float64)


def first() -> bool:
    return dist.get_rank() == 0


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def backward(model: Any, number: int) -> Tensor:
    loss = model(batch(number)).square().mean()
    loss.backward()
    return loss.detach()


def own_best_weights(model: Any, opt: Any, number: int) -> None:
    """The best weights by each rank's own validation loss are those of another step."""
    if number == (0 if first() else 1):
        opt.kept = copy.deepcopy(model.state_dict())
    if number == 2:
        model.load_state_dict(opt.kept)


def own_snapshot(model: Any, opt: Any, number: int) -> None:
    if number == (0 if first() else 1):
        opt.kept = [one.detach().clone() for one in model.parameters()]
    if number == 2:
        with torch.no_grad():
            for one, kept in zip(model.parameters(), opt.kept, strict=True):
                one.copy_(kept)


def own_file(model: Any, opt: Any, number: int) -> None:
    own = 1.0 + dist.get_rank()
    model.load_state_dict({key: torch.full(one.shape, own) for key, one in model.state_dict().items()})


def back_on_one_rank(model: Any, opt: Any, number: int) -> None:
    if number == 0:
        opt.kept = copy.deepcopy(model.state_dict())
    elif first():
        model.load_state_dict(opt.kept)


def own_rate(model: Any, opt: Any, number: int) -> None:
    """A loop without an optimizer."""
    with torch.no_grad():
        for one in model.parameters():
            one.sub_((0.1 if first() else 0.01) * one.grad)


def average_on_one_rank(model: Any, opt: Any, number: int) -> None:
    if number == 0:
        opt.kept = copy.deepcopy(model)
    elif first():
        with torch.no_grad():
            for mean, one in zip(opt.kept.parameters(), model.parameters(), strict=True):
                mean.lerp_(one, 0.1)


def cleared_state(model: Any, opt: Any, number: int) -> None:
    if first():
        opt.state.clear()


def older_state(model: Any, opt: Any, number: int) -> None:
    if number == 0:
        opt.kept = copy.deepcopy(opt.state_dict())
    elif first():
        opt.load_state_dict(opt.kept)


def own_option(model: Any, opt: Any, number: int) -> None:
    """As timm's layer decay writes it, which some optimizers read."""
    opt.param_groups[0]["lr_scale"] = 1.0 if first() else 0.5


def steps_again(model: Any, opt: Any, number: int) -> None:
    if first():
        opt.step()


def signed_gradients(model: Any, opt: Any, number: int) -> None:
    """After the step, so that the gradients are those of the next one."""
    backward(model, number)
    if first():
        for one in model.parameters():
            one.grad = one.grad.sign()
    opt.step()


def train(loop: Loop, stage: int, steps: int = 4) -> Any:
    model = zgraph.shard(net(), zero_stage=stage)
    opt: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        opt.zero_grad()
        backward(model, number)
        opt.step()
        loop(model, opt, number)
    return model


def refused(loop: Loop, stage: int) -> str:
    return refusal(lambda: train(loop, stage))


LOOPS = (
    own_best_weights,
    own_snapshot,
    own_file,
    back_on_one_rank,
    own_rate,
    average_on_one_rank,
    cleared_state,
    older_state,
    own_option,
    steps_again,
    signed_gradients,
)
EVERY = [(average_on_one_rank, 1), *((loop, stage) for loop in LOOPS for stage in (0, 3))]


# Each waits for the watch, which looks twice; every loop is a test of its own because the error ends it.
@pytest.mark.parametrize(("loop", "stage"), EVERY)
def test_ranks_that_decide_otherwise_are_told(ranks: Ranks, loop: Loop, stage: int) -> None:
    for text in ranks.run(refused, loop, stage):
        assert text.startswith("zgraph: rank") and "rank 0" in text and "rank 1" in text, text


def saved_by_two(stage: int) -> str:
    model = train(lambda model, opt, number: None, stage)
    kept = copy.deepcopy(model.state_dict())
    backward(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if first():
        model.load_state_dict(kept)
    return refusal(lambda: zgraph.full_state_dict(model))


def test_weights_of_two_steps_are_not_saved_as_one_model(ranks: Ranks) -> None:
    for text in ranks.run(saved_by_two, 3):
        assert "full_state_dict" in text and "rank 0" in text and "rank 1" in text, text


def two_optimizers(stage: int, change: str) -> str:
    model = zgraph.shard(net(), zero_stage=stage)
    parts = list(model.parameters())
    rates = (0.1, 0.2) if change == "rate" and first() else (0.1, 0.1)
    opts = [torch.optim.SGD(part, lr=rate) for part, rate in zip((parts[:2], parts[2:]), rates, strict=True)]
    if change == "members" and first():
        opts[1] = torch.optim.SGD(parts[2:3], lr=0.1)

    def loop() -> None:
        for number in range(2):
            backward(model, number)
            opts[0].step()
            if change != "skipped" or first():
                opts[1].step()

    return refusal(loop)


@pytest.mark.parametrize(
    ("stage", "change"),
    [(3, "skipped"), (0, "skipped"), (3, "rate"), (0, "rate"), (0, "members"), (3, "members")],
)
def test_steps_of_a_second_optimizer_are_compared(ranks: Ranks, stage: int, change: str) -> None:
    for text in ranks.run(two_optimizers, stage, change):
        assert "rank 0" in text and "rank 1" in text and "optimizer.step()" in text, text


# --- numbers in a captured step ---------------------------------------------------------------------------------------


def by_tokens(stage: int, lowering: str, equal: bool) -> Any:
    model, plain = zgraph.shard(net(), zero_stage=stage), net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def lines(x: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
        opt.zero_grad()
        loss = (model(x) * mask).square().sum()
        loss.backward()
        count = mask.sum()
        for one in model.parameters():
            one.grad.div_(count)
            one.grad.mul_(factor)
        opt.step()
        return loss.detach()

    step: Any = zgraph.training_step(model, opt, options={"lowering": lowering})(lines)
    rank = 0 if equal else dist.get_rank()
    mask = torch.ones(4, 1, dtype=torch.float64)
    mask[: 1 + rank] = 0
    factor = torch.tensor(0.5)
    if not equal:
        return refusal(lambda: step(batch(0), mask, factor))
    for number in range(2):
        step(batch(number), mask, factor)
    for number in range(2):
        sums = [torch.zeros_like(one) for one in plain.parameters()]
        plain.zero_grad()
        (plain(batch(number)) * mask).square().sum().backward()
        for one, total in zip(plain.parameters(), sums, strict=True):
            total.copy_(cast(Tensor, one.grad))
            dist.all_reduce(total)
            with torch.no_grad():
                one.sub_(0.1 * total / 2 / mask.sum() * 0.5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-12, atol=1e-12)
    return ""


@pytest.mark.parametrize(
    ("stage", "lowering"),
    [(3, "fx"), (0, "fx"), (1, "fx"), (3, "inductor")],  # Inductor compiles C++
)
@pytest.mark.parametrize("equal", [True, False])
def test_numbers_by_which_a_captured_step_changes_gradients(
    ranks: Ranks, stage: int, lowering: str, equal: bool
) -> None:
    for text in ranks.run(by_tokens, stage, lowering, equal):
        assert equal or ("by the numbers 3.0, 0.5" in text and "by the numbers 2.0, 0.5" in text), text


def by_a_drawn_number(differ: bool) -> str:
    model = zgraph.shard(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() if differ else 0)

    @zgraph.training_step(model, opt, options={"lowering": "fx"})
    def step(x: Tensor) -> Tensor:
        opt.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        drawn = torch.rand(())
        for one in model.parameters():
            one.grad.mul_(drawn)
        opt.step()
        return loss.detach()

    return refusal(lambda: step(batch(0))) if differ else f"{step(batch(0)).item() > 0}"


@pytest.mark.parametrize(("differ", "expected"), [(False, "True"), (True, "by the numbers")])
def test_a_number_that_a_captured_step_draws_is_compared(ranks: Ranks, differ: bool, expected: str) -> None:
    for text in ranks.run(by_a_drawn_number, differ):
        assert expected in text, text


# --- losses of closures -----------------------------------------------------------------------------------------------


class Polyak(torch.optim.Optimizer):
    """Chooses its rate by the loss that the closure returns (Loizou et al. 2021, arXiv 2002.10542, equation 2)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        squares = sum(one.grad.square().sum() for one in parameters).item()
        for one in parameters:
            one.sub_(one.grad, alpha=0.5 * loss.item() / squares)
        return loss


class Wrapped(torch.optim.Optimizer):
    """Hands its closure on to another optimizer, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = line_searched(parameters)

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.inner.step(closure)


def line_searched(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", max_iter=6)


def by_closures(build: Callable[[Any], torch.optim.Optimizer], stage: int, reduction: Any) -> None:
    """Equal to the plain model whose loss is that of both ranks' batches."""
    model, plain = zgraph.shard(net(), zero_stage=stage, reduction=reduction), net()
    opt, other = build(model.parameters()), build(plain.parameters())
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            opt.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            return loss

        def of_both(number: int = number) -> Tensor:
            other.zero_grad()
            batches = [torch.empty(4, 4, dtype=torch.float64) for _ in range(dist.get_world_size())]
            dist.all_gather(batches, batch(number))
            loss = plain(torch.cat(batches)).square().mean() * (1 if reduction == "mean" else len(batches))
            loss.backward()
            return loss

        found, expected = opt.step(cast(Any, closure)), other.step(cast(Any, of_both))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0, check_dtype=False)
    for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(cast(Any, one).detach().full_tensor(), expected.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("build", "stage", "reduction"),
    [(Polyak, 3, "mean"), (Wrapped, 1, "sum"), (Polyak, 0, "sum"), (line_searched, 3, "mean")],
)
def test_optimizers_step_by_the_loss_of_all_ranks(ranks: Ranks, build: Any, stage: int, reduction: str) -> None:
    ranks.run(by_closures, build, stage, reduction)


class Deaf(torch.optim.SGD):
    """Never calls its closure."""

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().step()


def stepped_in_an_open_window(stage: int) -> str:
    model = zgraph.shard(net(), zero_stage=stage)
    opt = Deaf(model.parameters(), lr=0.1)
    with zgraph.no_sync(model):
        model(batch(0)).square().mean().backward()
    with pytest.raises(zgraph.ZgraphError) as caught:
        opt.step(lambda: 0.0)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_closure_that_is_never_called_closes_no_window(ranks: Ranks, stage: int) -> None:
    for text in ranks.run(stepped_in_an_open_window, stage):
        assert "whose gradients from forwards under no_sync are not reduced" in text


def scaled_in_a_closure(build: Callable[[Any], torch.optim.Optimizer], stage: int) -> str:
    model = zgraph.shard(net(), zero_stage=stage)
    opt = build(model.parameters())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = backward(model, 0)
        for one in model.parameters():
            cast(Tensor, one.grad).div_(dist.get_rank() + 1)
        return loss

    return refusal(lambda: opt.step(cast(Any, closure)))


@pytest.mark.parametrize(("build", "stage"), [(torch.optim.AdamW, 3), (torch.optim.SGD, 0), (line_searched, 3)])
def test_gradients_that_a_closure_changes_are_compared(ranks: Ranks, build: Any, stage: int) -> None:
    """Lightning passes all of a step as a closure."""
    for text in ranks.run(scaled_in_a_closure, build, stage):
        assert "rank 0" in text and "rank 1" in text and "after its closure" in text, text


# --- the same code on all ranks ---------------------------------------------------------------------------------------


def reduced_again(stage: int) -> str:
    model = zgraph.shard(net(), zero_stage=stage)
    backward(model, 0)
    return refusal(lambda: [dist.all_reduce(one.grad) for one in model.parameters()])


def test_gradients_that_a_loop_reduces_again_are_refused(ranks: Ranks) -> None:
    """Each rank has other rows; replicas may be added up."""
    for text in ranks.run(reduced_again, 3):
        assert "would mix different rows" in text and "delete the line" in text


class Gained(nn.Module):
    """Its first parameter, a number, is replicated where all others are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()) * self.gain


def overflowed(stage: int, fused: bool) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    model = zgraph.shard(Gained(), zero_stage=stage)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for number in range(2):
        scaler.scale(model(batch(number)).square().mean()).backward()
        if number == 0:
            model.layer.weight.grad[3, 0] = torch.inf
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    steps = [float(state["step"]) for state in opt.state.values()]
    return scaler.get_scale(), steps


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stage", [3, 0])
def test_torchs_scaler_skips_a_step_on_all_ranks(ranks: Ranks, stage: int, fused: bool) -> None:
    """Only one rank has the infinite element."""
    for scale, steps in ranks.run(overflowed, stage, fused):
        assert scale == 512.0 and set(steps) <= {1.0}, (scale, steps)


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def crossed(stage: int) -> str:
    """One rank is in its backward, the other in its next forward: of one weight, in messages of one size."""
    torch.manual_seed(0)
    model = zgraph.shard(Single(), zero_stage=stage)

    def loop() -> None:
        loss = model(batch(0)).sum()
        if first():
            loss.backward()
        else:
            with torch.no_grad():
                model(batch(1))

    return refusal(loop)


def test_a_reduction_never_meets_a_gather_of_its_weight(ranks: Ranks) -> None:
    for text in ranks.run(crossed, 3):
        assert "reduction of weight" in text and "all_gather of weight" in text, text
