"""Windows: what travels, what is held, how often is compiled, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zgraph
from tests.support import models
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.memory.gloo_buffers import settled
from tests.support.memory.live_tensors import live_tensors, local, storage_bytes
from tests.support.ranks import Ranks, every_world, fresh_ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.runtime.exchanges.collectives import start_all_gather
from zgraph.runtime.groups import reduction_group

ROWS, LAYERS = 48, 3  # 48 rows divide by 1, 2, 3 and 4, so that the formulas are exact
PARAMETER_BYTES = LAYERS * ROWS * ROWS * 4


def build() -> nn.Module:
    """No biases: where the input needs a gradient, backward reads every weight."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(ROWS, ROWS, bias=False), nn.Tanh()) for _ in range(LAYERS)])


def called(model: nn.Module, mode: str) -> Any:
    return with_fx(model) if mode == "fx" else model


def train_window(call: Any, micro_batches: int, between: Any = None) -> None:
    for micro in range(micro_batches):
        waits = micro < micro_batches - 1
        with zgraph.no_sync(call) if waits else contextlib.nullcontext():
            output = call(torch.full((2, ROWS), 0.1 * (1 + micro), requires_grad=True))
        output.sum().backward()
        del output
        if waits and between is not None:
            between(micro)


# --- bytes ----------------------------------------------------------------------------------------------------------


def sent_bytes(run: Callable[[], None]) -> Counter[str]:
    """What the messages that this rank really sends hold, by group; nothing else is sent."""
    found: list[tuple[str, int]] = []
    send = dist.ProcessGroup.send

    def counted(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        found.extend((group.group_name, tensor.nbytes) for tensor in tensors)
        return send(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch, profile(activities=[ProfilerActivity.CPU]) as profiled:
        patch.setattr(dist.ProcessGroup, "send", counted)
        run()
    events = profiled.events()
    assert events is not None
    ran = Counter(event.name for event in events if event.name.startswith("c10d::"))
    assert set(ran) <= {"c10d::send", "c10d::recv_"} and ran["c10d::send"] == len(found)
    total = Counter[str]()
    for name, nbytes in found:
        total[name] += nbytes
    return total


def window_bytes(zero_stage: int, micro_batches: int, mode: str) -> int:
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = called(model, mode)
    for _ in range(2):
        train_window(call, micro_batches)
    return sent_bytes(lambda: train_window(call, micro_batches)).total()


@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@every_world
def test_a_step_sends_what_the_formula_says(ranks: Ranks, zero_stage: int, micro_batches: int, mode: str) -> None:
    """(N-1)/N times 2P, 2P, (k+1)P and 3kP; without a compiler autograd keeps the weights, so stage 3 gathers once."""
    parts = {0: 2, 1: 2, 2: micro_batches + 1, 3: (3 if mode == "fx" else 2) * micro_batches}[zero_stage]
    expected = parts * PARAMETER_BYTES * (ranks.world - 1) // ranks.world
    assert ranks.run(window_bytes, zero_stage, micro_batches, mode) == [expected] * ranks.world


# --- memory ---------------------------------------------------------------------------------------------------------


def held_in_window(zero_stage: int, mode: str, inside: int, after: int) -> list[int]:
    """Bytes held: at the two ends between micro-batches, and after the last; no optimizer state."""
    shard_numel = ROWS * ROWS // dist.get_world_size()
    gc.collect()
    gc.freeze()  # what exists now is looked at no more, or each look would go through all that torch has made
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = called(model, mode)

    def look() -> int:
        alive = live_tensors(shard_numel)
        sharded = [local(value) for p in model.parameters() for value in (p, p.grad) if value is not None]
        return storage_bytes([*alive, *sharded])

    train_window(call, 2)
    model.zero_grad()
    measured: list[int] = []
    train_window(call, 3, lambda micro: measured.append(settled(look, inside)))
    measured.append(settled(look, after))
    gc.unfreeze()
    return measured


@pytest.mark.parametrize("world", [2, 3, *long(1, 4)])
def test_a_window_holds_what_the_formula_says(world: int) -> None:
    """Parameter and gradient at rest; and in a window the kept copies (1, 2) and the waiting sums (1), P each."""
    with fresh_ranks(world) as ranks:  # everything alive in the process counts, also what another test left
        for zero_stage, mode in itertools.product([0, 1, 2, 3], ["eager", "fx"]):
            share = 1 if zero_stage == 0 else 1 / world
            extra = 0 if world == 1 else {0: 0, 1: 2, 2: 1, 3: 0}[zero_stage]
            inside, after = (round(parts * PARAMETER_BYTES) for parts in (2 * share + extra, 2 * share))
            for measured in ranks.run(held_in_window, zero_stage, mode, inside, after):
                assert measured == [inside, inside, after], (zero_stage, mode)


# --- numerics beyond the replicated judge ---------------------------------------------------------------------------


def large_batch_error(zero_stage: int) -> float:
    """Largest relative difference between 4 micro-batches and one batch of all their rows."""
    rows = torch.randn(8, ROWS, generator=torch.Generator().manual_seed(dist.get_rank()))
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = called(model, "fx")
    for micro, part in enumerate(rows.chunk(4)):
        with zgraph.no_sync(model) if micro < 3 else contextlib.nullcontext():
            (call(part).square().mean() / 4).backward()
    accumulated = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    call(rows).square().mean().backward()
    at_once = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    assert len(accumulated) == len(at_once) == LAYERS
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(accumulated, at_once, strict=True))


@pytest.mark.parametrize("zero_stage", [2, *long(0, 1, 3)])  # test_numerics.py has windows of all stages, to the bit
def test_micro_batches_equal_one_large_batch(ranks: Ranks, zero_stage: int) -> None:
    """Up to fp32 rounding of sums of 8 rows, in another order: a few times 2^-24, far below 1e-6."""
    assert max(ranks.run(large_batch_error, zero_stage)) < 1e-6


def step_without_clearing(zero_stage: int, mode: str) -> list[bool]:
    """Two windows in a row add up in `.grad`, as two backwards do."""
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = called(model, mode)
    train_window(call, 2)
    once = [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    train_window(call, 2)
    twice = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return [torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True)]


@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_windows_add_to_what_is_in_grad(ranks: Ranks, zero_stage: int, mode: str) -> None:
    assert ranks.run(step_without_clearing, zero_stage, mode) == [[True] * LAYERS] * 2


def after_gradients_of_inputs_alone(mode: str) -> list[bool]:
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=0)
    call = called(model, mode)
    train_window(call, 2)
    once = [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    x = torch.randn(2, ROWS, requires_grad=True)
    with zgraph.no_sync(model):
        torch.autograd.grad(call(x).sum(), x)
    train_window(call, 2)
    twice = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return [torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True)]


