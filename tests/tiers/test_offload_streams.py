"""What rests on the host of a GPU, on streams that stand in for its own: order, lifetimes, and the same bits."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.judges.happens_before import HappensBefore, judging
from tests.support.judges.judged_lanes import JudgedLanes
from tests.support.lazy_streams import LazyLanes, late_gpu
from tests.support.memory.live_tensors import local
from tests.support.ranks import Ranks, worlds
from tests.support.resting import DISK, HOST, MIXED, STATE, STREAMED, under
from tests.support.slow_disk import slow_down
from tests.support.step_scripts import LR, Net, Setting, compare
from tests.support.whole_steps import STEPS, Case, assert_same, train
from zgraph.codegen import lower_fx as lower
from zgraph.passes import presets
from zgraph.passes.memory import stream_states
from zgraph.tiers.copy_lanes import lanes_of
from zgraph.tiers.disk.folder import DiskFolder
from zgraph.tiers.stores import OnDisk
from zgraph.tiers.thread_lanes import ThreadLanes
from zgraph.tiers.tier import Disk

# Updates run on copies, on the GPU.
CASES = {
    "stage 3": Case(at_rest=HOST, streamed=True, clip="torch", schedule=True),
    "stage 2": Case(at_rest=HOST, streamed=True, stage=2, precision="bf16", accumulation=2, no_sync=True),
    "stage 1": Case(at_rest=HOST, streamed=True, stage=1, optimizer="adamw_foreach", resume=True),
    "stage 0": Case(at_rest=HOST, streamed=True, stage=0, optimizer="adam", offload=True),
    "state": Case(at_rest=STATE, streamed=True, frugal=True, precision="autocast"),
}


# Updates run on the host; plans are told so, which would choose by costs.
UPDATED, STATE_UPDATED = replace(HOST, update="host"), replace(STATE, update="host")
ON_HOST = {
    "stage 3": Case(at_rest=HOST),
    "stage 2": Case(at_rest=HOST, stage=2, precision="bf16", accumulation=2, no_sync=True, clip="zgraph"),
    "stage 1": Case(at_rest=UPDATED, stage=1, optimizer="adam_fused", resume=True, frugal=True),
    "stage 0": Case(at_rest=HOST, stage=0, offload=True, clip="torch", schedule=True),
    "loco": Case(at_rest=UPDATED, loco=True, accumulation=2, clip="torch", planned=True),
    "state": Case(at_rest=STATE, clip="torch"),
    "state, stage 2": Case(at_rest=STATE_UPDATED, stage=2, frugal=True, precision="autocast", frozen=True),
    "state, stage 1": Case(at_rest=STATE, stage=1, optimizer="adam_fused", resume=True, accumulation=2),
    "state, stage 0": Case(at_rest=STATE, stage=0, precision="bf16"),
    "state, 8 bits": Case(at_rest=STATE, optimizer="adamw_8bit", width=32, precision="bf16 weights", resume=True),
}


# What rests on disk is updated on the GPU.
ON_DISK = {
    "stage 3": Case(at_rest=DISK, clip="torch", schedule=True),
    "stage 2": Case(at_rest=MIXED, stage=2, precision="bf16", accumulation=2, no_sync=True),
    "stage 1": Case(at_rest=DISK, stage=1, optimizer="adamw_foreach", resume=True),
    "stage 0": Case(at_rest=replace(DISK, params=None), stage=0, optimizer="adam_fused", offload=True),
    "planned": Case(at_rest=DISK, stage=2, frugal=True, loco=True, precision="autocast"),
    "8 bits": Case(at_rest=DISK, stage=2, optimizer="adamw_8bit", width=32, precision="bf16 weights", clip="torch"),
}


def adamw_fused(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, fused=True)


def on_late_streams(case: Case) -> tuple[int, int, int]:
    """Train with copies, and updates, that are made when they are waited for; returns how many there were each way."""
    expected = train(replace(case, at_rest=None, offload=False, frugal=False, streamed=False), whole_step=False)
    with late_gpu() as lanes, slow_disk(case.at_rest):
        found = train(case, whole_step=True)
    assert_same(found, expected)
    # At the end of a step for both streams: whoever reads what rests there next may be the host.
    is_on_disk = case.at_rest is not None and case.at_rest.path is not None
    rests = case.at_rest is not None and case.at_rest.params == "host"
    waits = STEPS if case.streamed or is_on_disk or rests else 1
    assert lanes.lazy.host_waits == 2 * waits
    return (*lanes.copies, lanes.late.done)


@contextlib.contextmanager
def slow_disk(at_rest: zgraph.Offload | None) -> Generator[None]:
    """Let the folder of an offload be on a disk that takes a millisecond for 20 KB."""
    if at_rest is None or at_rest.path is None:
        yield
        return
    lanes = lanes_of(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
    with warnings.catch_warnings(category=zgraph.ZgraphWarning, action="ignore"):  # the folder may be in memory
        slow = DiskFolder(os.fspath(at_rest.path), dist.get_rank())
    slow_down(slow, 2e7)
    store = OnDisk(slow)  # which lanes do not keep alive
    lanes.stores.by_key[os.fspath(at_rest.path)] = store
    yield


@worlds(2)
@pytest.mark.parametrize("name", ON_DISK)
def test_a_slow_disk_and_late_copies_yield_the_same_bits(ranks: Ranks, name: str, tmp_path: Path) -> None:
    case = replace(ON_DISK[name], at_rest=under(tmp_path, ON_DISK[name].at_rest))
    for out, back, updates in ranks.run(on_late_streams, case):
        assert out > 0 and back > 0 and not updates


@worlds(2)
@pytest.mark.parametrize("name", ["stage 3", *[*CASES][1:]])
def test_copies_on_streams_that_come_late_yield_the_same_bits(ranks: Ranks, name: str) -> None:
    for out, back, updates in ranks.run(on_late_streams, CASES[name]):
        assert out > 0 and back > 0 and not updates


@worlds(2)
@pytest.mark.parametrize("name", ["state", *(one for one in ON_HOST if one != "state")])
def test_late_host_updates_yield_the_same_bits(ranks: Ranks, name: str) -> None:
    for out, back, updates in ranks.run(on_late_streams, ON_HOST[name]):
        assert out > 0 and back > 0 and updates > STEPS


def on_threads(case: Case) -> None:
    """As above with a thread each way, and one that updates, at their own pace."""
    expected = train(replace(case, at_rest=None), whole_step=False)
    with mock.patch.object(stream_states, "computes_elsewhere", lambda order, ctx: True):
        assert_same(train(case, whole_step=True), expected)


@worlds(2)
@pytest.mark.parametrize("at_rest", [STATE, HOST])
def test_threads_that_copy_and_update_yield_the_same_bits(ranks: Ranks, at_rest: zgraph.Offload) -> None:
    ranks.run(on_threads, Case(at_rest=at_rest, stage=2, clip="zgraph", schedule=True))


def averaged(offload: zgraph.Offload | None, twice: bool, together: bool = False) -> dict[str, Tensor]:
    """Averages of parameters right behind their update, one by one or at once, and a second update in a call."""
    torch.manual_seed(0)
    model = zgraph.shard(Net(), zero_stage=2, offload=offload)
    average = {name: torch.zeros_like(local(one)) for name, one in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(x: Tensor) -> None:
        for _ in range(1 + twice):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            if together:
                torch._foreach_lerp_([*average.values()], [local(one) for one in model.parameters()], 0.5)
            for name, one in model.named_parameters() if not together else ():
                average[name].lerp_(local(one), 0.5)

    run: Any = step
    if offload is not None:
        run = zgraph.training_step(model, optimizer, options={"lowering": "fx"})(step)
    for number in range(3):
        run(torch.full((4, 5), 1.0 + number + dist.get_rank()))
    return average | {f"{name} itself": local(one).clone() for name, one in model.named_parameters()}


def averaged_on_late_streams(offload: zgraph.Offload, twice: bool, together: bool = False) -> int:
    expected = averaged(None, twice, together)
    with late_gpu() as lanes:
        found = averaged(offload, twice, together)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    return lanes.late.done


@worlds(2)
@pytest.mark.parametrize(("offload", "twice"), [(STATE, True), (HOST, True), (STATE, False), (HOST, False)])
def test_parameter_reads_after_an_update_wait_for_it(ranks: Ranks, offload: zgraph.Offload, twice: bool) -> None:
    assert min(ranks.run(averaged_on_late_streams, offload, twice)) > 0


@worlds(1)
@pytest.mark.parametrize("twice", [False, True])
def test_backward_reads_values_from_before_the_host_update(ranks: Ranks, twice: bool) -> None:
    assert min(ranks.run(averaged_on_late_streams, HOST, twice, True)) > 0


def compared_on_late_streams(setting: Setting) -> int:
    with late_gpu() as lanes:
        compare(setting)
    return lanes.late.done


def test_unawaited_copy_keeps_its_memory_reserved() -> None:
    """As where a step fails between a start and its wait."""
    lanes = LazyLanes()
    kept = lanes.pinned_like(torch.ones(3))
    copy = lanes.store(torch.ones(3), kept)
    assert lanes.copies == (0, 0) and kept.isnan().all()
    del copy
    assert lanes.copies == (1, 0) and lanes.lazy.freed == []
    lanes.finish()
    assert torch.equal(kept, torch.ones(3))


def test_host_sees_copied_values_after_waiting() -> None:
    """The stand-in, and an update, which waits for what compute has waited for."""
    lanes = LazyLanes()
    grad, moment = torch.ones(3), torch.zeros(3)
    kept = lanes.offload(grad).wait()
    assert kept.isnan().all()
    update = lanes.update(torch.ops.aten.add_.Tensor, (moment, kept), {})
    assert moment.isnan().all()
    update.result()
    assert torch.equal(moment, torch.ones(3))
    again = lanes.reload(lanes.offload(torch.ones(2)).wait()).wait()
    assert torch.equal(again, torch.ones(2)), "streams see it at once"


def test_a_thread_sees_its_copy_though_the_program_has_waited_first() -> None:
    """The stand-in itself: a disk's thread waits for a copy that was made because of a later one of the program."""
    lanes = LazyLanes()
    source, staged, event = torch.ones(3), torch.zeros(3), lanes.lazy.Event(blocking=True)
    with lanes.lazy.stream(lanes.out):
        staged.copy_(source, non_blocking=True)
        event.record(lanes.out)
    kept = lanes.offload(torch.full((3,), 2.0)).wait()
    event.synchronize()
    assert torch.equal(staged, torch.ones(3)) and kept.isnan().all(), "copies behind the event are not seen yet"


