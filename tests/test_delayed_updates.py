"""Updates that are applied one call late, as one graph and as plain lines that keep a list of gradients."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.late_updates import LateSteps
from tests.support.lazy_streams import late_gpu
from tests.support.ranks import Ranks, worlds
from tests.support.step_gate import Lion
from tests.support.step_scripts import LR, Net
from tests.support.tiers import long, slow
from tests.support.whole_steps import Case, Loop, Outcome, assert_same, train
from tests.support.whole_tensors import whole
from zgraph.optimizers.pending_gradients import GRADIENT, SKIP, apply_pending, has_pending
from zgraph.runtime.offload.copy_lanes import ThreadLanes
from zgraph.step.training_step import TrainingStep

P = zgraph.passes
STEPS = 5


def late(after: int, params: Any = None) -> zgraph.Offload:
    return zgraph.Offload(params=params, optimizer="host", delayed_update_after=after)


# Every two of these features stand together in some row, with stages 0 to 3 and different numbers of calls before.
CASES = {
    "stage 3": Case(at_rest=late(2, "host"), clip="torch", schedule=True),
    "stage 2, from the first call": Case(at_rest=late(0), stage=2, clip="zgraph", precision="bf16"),
    "stage 1": Case(at_rest=late(1), stage=1, optimizer="sgd", accumulation=2, no_sync=True, schedule=True),
    "stage 0": Case(at_rest=late(2, "host"), stage=0, clip="torch", accumulation=2, no_sync=True),
    "stage 3, sgd": Case(at_rest=late(1, "host"), optimizer="sgd", clip="zgraph", precision="bf16"),
    "foreach": Case(at_rest=late(0), stage=2, optimizer="adamw_foreach", accumulation=2, schedule=True),
    "loco": Case(at_rest=late(1), loco=True, clip="torch", accumulation=2, no_sync=True),
    "loco, sgd": Case(at_rest=late(0, "host"), stage=1, loco=True, optimizer="sgd", resume=True),
    "resumed": Case(at_rest=late(1, "host"), resume=True, precision="bf16", zero_first=True),
    "planned": Case(at_rest=late(1), frugal=True, clip="zgraph", resume=True),
}
QUICK = ("stage 2, from the first call",)
SLOW = ("stage 3", "stage 0", "loco", "resumed", "planned")
# Of whose features the slow ones have each, with others.
LONG = [name for name in CASES if name not in (*QUICK, *SLOW)]
ROWS = [*QUICK, *slow(*SLOW), *long(*LONG)]


def both(case: Case, steps: int = STEPS) -> tuple[Outcome, Outcome]:
    """What the captured step leaves, and what the plain lines do, once all gradients are applied."""
    assert case.at_rest is not None and case.at_rest.delayed_update_after is not None
    after = case.at_rest.delayed_update_after
    found = train(case, whole_step=True, steps=steps, finish=lambda function: function.flush())
    plain: list[LateSteps] = []
    expected = train(
        replace(case, at_rest=None, lowering="fx"),
        whole_step=False,
        steps=steps,
        prepare=lambda loop: plain.append(LateSteps(loop.optimizer, after)),
        finish=lambda function: plain[0].flush(),
    )
    return found, expected


def compare(case: Case) -> int:
    """The number of graphs that the captured step needed."""
    found, expected = both(case)
    assert_same(found, expected)
    return found.graphs


def graphs_of(case: Case) -> int:
    """One before the border, if calls come before, one at it and one behind it, and one that makes state."""
    assert case.at_rest is not None
    return {0: 3, 1: 3, 2: 4}[case.at_rest.delayed_update_after or 0]


@worlds(2)
@pytest.mark.parametrize("name", ROWS)
def test_a_delayed_step_equals_lines_that_keep_gradients(ranks: Ranks, name: str) -> None:
    for graphs in ranks.run(compare, CASES[name]):
        assert graphs == graphs_of(CASES[name])


def compare_on_host(case: Case) -> int:
    with late_gpu() as lanes:
        compare(case)
    return lanes.late.done


@worlds(2)
@pytest.mark.parametrize("name", [*slow("stage 3", "stage 2, from the first call", "stage 0")])
def test_a_delayed_step_updates_on_the_host_of_a_gpu(ranks: Ranks, name: str) -> None:
    assert min(ranks.run(compare_on_host, CASES[name])) > 0


@worlds(2)
@pytest.mark.parametrize("params", [*slow(None), "disk"])  # seconds: alone has an update between a copy and its gather
def test_gradients_wait_on_disk(ranks: Ranks, params: Any, tmp_path: Path) -> None:
    at_rest = zgraph.Offload(params=params, optimizer="disk", path=tmp_path, delayed_update_after=1)
    assert ranks.run(compare, Case(at_rest=at_rest, clip="torch", precision="bf16"))


def close() -> None:
    found, expected = both(Case(at_rest=late(1, "host"), lowering="inductor", optimizer="sgd", clip="zgraph"))
    for name, parameter in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


@worlds(2)
@pytest.mark.slow  # compiles islands
def test_a_compiled_delayed_step_is_close_to_the_plain_lines(ranks: Ranks) -> None:
    ranks.run(close)


# --- several optimizers -----------------------------------------------------------------------------------------------


def several(passes: tuple[zgraph.GraphPass, ...], stage: int, delayed: bool) -> list[Any]:
    """Losses and parameters of a fused optimizer and a user's own; in every third call some have no gradients.

    The second optimizer steps by a loss that reads what the first one has updated.
    """
    torch.manual_seed(0)
    model: Any = zgraph.shard(Net(), zero_stage=stage, offload=late(2) if delayed else None)
    first, *others = model.parameters()
    optimizers = [torch.optim.AdamW(others, lr=LR, fused=True), Lion([first])]

    def step(x: Tensor, side: bool) -> Tensor:
        found = x.new_zeros(())
        for optimizer in optimizers:
            loss = (model(x, side) - x[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            found = found + loss.detach()
        return found

    oracles = [] if delayed else [LateSteps(optimizer, 2) for optimizer in optimizers]
    called: Any = step
    if delayed:
        pipeline = zgraph.Pipeline([*zgraph.passes.presets.default(bucket_bytes=64), *passes])
        called = zgraph.training_step(model, optimizers, options={"lowering": "fx", "pipeline": pipeline})(step)
    found: list[Any] = []
    for number in range(8):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + torch.distributed.get_rank()))
        found.append(number_of(called(x, number % 3 != 0)))
    for waiting in oracles or [called]:
        waiting.flush()
    return [*found, *(whole(parameter.detach()) for parameter in model.parameters())]


def same_of_several(passes: tuple[zgraph.GraphPass, ...], stage: int) -> None:
    ours, theirs = (several(passes, stage, delayed) for delayed in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), (found, expected)


@worlds(2)
@pytest.mark.parametrize(
    ("passes", "stage"),
    [
        pytest.param((), 3, id="stage 3", marks=pytest.mark.slow),
        # With passes that move updates and gathers of their own.
        pytest.param((P.UpdateAsReduced(),), 2, id="as reduced", marks=pytest.mark.slow),
        pytest.param((P.GatherAhead(),), 1, id="ahead", marks=pytest.mark.slow),
    ],
)
def test_several_optimizers_step_late(ranks: Ranks, passes: tuple[zgraph.GraphPass, ...], stage: int) -> None:
    ranks.run(same_of_several, passes, stage)


# --- resumed ----------------------------------------------------------------------------------------------------------


def started(case: Case) -> tuple[Loop, TrainingStep[Any, Any]]:
    loop = Loop(case)
    return loop, zgraph.training_step(loop.model, loop.optimizer, options=case.options())(loop.plain())


def number_of(loss: Tensor) -> float:
    return whole(loss).item()


def resumed(folder: str, saved_after: int) -> None:
    """Six calls, and the same by two processes of which the second one loads what the first has saved."""
    case = Case(at_rest=late(2, "host"), clip="torch")
    loop, step = started(case)
    losses: list[float] = []
    saved = Path()
    for number in range(6):
        if number == saved_after:
            extra = {"step": step.state_dict()}
            saved = zgraph.save_checkpoint(folder, loop.model, loop.optimizer, step=number, extra=extra)
        losses.append(number_of(step(*loop.batch(number))["loss"]))
    step.flush()
    again, resuming = started(case)
    loaded = zgraph.load_checkpoint(saved, again.model, again.optimizer)
    resuming.load_state_dict(loaded.extra["step"])
    for number in range(saved_after, 6):
        assert number_of(resuming(*again.batch(number))["loss"]) == losses[number]
    resuming.flush()
    for ours, theirs in zip(again.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(whole(ours.detach()), whole(theirs.detach()))


@worlds(2)
@pytest.mark.slow  # compiles three times
@pytest.mark.parametrize("saved_after", [4, 1])
def test_a_resumed_training_equals_the_one_that_went_on(ranks: Ranks, saved_after: int, tmp_path: Path) -> None:
    """Saved before the border, and while gradients wait."""
    ranks.run(resumed, str(tmp_path), saved_after)


# --- in between -------------------------------------------------------------------------------------------------------


def in_between() -> list[str]:
    """A flush, plain lines and an evaluation between captured calls; what a plain step says meanwhile."""
    case = Case(at_rest=late(1), stage=2)
    loop, step = started(case)
    plain: Any = loop.plain()
    other = Loop(replace(case, at_rest=None))
    lines: Any = other.plain()
    eager = LateSteps(other.optimizer, 1)
    losses: list[tuple[float, float]] = []

    def advance(number: int, ours: Any) -> None:
        losses.append((number_of(ours(*loop.batch(number))["loss"]), number_of(lines(*other.batch(number))["loss"])))

    for number in range(3):
        advance(number, step)
    with pytest.raises(zgraph.ZgraphError) as caught:
        plain(*loop.batch(3))
    loop.optimizer.zero_grad()
    with torch.no_grad():
        for one in (loop, other):
            losses.append((number_of(one.model(one.batch(9)[0]).sum()), 0.0))
    assert losses.pop()[0] == losses.pop()[0], "an evaluation reads parameters without the last update"
    step.flush()
    step.flush()
    eager.flush()
    eager.after = 4  # the plain call steps at once
    advance(3, plain)
    for number in (4, 5, 6):
        advance(number, step)
    step.flush()
    eager.flush()
    assert [ours for ours, _ in losses] == [theirs for _, theirs in losses]
    for ours, theirs in zip(loop.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(whole(ours.detach()), whole(theirs.detach()))
    return [str(caught.value)]


@worlds(2)
def test_what_waits_is_applied_once_and_before_what_comes_later(ranks: Ranks) -> None:
    for (error,) in ranks.run(in_between):
        assert "call flush() of the training step first" in error


def failing(after: int) -> list[Tensor]:
    """Parameters of four steps of which the last failed once, without and with a return to those before it."""
    torch.manual_seed(0)
    model = zgraph.shard(nn.Embedding(7, 5), zero_stage=2, offload=late(after))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def lines(tokens: Tensor) -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(lines)
    tokens = torch.arange(4)
    for _ in range(3):
        step(tokens)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    step(tokens)
    step.flush()
    expected = whole(next(model.parameters()).detach()).clone()

    def load() -> None:
        for one, state in zip((model, optimizer, step), copy.deepcopy(saved), strict=True):
            one.load_state_dict(state)

    load()
    begun: list[Future[Any]] = []
    update = ThreadLanes.update

    def slowly(lanes: ThreadLanes, operator: Any, args: Any, kwargs: Any) -> Future[Any]:
        def run(*args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)
            operator(*args, **kwargs)

        begun.append(update(lanes, run, args, kwargs))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises((IndexError, RuntimeError), match="out of range"):
        patch.setattr(ThreadLanes, "update", slowly)
        step(tokens + 7)
    assert len(begun) == (after < 3) and all(one.done() for one in begun), "it would write over what is loaded next"
    if after < 3:  # gradients were waiting
        for going_on in (lambda: step(tokens), step.flush, step.state_dict):
            with pytest.raises(zgraph.ZgraphError, match=r"the last call failed .* load model and optimizer from a"):
                going_on()
        load()
    step(tokens)
    step.flush()
    return [expected, whole(next(model.parameters()).detach())]


@worlds(2)
@pytest.mark.parametrize("after", [1, 9])
def test_a_call_that_failed_applies_nothing_twice(ranks: Ranks, after: int) -> None:
    for expected, found in ranks.run(failing, after):
        assert torch.equal(found, expected)


# --- loss scale -------------------------------------------------------------------------------------------------------


def scaled(fused: bool, infinite: tuple[int, ...], folder: str, delayed: bool) -> list[Any]:
    """Losses, scales and parameters of a training in which some calls have an inf on one rank.

    A checkpoint is saved and loaded behind one of them.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = zgraph.shard(model, zero_stage=2, offload=late(1) if delayed else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused, foreach=False)
    scaler = zgraph.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    called: Any = step
    if delayed:
        called = applied = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(step)
    else:
        applied = LateSteps(optimizer, 1)
    found: list[Any] = []
    for number in range(8):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + torch.distributed.get_rank()))
        if number in infinite and torch.distributed.get_rank() == 1:
            x[0, 0] = torch.inf
        taken = applied.calls
        loss = called(x)
        if isinstance(applied, LateSteps) and applied.calls == taken:
            applied.skip()
        if delayed and number == infinite[-1]:
            saved = zgraph.save_checkpoint(folder, model, optimizer, step=number)
            for entries in optimizer.state.values():
                entries.clear()
            zgraph.load_checkpoint(saved, model, optimizer)
        found += [number_of(loss), scaler.get_scale()]
    applied.flush()
    return [*found, *(whole(parameter.detach()) for parameter in model.parameters())]


