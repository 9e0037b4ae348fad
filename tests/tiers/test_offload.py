"""Activations that lie on the host from forward to backward: the same bits, and less memory."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.budget import long
from tests.support.judges.happens_before import HappensBefore, judging
from tests.support.judges.judged_lanes import JudgedLanes
from tests.support.memory.allocations import Count, counted, steady_rise
from tests.support.ranks import Ranks, worlds
from tests.support.whole_steps import Case, assert_same, train
from zgraph import codegen
from zgraph.analysis.hardware import Link
from zgraph.passes import OffloadActivations, presets
from zgraph.tiers.stream_lanes import StreamLanes
from zgraph.tiers.thread_lanes import ThreadLanes
from zgraph.torch_compat.fake_values import fake_mode

# Every two of these features stand together in some row, with stages 0 to 3.
CASES = {
    "stage 3": Case(optimizer="adamw_fused", clip="torch", offload=True),
    "stage 0, window": Case(stage=0, optimizer="sgd", accumulation=3, no_sync=True, dropout=0.5, offload=True),
    "stage 2, bf16": Case(stage=2, precision="bf16", accumulation=3, no_sync=True, clip="zgraph", offload=True),
    "stage 1, loco": Case(stage=1, loco=True, resume=True, optimizer="sgd", offload=True),
    "autocast": Case(precision="autocast", checkpointed=True, optimizer="sgd", offload=True),
    "planned": Case(frugal=True, dropout=0.5, accumulation=2, offload=True),
    "planned, loco": Case(stage=2, frugal=True, loco=True, clip="torch", offload=True),
}
# Forward and backward alone as well, in which windows, precisions and plans are no others than in a captured step.
IN_PARTS = ("stage 2, bf16", "stage 1, loco", "planned")
LONG = ("stage 0, window", "autocast", "planned, loco")  # of whose features the others have each
ROWS = [*(name for name in CASES if name not in LONG), *long(*LONG)]


def compare(case: Case, in_parts: bool) -> list[str]:
    """Notes of the pass on the whole step; it, and a compiled forward and backward, equal the loop without it."""
    plain = replace(case, offload=False, frugal=False)
    expected = train(plain, whole_step=False)
    found = train(case, whole_step=True)
    assert_same(found, expected)
    if in_parts:
        assert_same(train(replace(case, compiled=True), whole_step=False), expected)
    return [note for note in found.notes if note.startswith("offload_activations")]


@worlds(2)
@pytest.mark.parametrize("name", ROWS)
def test_offloaded_tensors_return_bitwise_equal(ranks: Ranks, name: str) -> None:
    for notes in ranks.run(compare, replace(CASES[name], started=name != "stage 3"), name in IN_PARTS):
        assert notes and not any(" 0 activations" in note for note in notes)


def close() -> None:
    case = Case(lowering="inductor", optimizer="sgd", offload=True, started=True)
    with_it, without = (train(replace(case, offload=offload), whole_step=True) for offload in (True, False))
    for name, parameter in without.parameters.items():
        torch.testing.assert_close(with_it.parameters[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


@worlds(2)
def test_a_compiled_step_is_close_to_one_that_keeps_everything(ranks: Ranks) -> None:
    ranks.run(close)


def test_copies_that_are_only_planned_start_no_thread() -> None:
    """A fake mode keeps the flags of its kernels in one place for all threads: a second thread met them set."""
    lanes, before = ThreadLanes(), threading.enumerate()
    with fake_mode():
        tensor = torch.ones(4, 3)
        kept = lanes.offload(tensor).wait()
        back = lanes.reload(kept).wait()
        lanes.store(back, kept).wait()
    assert kept.shape == back.shape == tensor.shape
    started = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in started if name.startswith("zgraph")]


# --- memory -----------------------------------------------------------------------------------------------------------

WIDTH, BATCH, LAYERS = 32, 2048, 8
PLAIN, OFFLOADED = presets.default(), presets.default(offload_activations=True)


def peaks(passes: Sequence[zgraph.GraphPass]) -> tuple[int, int]:
    """Predicted and measured peak of a step whose activations are most of it."""
    report = zgraph.Report()
    torch.manual_seed(0)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = zgraph.shard(nn.Sequential(*parts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"lowering": "fx", "passes": zgraph.PassList(passes), "report": report}

    @zgraph.training_step(model, optimizer, options=options)
    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(BATCH, WIDTH)
    step(x)
    counts: list[Count] = []
    for _ in range(3):
        with counted() as count:
            step(x)
        counts.append(count)
    peak = report.graphs[-1].peak
    assert peak is not None
    return peak.bytes, steady_rise(counts)


@worlds(2)
def test_device_peak_is_as_predicted_and_lower(ranks: Ranks) -> None:
    kept = ranks.run(peaks, PLAIN)
    for (predicted, measured), (_, before) in zip(ranks.run(peaks, OFFLOADED), kept, strict=True):
        assert measured == pytest.approx(predicted, rel=0.05)
        assert measured < 0.7 * before


# --- order ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LateCopy:
    """A copy that is made when somebody waits for it; NaN until then."""

    source: Tensor
    copied: Tensor

    def wait(self) -> Tensor:
        return self.copied.copy_(self.source)


@dataclass(eq=False)
class LateLanes:
    """Copies as late as their waits allow: they read what their sources hold by then.

    Attributes:
        started: the copies, in order.
    """

    started: list[str] = field(default_factory=list[str])

    def offload(self, tensor: Tensor) -> LateCopy:
        self.started.append("offload")
        return LateCopy(tensor.detach(), torch.full_like(tensor, torch.nan))

    def reload(self, kept: Tensor) -> LateCopy:
        self.started.append("reload")
        return LateCopy(kept, torch.full_like(kept, torch.nan))


def gradients(
    passes: Sequence[zgraph.GraphPass],
    hardware: zgraph.Hardware | None = None,
    watcher: HappensBefore | None = None,
) -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    with loopback(4, Wire(watcher=watcher)):
        parts = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
        model = zgraph.shard(nn.Sequential(*parts))
        target = None if hardware is None else zgraph.Target(hardware=hardware)
        pipeline = zgraph.PassList(passes, target=target)
        compiled = torch.compile(model, backend="zgraph", options={"lowering": "fx", "passes": pipeline})
        compiled(torch.randn(2048, WIDTH)).square().mean().backward()
        return [parameter.grad.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("planned", [False, True])
def test_nobody_reads_what_has_not_arrived(monkeypatch: pytest.MonkeyPatch, planned: bool) -> None:
    """Copies end only where they are waited for: a reader that is early finds NaN, a writer that is early its mark."""
    hardware = zgraph.Hardware.preset("cpu") if planned else None
    passes = presets.planned(offload_activations=True) if planned else OFFLOADED
    expected = gradients(PLAIN)
    lanes = LateLanes()
    monkeypatch.setattr(codegen.lower_fx, "lanes_of", lambda device: lanes)
    for ours, theirs in zip(gradients(passes, hardware), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert lanes.started == [*3 * ["offload"], *3 * ["reload"]]


# --- choice -----------------------------------------------------------------------------------------------------------


def notes_of(bytes_per_us: float, budget_bytes: int) -> str:
    """What ChooseLifetimes says for a link to the host, with compute of a slow core."""
    link = Link(latency_us=10.0, bytes_per_us=bytes_per_us)
    hardware = replace(
        zgraph.Hardware.preset("cpu"),
        host_to_device=link,
        device_to_host=link,
        flops_per_us={torch.float32: 5e3},
        memory_bytes_per_us=10_000.0,
    )
    report = zgraph.Report()
    torch.compiler.reset()
    with loopback(4, Wire()):
        parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        model = zgraph.shard(nn.Sequential(*parts))
        target = zgraph.Target(hardware=hardware, budget_bytes=budget_bytes)
        pipeline = zgraph.PassList(presets.planned(offload_activations=True), target=target)
        options: dict[str, Any] = {"lowering": "fx", "passes": pipeline, "report": report}
        torch.compile(model, backend="zgraph", options=options)(torch.randn(4096, WIDTH)).square().mean().backward()
    return f"{report.notes} {zgraph.explain(model)}"


def test_a_fast_link_offloads_and_a_slow_one_recomputes() -> None:
    budget_bytes = 6 * 2**20  # of eight megabytes
    fast, slow = notes_of(20_000.0, budget_bytes), notes_of(1.0, budget_bytes)
    assert "offloads 0 activations" not in fast and "device_to_host: " in fast and "host_to_device: " in fast
    assert "device_to_host: " not in slow
    assert "offloads 0 activations" in slow and "recomputes 0 activations" not in slow


def test_a_size_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="least_bytes=0"):
        OffloadActivations(least_bytes=0)


# --- who may touch what, and when -------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [False, True])
def test_no_buffer_is_touched_or_freed_while_it_travels(monkeypatch: pytest.MonkeyPatch, planned: bool) -> None:
    """Copies and collectives in flight together; a judge sees every operator and every storage that is freed."""
    hardware = zgraph.Hardware.preset("cpu") if planned else None
    passes = presets.planned(offload_activations=True) if planned else OFFLOADED
    judge = judging(monkeypatch)
    lanes = JudgedLanes(judge)
    monkeypatch.setattr(codegen.lower_fx, "lanes_of", lambda device: lanes)
    gradients(passes, hardware, judge)
    assert judge.races == []
    assert [one.kind for one in judge.transfers if one.kind in ("offload", "reload")].count("reload") == 3


class FakeStream:
    """Notes in one list what streams are told."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: FakeStream) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.name} waits for the event of {event}")

    def record_event(self) -> str:
        self.calls.append(f"{self.name} records")
        return self.name