def test_copies_in_a_thread_leave_no_mode_behind() -> None:
    """The stand-in itself: torch would take all that follows in this process to be in a mode, and compile nothing."""
    lanes, before = LazyLanes(), is_in_torch_dispatch_mode()
    inside, outside = threading.Event(), threading.Event()

    def copy() -> None:
        with lanes.lazy.stream(lanes.back):
            inside.set()
            outside.wait(5)

    other = threading.Thread(target=copy)
    with FakeTensorMode():
        other.start()
        inside.wait(5)
    outside.set()
    other.join()
    assert is_in_torch_dispatch_mode() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_late_streams_see_memory_that_is_read_before_its_copy(dtype: torch.dtype) -> None:
    """The stand-in itself: without that, all that a test would see is a NaN, some steps later."""
    lanes = LazyLanes()
    kept = lanes.pinned_like(torch.ones(2, 3, dtype=dtype).t())
    early = lanes.store(torch.ones(3, 2, dtype=dtype), kept)
    lanes.reload(kept).wait()
    assert lanes.lazy.unwritten == [0]
    early.wait()
    assert torch.equal(lanes.reload(kept).wait(), torch.ones(3, 2, dtype=dtype)) and lanes.lazy.unwritten == [0]


def test_copies_on_the_host_are_found_by_their_memory() -> None:
    """The stand-in itself: not by an object of Python, of which one memory may have several."""
    lanes = LazyLanes()
    kept = lanes.offload(torch.ones(3)).wait()
    same = torch.from_dlpack(kept)
    assert torch.equal(lanes.reload(same).wait(), torch.ones(3))