def same_scaled(fused: bool, infinite: tuple[int, ...], folder: str) -> int:
    ours, theirs = (scaled(fused, infinite, folder, delayed) for delayed in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        same = torch.equal(found, expected) if isinstance(found, Tensor) else str(found) == str(expected)
        assert same, (found, expected)
    return len({str(one) for one in ours})


@worlds(2)
# The first calls are skipped, so that there is no state yet; later ones, and the kernel's own skip.
@pytest.mark.parametrize(
    ("fused", "infinite"), [(False, (0, 1)), *slow((True, (0, 1)), (False, (3, 4, 6)), (True, (3, 4, 6)))]
)
def test_a_step_with_an_inf_stays_skipped(ranks: Ranks, fused: bool, infinite: tuple[int, ...], tmp_path: Path) -> None:
    assert all(ranks.run(same_scaled, fused, infinite, str(tmp_path)))


# --- memory -----------------------------------------------------------------------------------------------------------


def on_host(budget_bytes: int | None) -> tuple[int, str, int]:
    """Bytes that later calls keep on the host, what a budget says, and calls that have run by then."""
    at_rest = replace(late(1), host_budget_bytes=budget_bytes)
    model = zgraph.shard(nn.Linear(8, 8, bias=False), offload=at_rest)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    report = zgraph.Report()

    @zgraph.training_step(model, optimizer, options={"lowering": "fx", "report": report})
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        for _ in range(3):
            step(torch.ones(2, 8))
    except ValueError as error:
        return 0, str(error), step.calls
    peak = report.graphs[-1].peak
    assert peak is not None
    return peak.host_bytes, "", step.calls


@worlds(2)
def test_gradients_that_wait_count_on_the_host_from_the_first_call(ranks: Ranks) -> None:
    nbytes = 3 * 4 * 8 * 4  # two moments and a gradient, of four rows of eight numbers
    assert ranks.run(on_host, nbytes) == [(nbytes, "", 3)] * 2
    for _, error, calls in ranks.run(on_host, nbytes - 1):
        assert f"keeps {nbytes} bytes on the host" in error
        assert calls == 0


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": "host", "delayed_update_after": 5}, 'write optimizer="host"'),
        ({"optimizer": "host", "delayed_update_after": -1}, "delayed_update_after=-1 is not a number of calls"),
        ({"optimizer": "host", "delayed_update_after": True}, "delayed_update_after=True is not a number of calls"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zgraph.Offload(**options)


def without_a_whole_step() -> list[str]:
    """Errors of three plain calls, and of three compiled ones."""
    found: list[str] = []
    for compiles in (False, True):
        model: Any = zgraph.shard(nn.Linear(4, 4), offload=late(3))
        called = torch.compile(model, backend="zgraph") if compiles else model
        with torch.no_grad():
            model(torch.ones(2, 4))
        with pytest.raises(zgraph.ZgraphError) as caught:
            called(torch.ones(2, 4))
        found.append(str(caught.value))
    return found


@worlds(2)
def test_only_whole_steps_delay(ranks: Ranks) -> None:
    for errors in ranks.run(without_a_whole_step):
        assert all("trains without zgraph.training_step" in error for error in errors)


def refused() -> list[str]:
    """Errors of two steps in one call, and of gradients that wait where nothing is delayed."""
    model = zgraph.shard(nn.Linear(4, 4), offload=late(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @zgraph.training_step(model, optimizer, options={"lowering": "fx"})
    def twice(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.step()

    with pytest.raises(zgraph.ZgraphError) as in_one_call:
        twice(torch.ones(2, 4))

    @zgraph.training_step(model, optimizer, options={"lowering": "fx"})
    def once(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    once(torch.ones(2, 4))
    other = zgraph.shard(nn.Linear(4, 4), offload=zgraph.Offload(optimizer="host"))
    at_once = torch.optim.SGD(other.parameters(), lr=0.1)
    at_once.load_state_dict(optimizer.state_dict())

    @zgraph.training_step(other, at_once, options={"lowering": "fx"})
    def without(x: Tensor) -> None:
        other(x).sum().backward()
        at_once.step()
        at_once.zero_grad()

    with pytest.raises(zgraph.ZgraphError) as left:
        without(torch.ones(2, 4))
    without.flush()
    without(torch.ones(2, 4))
    return [str(in_one_call.value), str(left.value)]


@worlds(2)
def test_what_cannot_be_delayed_is_refused(ranks: Ranks) -> None:
    for in_one_call, left in ranks.run(refused):
        assert "calls optimizer.step() twice, and its updates are delayed" in in_one_call
        assert "gradients wait in the optimizer's state" in left


@pytest.mark.parametrize(("found_inf", "left"), [(1.0, 1.0), (0.0, 0.75)])
def test_a_flush_applies_no_step_that_a_scaler_has_skipped(found_inf: float, left: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    optimizer.state[parameter] = {GRADIENT: torch.ones(3), SKIP: torch.tensor(found_inf)}
    assert apply_pending(optimizer) and not has_pending(optimizer) and not apply_pending(optimizer)
    assert parameter.tolist() == [left] * 3 and parameter.grad is None