class FakeEvent:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def record(self, stream: FakeStream) -> None:
        self.calls.append(f"an event of {stream.name}")

    def synchronize(self) -> None:
        self.calls.append("the host waits for the event")


class FakeCuda:
    """Streams of a GPU that is not there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names = iter(("out", "back"))
        self.compute = FakeStream("compute", self.calls)

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(next(self.names), self.calls)

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking, "the host updates meanwhile"
        return FakeEvent(self.calls)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Generator[None]:
        self.calls.append(f"on {device}")
        yield

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, lane: FakeStream) -> Generator[None]:
        self.calls.append(f"on {lane.name}")
        yield


class FakeLanes(StreamLanes):
    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)


def test_stream_copies_start_after_compute_which_awaits_them() -> None:
    cuda = FakeCuda()
    lanes = FakeLanes(torch.device("cpu"), cuda)
    x = torch.randn(3)
    out = lanes.offload(x)
    assert cuda.calls == ["out waits for compute", "on out", "out records"]
    storage = weakref.ref(x.untyped_storage())
    del x
    assert storage() is not None, "what is read is held until compute waits"
    kept = out.wait()
    back = lanes.reload(kept)
    back.wait()
    assert cuda.calls[3:] == [
        "compute waits for the event of out",
        "back waits for compute",
        "on back",
        "back records",
        "compute waits for the event of back",
    ]


def test_host_update_starts_after_preceding_compute() -> None:
    cuda = FakeCuda()
    lanes = FakeLanes(torch.device("cpu"), cuda)
    moment = torch.zeros(3)
    first = lanes.update(torch.ops.aten.add_.Scalar, (moment, 1), {})
    assert first.result() is None and torch.equal(moment, torch.ones(3))
    assert cuda.calls == ["an event of compute", "on cpu", "the host waits for the event"]
    for update in [lanes.update(torch.ops.aten.mul_.Scalar, (moment, 2), {}) for _ in range(5)]:
        update.result()
    assert torch.equal(moment, torch.full((3,), 32.0)), "one after the other"
    with pytest.raises(RuntimeError, match="size of tensor"):
        lanes.update(torch.ops.aten.add_.Tensor, (moment, torch.ones(2)), {}).result()
    cuda.calls.clear()
    lanes.give_back(torch.ones(3), moment).wait()
    assert cuda.calls[:2] == ["back waits for compute", "on back"] and torch.equal(moment, torch.ones(3))