@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_a_backward_that_adds_nothing_loses_nothing(ranks: Ranks, mode: str) -> None:
    """In an open window; what `.grad` held before is still there behind it."""
    assert ranks.run(after_gradients_of_inputs_alone, mode) == [[True] * LAYERS] * 2


def abandoned_window(zero_stage: int) -> list[bool]:
    """zero_grad discards what has waited: the next window's gradients are those of a fresh model."""
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=zero_stage)
    with zgraph.no_sync(model):
        model(torch.randn(2, ROWS)).sum().backward()
    model.zero_grad()
    train_window(model, 2)
    found = [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    train_window(model, 2)
    expected = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_zero_grad_abandons_a_window(ranks: Ranks, zero_stage: int) -> None:
    assert ranks.run(abandoned_window, zero_stage) == [[True] * LAYERS] * 2


def checkpointed_gradients(reentrant: bool, zero_stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = zgraph.shard(models.Checkpointed(reentrant), zero_stage=zero_stage)
    for micro in range(3):
        with zgraph.no_sync(model) if micro < 2 else contextlib.nullcontext():
            output = model(torch.full((2, 6), 0.1 * (1 + micro)))
        output.sum().backward()
    return [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def reentrant_equals_not(zero_stage: int) -> list[bool]:
    one, other = checkpointed_gradients(True, zero_stage), checkpointed_gradients(False, zero_stage)
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_reentrant_checkpoint_keeps_its_place_in_the_window(ranks: Ranks, zero_stage: int) -> None:
    """It records its graph in backward, when no_sync has long been left."""
    assert ranks.run(reentrant_equals_not, zero_stage) == [[True] * 8] * 2


def pipelined_window(zero_stage: int, mode: str) -> dict[str, Any]:
    """All forwards before all backwards, as a pipeline schedule runs them: gradients, and gathers that ran."""
    torch.manual_seed(0)
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = called(model, mode)
    train_window(call, 3)
    expected = [whole(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    ran: list[Tensor] = []

    def counted_gather(chunk: Tensor, world: int, group_name: str, **about: Any) -> Tensor:
        ran.append(chunk)
        return start_all_gather(chunk, world, group_name, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zgraph.dialect.window_ops.start_all_gather", counted_gather)
        outputs: list[Tensor] = []
        for micro in range(3):
            with zgraph.no_sync(model) if micro < 2 else contextlib.nullcontext():
                outputs.append(call(torch.full((2, ROWS), 0.1 * (1 + micro), requires_grad=True)))
        for output in outputs:
            output.sum().backward()
    found = [whole(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
    return {"equal": equal, "gathers": len(ran)}


@pytest.mark.parametrize("mode", ["eager", "fx"])
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_several_forwards_in_flight_share_one_kept_copy(ranks: Ranks, zero_stage: int, mode: str) -> None:
    expected = {"equal": [True] * LAYERS, "gathers": LAYERS}
    assert ranks.run(pipelined_window, zero_stage, mode) == [expected] * 2


# --- compiled variants ----------------------------------------------------------------------------------------------


def variants(zero_stage: int) -> list[int]:
    """Graphs compiled so far, after each of four windows of three micro-batches."""
    report = zgraph.Report()
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = with_fx(model, report=report)
    counts: list[int] = []
    for _ in range(4):
        train_window(call, 3)
        counts.append(sum(graph.direction == "forward" for graph in report.graphs))
    return counts


@pytest.mark.parametrize(("zero_stage", "expected"), [(1, 2), (3, 1), *long((0, 2), (2, 2))])  # as many as of stage 1
def test_two_variants_are_compiled_and_kept(ranks: Ranks, zero_stage: int, expected: int) -> None:
    """One under no_sync and one that closes; stage 3 is the same graph in both."""
    assert ranks.run(variants, zero_stage) == [[expected] * 4] * 2


# --- refusals -------------------------------------------------------------------------------------------------------


def _unsharded() -> None:
    with zgraph.no_sync(nn.Linear(2, 2)):
        pass


def _mixed() -> None:
    model = build()
    zgraph.shard(model[0], zero_stage=1)  # type: ignore[index]
    with zgraph.no_sync(zgraph.shard(model, zero_stage=3)):
        pass


def _step_in_an_open_window() -> None:
    model = zgraph.shard(build(), zero_stage=1)
    optimizer = torch.optim.SGD(model.parameters())
    with zgraph.no_sync(with_fx(model)):
        model(torch.ones(2, ROWS)).sum().backward()
    optimizer.step()


def _step_after_a_window_in_a_window() -> None:
    """The end of the inner one leaves the outer one open."""
    model = zgraph.shard(build(), zero_stage=1)
    optimizer = torch.optim.SGD(model.parameters())
    with zgraph.no_sync(model):
        with zgraph.no_sync(model):
            pass
        model(torch.ones(2, ROWS)).sum().backward()
    optimizer.step()


def refused_load(zero_stage: int, compiled: bool) -> dict[str, Any]:
    """In an open window, and after it has closed: was anything loaded?"""
    model = zgraph.shard(build(), zero_stage=zero_stage)
    call = with_fx(model) if compiled else model
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    given = {name: torch.full_like(value, 2.0) for name, value in before.items()}
    with zgraph.no_sync(call):
        call(torch.ones(2, ROWS)).sum().backward()
    try:
        call.load_state_dict(given)
        text = "loaded"
    except zgraph.ZgraphError as error:
        text = str(error)
    unchanged = all(torch.equal(whole(value), before[name]) for name, value in model.state_dict().items())
    call(torch.ones(2, ROWS)).sum().backward()
    call.load_state_dict(given)
    loaded = all(torch.equal(whole(value), given[name]) for name, value in model.state_dict().items())
    return {"text": text, "unchanged": unchanged, "loaded": loaded}


@pytest.mark.parametrize(
    ("zero_stage", "compiled"), [(0, False), (1, False), (3, False), (1, True), (0, True), (3, True)]
)
def test_nothing_is_loaded_into_an_open_window(ranks: Ranks, zero_stage: int, compiled: bool) -> None:
    for found in ranks.run(refused_load, zero_stage, compiled):
        assert found["loaded"]
        if zero_stage == 3:  # keeps nothing from one forward to the next
            assert found["text"] == "loaded"
            continue
        assert found["unchanged"]
        assert re.search(
            r"load_state_dict in an open no_sync window .*run the last forward and backward", found["text"]
        )


REFUSED = {
    _unsharded: r"zgraph\.no_sync: nothing in this Linear is sharded.*call zgraph\.shard first",
    _mixed: r"zgraph\.no_sync: the module mixes ZeRO stages \(0\.weight at stage 1, 1\.0\.weight at stage 3\)",
    _step_in_an_open_window: r"optimizer\.step\(\) on 0\.0\.weight, .*not reduced.*outside of no_sync",
    _step_after_a_window_in_a_window: r"optimizer\.step\(\) on 0\.0\.weight, .*not reduced",
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refusals_say_what_to_do(ranks: Ranks, wrong: Any) -> None:
    for good, text in ranks.outcomes(wrong):
        assert not good
        with pytest.raises((ValueError, zgraph.ZgraphError), match=REFUSED[wrong]):
            raise ValueError(text)


def uneven_mesh() -> None:
    members = dist.get_world_size() - 1
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", list(range(members)), mesh_dim_names=("dp",))
    zgraph.shard(nn.Linear(2, 2), mesh)


def test_mesh_not_dividing_the_world_is_refused_on_all_ranks() -> None:
    with fresh_ranks(3) as three:
        for good, text in three.outcomes(uneven_mesh):
            assert not good
            assert "a mesh of 2 ranks [0, 1] does not divide the world of 3" in text


# --- hybrid sharding ------------------------------------------------------------------------------------------------


def bytes_by_axis(zero_stage: int, micro_batches: int) -> dict[str, int]:
    """Bytes that this rank sends per step along each axis of a 2 x 2 mesh, as reported and as sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    report = zgraph.Report()
    model = zgraph.shard(build(), mesh, zero_stage=zero_stage)
    call = with_fx(model, report=report)
    train_window(call, 1)
    gathers = {axis: mesh.get_group(axis).group_name for axis in ("replicate", "shard")}
    axes = {name: axis for axis, group in gathers.items() for name in (group, reduction_group(group))}
    found, sent = {"replicate": 0, "shard": 0}, {"replicate": 0, "shard": 0}
    for graph in report.graphs:
        for transfer in graph.transfers:
            found[axes[transfer.group_name]] += transfer.sent_bytes
    for name, nbytes in sent_bytes(lambda: train_window(call, 1)).items():
        sent[axes[name]] += nbytes
    assert sent == found
    return found


@worlds(4)
@pytest.mark.parametrize(("zero_stage", "inside", "across"), [(0, 2, 1), (1, 2, 1), (2, 2, 1), (3, 3, 1)])
def test_hybrid_sharding_gathers_inside_only(ranks: Ranks, zero_stage: int, inside: int, across: int) -> None:
    """Inside 1/2 of 2P or 3P; across only the all-reduce of a shard: 1/2 of 2 P/2."""
    expected = {"replicate": across * PARAMETER_BYTES // 2, "shard": inside * PARAMETER_BYTES // 2}
    assert ranks.run(bytes_by_axis, zero_stage, 1) == [expected] * 4


def _hooks_of_a_model() -> tuple[int, int]:
    """How many hooks of a model with a window watch all optimizers: while it lives, and after the next model."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks as watching

    others = {*watching}
    model = zgraph.shard(build(), zero_stage=1)
    train_window(model, 2)
    own = {*watching} - others
    del model
    gc.collect()
    following = zgraph.shard(build(), zero_stage=1)  # not at once: a step may be walking over the hooks
    assert following is not None
    return len(own), len(own & {*watching})


def test_optimizers_are_watched_as_long_as_the_model_lives(ranks: Ranks) -> None:
    assert ranks.run(_hooks_of_a_model) == [(1, 0), (1, 0)]


def hooked_window(zero_stage: int) -> str | bool:
    """Whether halving by a hook gives half of the mean of two micro-batches; or the error."""
    model = zgraph.shard(nn.Linear(3, 2, bias=False), zero_stage=zero_stage)
    model.weight.register_hook(lambda grad: grad * 0.5)
    own = dist.get_rank() + 1.0
    with zgraph.no_sync(model):
        model(torch.full((1, 3), own)).sum().backward()
    try:
        model(torch.full((1, 3), 2 * own)).sum().backward()
    except zgraph.ZgraphError as error:
        return str(error)
    return bool(model.weight.grad.full_tensor().eq(0.5 * (1 + 2) * 1.5).all())


@worlds(2)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_hook_runs_once_on_each_gradient_of_a_window(ranks: Ranks, zero_stage: int) -> None:
    """At stage 0 waiting gradients are in `.grad` after the hook ran, so it is refused."""
    for found in ranks.run(hooked_window, zero_stage):
        assert "weight has a hook from register_hook" in str(found) if zero_stage == 0 else found is True