def test_late_streams_see_memory_that_is_freed_early() -> None:
    """The stand-in itself."""
    lanes = LazyLanes()
    source, kept = torch.ones(3), torch.zeros(3)
    with lanes.lazy.stream(lanes.out):
        kept.copy_(source, non_blocking=True)
    del source
    lanes.finish()
    assert lanes.lazy.freed == [0] and kept.isnan().all()


# --- who may touch what, and when -------------------------------------------------------------------------------------

WIDTH, LAYERS = 32, 3


def trained(stage: int, planned: bool, watcher: HappensBefore, offload: zgraph.Offload) -> None:
    """Three calls: state is made by the first."""
    torch.manual_seed(0)
    with loopback(4, Wire(watcher=watcher)):
        parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = zgraph.shard(nn.Sequential(*parts), zero_stage=stage, offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu")) if planned else None
        passes = (presets.planned if planned else presets.default)(bucket_bytes=4 * (WIDTH + 1) * WIDTH)
        options = {"lowering": "fx", "passes": zgraph.PassList(passes, target=target)}

        @zgraph.training_step(model, optimizer, options=options)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(3):
            step(torch.randn(8, WIDTH))


def judged(patch: pytest.MonkeyPatch) -> HappensBefore:
    """A judge of programs that believe in a GPU."""
    judge = judging(patch)
    lanes = JudgedLanes(judge)
    patch.setattr(lower, "lanes_of", lambda device: lanes)
    patch.setattr(stream_states, "computes_elsewhere", lambda order, ctx: True)
    return judge


@pytest.mark.parametrize(("stage", "planned"), [(3, False), (0, True), (1, False)])
def test_nothing_at_rest_is_touched_while_it_travels(
    monkeypatch: pytest.MonkeyPatch, stage: int, planned: bool
) -> None:
    """Copies and collectives in flight together, over several calls."""
    judge = judged(monkeypatch)
    trained(stage, planned, judge, STREAMED)
    assert judge.races == []
    kinds = [one.kind for one in judge.transfers]
    parameters = 2 * LAYERS
    # Two moments of each parameter are made by the first call; each later one stores these and all parameters.
    assert kinds.count("offload") == 2 * parameters
    assert kinds.count("store") == parameters + 2 * 3 * parameters
    assert kinds.count("reload") > kinds.count("store")


@pytest.mark.parametrize(
    ("offload", "stage", "planned"),
    [
        (HOST, 3, False),
        (STATE, 2, True),
        (HOST, 0, True),
        (STATE, 0, False),
    ],
)
def test_nothing_is_touched_while_the_host_updates_it(
    monkeypatch: pytest.MonkeyPatch, offload: zgraph.Offload, stage: int, planned: bool
) -> None:
    judge = judged(monkeypatch)
    trained(stage, planned, judge, offload)
    assert judge.races == []
    kinds = [one.kind for one in judge.transfers]
    parameters = 2 * LAYERS
    assert kinds.count("update") >= 2 * LAYERS, "a bucket each, in two calls"
    # Gradients, parameters that rest on the device, and counts; before that the first call's moments.
    brought = 1 if offload == HOST else 2
    assert kinds.count("offload") == 2 * parameters + 2 * brought * parameters + kinds.count("update")
    assert kinds.count("return") == (0 if offload == HOST else 2 * parameters)
    assert kinds.count("store") == (parameters if offload == HOST else 0), (
        "by the first call, which updates on the device"
    )
    assert (kinds.count("reload") > 0) == (offload == HOST)


def test_the_host_waits_for_threads_that_copy_and_update(tmp_path: Path) -> None:
    """As after a step that failed: what it had started would write over what is loaded next."""
    lanes = ThreadLanes()
    for thread in (lanes.out, lanes.back):
        thread.submit(time.sleep, 0.1)  # copies begin late
    folder = lanes.stores.open(Disk(folder=str(tmp_path)), lanes, 0)
    source, kept, filed = torch.ones(25_000), torch.zeros(25_000), folder.empty(torch.ones(25_000), "weight")
    begun = threading.Event()

    def update(moment: Tensor) -> None:
        begun.wait(0.1)
        moment.fill_(2.0)

    moment = torch.zeros(3)
    done = lanes.update(update, (moment,), {})
    lanes.store(source, kept)
    lanes.store(source, filed)
    lanes.drain()
    assert done.done() and moment.eq(2.0).all() and kept.eq(1.0).all() and filed.eq(1.0).all()
