"""`zgraph.Metrics`: its facts are those of summary, explain and measure, and it waits for nothing."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph
from tests.support.compiled import with_fx
from tests.support.compressing import compressing, feedback_of
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks
from zgraph.compression.residual_codec import decode_error
from zgraph.metrics import StepValues
from zgraph.passes import LoCo, LowRank, presets
from zgraph.reporting.metrics import metrics as metrics_module
from zgraph.sharding.scope import Scope, state_of

WIDTH, LAYERS = 48, 3


@pytest.fixture(autouse=True)
def frames_of_its_own() -> None:
    """Dynamo compiles the forward of nn.Sequential only so often."""
    torch.compiler.reset()


def build() -> nn.Module:
    """No biases: where the input needs a gradient, backward reads every weight."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)])


def batch() -> Tensor:
    return torch.full((2, WIDTH), 0.1, requires_grad=True)


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float | None]] = []
        self.closed = 0

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        assert values["step"] == step
        self.rows.append(values)

    def close(self) -> None:
        self.closed += 1


def scope_of(model: nn.Module) -> Scope:
    return next(state.scope for part in model.modules() if (state := state_of(part)) is not None)


# --- facts ----------------------------------------------------------------------------------------------------------


def facts(zero_stage: int, lowering: str) -> dict[str, Any]:
    model = zgraph.shard(build(), zero_stage=zero_stage)
    compiled = torch.compile(model, backend="zgraph", options={"lowering": lowering})
    metrics = zgraph.Metrics(compiled)
    found: list[StepValues] = []

    def step() -> None:
        compiled(batch()).square().mean().backward()
        norm = zgraph.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        metrics.step(tokens=6, grad_norm=norm)
        assert metrics.last is not None
        found.append(metrics.last)

    step()
    compile_ms = 1e3 * sum(zgraph.summary(model).seconds.values())
    predicted = [graph.peak.bytes for graph in zgraph.explain(model).graphs if graph.peak is not None]
    step()
    with zgraph.measure(model):
        step()
        step()
    measured = zgraph.explain(model).measured.values()
    step()
    return {
        "rows": found,
        "sent": zgraph.summary(model).step_bytes,
        "compile_ms": compile_ms,
        "predicted": max(predicted),
        "measured": max(each.peak_bytes or 0 for each in measured),
        "blocked_ms": 1e-3 * sum(sum(each.blocked_us.values()) for each in measured),
        "graphs_ms": 1e-3 * sum(each.us for each in measured),
        "recompiles": zgraph.summary(model).recompiles,
    }


def check_facts(found: dict[str, Any]) -> None:
    rows: list[StepValues] = found["rows"]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5] and found["recompiles"] == 0
    assert [row.sent_bytes for row in rows] == [found["sent"]] * 5 and found["sent"] > 0
    assert rows[0].compile_ms == pytest.approx(found["compile_ms"]) and [row.compile_ms for row in rows[1:]] == [0] * 4
    assert rows[0].step_ms > found["compile_ms"] > 0
    # The fourth step is the one whose times count: the third was slowed down to record allocations.
    assert rows[3].exposed_ms == pytest.approx(found["blocked_ms"], rel=1e-9)
    assert rows[3].step_ms > found["graphs_ms"] > 0
    assert all(0 < (row.exposed_ms or 0) < row.step_ms for row in rows)
    assert [row.graph_peak_bytes for row in rows[:2]] == [found["predicted"]] * 2
    assert rows[4].graph_peak_bytes == found["measured"]
    for row in rows:
        assert row.tokens_per_s == pytest.approx(6e3 / row.step_ms)
        assert row.grad_norm is not None and row.grad_norm == rows[0].grad_norm > 0
        assert row.peak_bytes is row.budget_share is row.error_norm is None and not row.own


@pytest.mark.parametrize("zero_stage", [2, 0, 1, 3])
def test_facts_are_those_of_summary_explain_and_measure(ranks: Ranks, zero_stage: int) -> None:
    first, second = ranks.run(facts, zero_stage, "fx")
    check_facts(first)
    check_facts(second)
    assert first["rows"][0].grad_norm == second["rows"][0].grad_norm


def test_facts_under_inductor(ranks: Ranks) -> None:
    for found in ranks.run(facts, 3, "inductor"):
        check_facts(found)


@pytest.mark.parametrize(("zero_stage", "gathers", "reductions"), [(1, 1, 1), (3, 2, 2), (0, 0, 1), (2, 1, 2)])
def test_a_window_counts_what_its_forwards_and_backwards_send(zero_stage: int, gathers: int, reductions: int) -> None:
    gathered = (LAYERS * WIDTH * WIDTH * 4) // 2
    expected = gathers * gathered * (2 if zero_stage == 3 else 1) + reductions * gathered * (1 if zero_stage else 2)
    with fake_world(2):
        model = zgraph.shard(build(), zero_stage=zero_stage)
        compiled = with_fx(model)
        metrics = zgraph.Metrics(model)
        for _ in range(3):
            with zgraph.no_sync(model):
                compiled(batch()).sum().backward()
            compiled(batch()).sum().backward()
            model.zero_grad()
            metrics.step()
            assert metrics.last is not None and metrics.last.sent_bytes == expected


def test_blocks_that_share_a_graph_count_one_by_one() -> None:
    with fake_world(2):
        model = zgraph.shard(build(), zero_stage=3)
        for block in model:  # type: ignore[attr-defined]
            block.compile(backend="zgraph", options={"lowering": "fx"})
        metrics = zgraph.Metrics(model)
        model(batch()).sum().backward()
        metrics.step()
        assert metrics.last is not None
        assert metrics.last.sent_bytes == LAYERS * zgraph.summary(model).step_bytes > 0


def test_a_budget_is_compared_with_the_peak_it_counts() -> None:
    budget = 200_000
    target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=budget)
    with fake_world(2):
        model = zgraph.shard(build())
        compiled = with_fx(model, passes=zgraph.PassList(presets.planned(), target=target))
        metrics = zgraph.Metrics(model)
        compiled(batch()).sum().backward()
        metrics.step()
        assert metrics.last is not None
        memory = zgraph.summary(model).frames[0].memory
        assert memory is not None and metrics.last.budget_share == memory.peak_bytes / budget
        with zgraph.measure(model):
            compiled(batch()).sum().backward()
        compiled(batch()).sum().backward()
        metrics.step()
        peaks = [each.peak_bytes or 0 for each in zgraph.explain(model).measured.values()]
        assert metrics.last.budget_share == max(peaks) / budget
        assert f"{metrics.last.budget_share:.0%} of the budget" in str(metrics.last)


def warm_up_bytes() -> list[tuple[int | None, int | None]]:
    model = zgraph.shard(build())
    compiled = compressing(model, LoCo(), warmup_steps=2)
    plain = zgraph.shard(build())
    with_fx(plain)(batch()).sum().backward()
    metrics = zgraph.Metrics(model)
    found: list[tuple[int | None, int | None]] = []
    for _ in range(4):
        compiled(batch()).sum().backward()
        model.zero_grad()
        metrics.step()
        assert metrics.last is not None
        found.append((metrics.last.sent_bytes, metrics.last.graph_peak_bytes))
    return [(zgraph.summary(plain).step_bytes, None), (zgraph.summary(model).step_bytes, None), *found]


def test_steps_of_warm_up_count_what_they_send(ranks: Ranks) -> None:
    for (plain, _), (compressed, _), *found in ranks.run(warm_up_bytes):
        assert [sent for sent, _ in found] == [plain, plain, compressed, compressed]
        assert plain is not None and compressed is not None and compressed < plain
        assert [peak is None for _, peak in found] == [True, True, False, False]


def error_norms(method: str) -> list[tuple[float | None, float]]:
    """What the metrics said, and the norm of the decoded errors, for each of six steps."""
    methods: dict[str, Any] = {
        "int8": LoCo(),
        "fp32": LoCo(error_dtype=torch.float32),
        "LowRank": LowRank(rank=1, least_saving=1.0),
    }
    model = zgraph.shard(build())
    compiled = compressing(model, methods[method])
    metrics = zgraph.Metrics(compiled, error_norm_every=2)
    found: list[tuple[float | None, float]] = []
    for step in range(6):
        compiled(torch.full((2, WIDTH), 0.1 * step + 0.1)).square().sum().backward()
        model.zero_grad()
        metrics.step()
        errors = [
            decode_error(kept["error"], kept["error_scale"]) if "error_scale" in kept else kept["error"]
            for slots in feedback_of(model).values()
            for kept in (feedback.tensors for feedback in slots.values())
        ]
        assert metrics.last is not None and errors
        found.append((metrics.last.error_norm, math.sqrt(sum(float(each.double().square().sum()) for each in errors))))
    return found


@pytest.mark.parametrize("method", ["int8", "LowRank", "fp32"])  # as that of LowRank is
def test_the_error_norm_is_that_of_the_decoded_state(ranks: Ranks, method: str) -> None:
    for found in ranks.run(error_norms, method):
        assert [said is None for said, _ in found] == [True, False] * 3
        for said, norm in found:
            assert norm > 0 and (said is None or said == pytest.approx(norm, rel=1e-5))


def test_unknown_metrics_are_none_and_never_zero() -> None:
    metrics = zgraph.Metrics(nn.Linear(2, 2), error_norm_every=1)
    metrics.step()
    assert metrics.last is not None
    known = {name for name, value in metrics.last.as_dict().items() if value is not None}
    assert known == {"step", "step_ms"}
    with fake_world(2):
        sharded = zgraph.shard(build())
        metrics = zgraph.Metrics(sharded, error_norm_every=1)
        sharded(batch()).sum().backward()  # eager: no compiled graph has run
        metrics.step()
    assert metrics.last is not None and metrics.last.compile_ms == 0
    assert metrics.last.sent_bytes is metrics.last.exposed_ms is metrics.last.graph_peak_bytes is None


def test_a_step_prints_as_one_line() -> None:
    row = StepValues(
        step=7, tokens_per_s=1234.5, step_ms=20, exposed_ms=1.5, sent_bytes=2048, grad_norm=0.5, own={"loss": 2.25}
    )
    assert str(row) == "step 7: 20.0 ms, 1,234 tokens/s, 1.50 ms exposed, sent 2.00 KiB, grad norm 0.5, loss 2.25"


def test_a_pause_is_no_part_of_a_step() -> None:
    with fake_world(2):
        model = zgraph.shard(build())
        compiled = with_fx(model)
        metrics = zgraph.Metrics(model)
        compiled(batch()).sum().backward()
        metrics.step()
        began = time.perf_counter()
        compiled(batch()).sum().backward()
        with metrics.pause():
            time.sleep(0.3)
            with metrics.pause(), torch.no_grad():
                compiled(batch())  # compiles a graph of its own
            time.sleep(0.3)
        metrics.step()
        took_ms = 1e3 * (time.perf_counter() - began)
    assert metrics.last is not None and metrics.last.sent_bytes == zgraph.summary(model).step_bytes
    assert 0 < metrics.last.step_ms < took_ms - 590 and metrics.last.compile_ms == pytest.approx(0, abs=1e-6)
    assert metrics.last.tokens_per_s is None


# --- what it must not do --------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def operators_of_steps() -> list[str]:
    model = zgraph.shard(build())
    compiled = compressing(model, LoCo())
    metrics = zgraph.Metrics(model, error_norm_every=1)
    seen = Operators()
    for _ in range(3):
        loss = compiled(batch()).square().mean()
        loss.backward()
        norm = zgraph.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        if dist.get_rank() == 0:  # alone: an exchange would hang
            with seen:
                metrics.step(tokens=2, grad_norm=norm, loss=loss)
    return seen.names


def test_a_step_communicates_nothing(ranks: Ranks) -> None:
    first, second = ranks.run(operators_of_steps)
    assert "aten.linalg_vector_norm.default" in first and not second
    assert not [name for name in first if "c10d" in name or "zgraph" in name or "wait" in name]


def gradients_with_and_without() -> tuple[bool, int, int]:
    model = zgraph.shard(build())
    compiled = with_fx(model)
    grads: list[list[Tensor]] = []

    def step() -> None:
        compiled(batch()).square().mean().backward()
        grads.append([parameter.grad.to_local().clone() for parameter in model.parameters()])  # type: ignore
        model.zero_grad()

    step()
    with zgraph.Metrics(model) as metrics:
        step()
        metrics.step()
    step()
    equal = all(torch.equal(a, b) for later in grads[1:] for a, b in zip(grads[0], later, strict=True))
    return equal, zgraph.summary(model).recompiles, len(scope_of(model).clocks)


def test_results_and_graphs_are_the_same_with_and_without(ranks: Ranks) -> None:
    assert ranks.run(gradients_with_and_without) == [(True, 0, 0)] * 2


def test_it_is_let_go_with_its_last_reference() -> None:
    with fake_world(2):
        model = zgraph.shard(build())
        metrics = zgraph.Metrics(model)
        other = zgraph.Metrics(model)  # two count side by side
        with_fx(model)(batch()).sum().backward()
        for each in (metrics, other):
            each.step()
        assert metrics.last is not None and other.last is not None
        assert metrics.last.sent_bytes == other.last.sent_bytes == zgraph.summary(model).step_bytes
        assert len(scope_of(model).clocks) == 2 and not copy.deepcopy(scope_of(model)).clocks
        del metrics, each
        gc.collect()
        assert len(scope_of(model).clocks) == 1


class Event:
    """An event of a device that has happened once it is told so."""

    def __init__(self, us: float) -> None:
        self.us = us
        self.happened = False
        self.waited = 0

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, end: Event) -> float:
        assert self.happened and end.happened
        return 1e-3 * (end.us - self.us)

    def synchronize(self) -> None:
        self.waited += 1
        self.happened = True


def test_device_step_is_written_when_it_has_ended_there(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def record(device: object) -> Event:
        events.append(Event(1000.0 * len(events)))
        return events[-1]

    monkeypatch.setattr(metrics_module, "now", record)
    monkeypatch.setattr(metrics_module, "_accelerator_of", lambda model: torch.device("cpu"))
    kept = Kept()
    metrics = zgraph.Metrics(nn.Linear(2, 2), writers=[kept])
    metrics.step(tokens=5)
    metrics.step(tokens=5)
    assert metrics.last is None and not kept.rows
    events[0].happened = events[1].happened = True
    with metrics.pause():
        pass
    metrics.step(loss=torch.tensor(2.0))
    assert [row["step"] for row in kept.rows] == [1] and kept.rows[0]["step_ms"] == 1
    assert kept.rows[0]["tokens_per_s"] == 5000
    assert not any(event.waited for event in events)
    for event in events[:-1]:
        event.happened = True
    metrics.close()
    assert [event.waited for event in events] == [0, 0, 0, 0, 0, 1]  # for the end of the last step, at the very end
    assert [row["step_ms"] for row in kept.rows] == [1, 1, 2] and kept.closed == 1  # without the pause of 1 ms


# --- use ------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_counting() -> None:
    first = zgraph.Metrics(nn.Linear(2, 2))
    first.step()
    first.step()
    second = zgraph.Metrics(nn.Linear(2, 2))
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.last is not None and second.last.step == 3
    for wrong in ({}, {"step": "3"}, {"step": True}, {"step": -1}):
        with pytest.raises(ValueError, match="has no number of steps"):
            second.load_state_dict(wrong)


class Broken(Kept):
    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        raise OSError("no space left on device")


def test_a_writer_that_fails_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    with caplog.at_level(logging.WARNING), zgraph.Metrics(nn.Linear(2, 2), writers=[Broken(), kept]) as metrics:
        for _ in range(3):
            metrics.step(loss=1.5)
    assert [record.getMessage() for record in caplog.records] == [
        "zgraph.Metrics: Broken failed and is not used again: no space left on device"
    ]
    assert [row["loss"] for row in kept.rows] == [1.5] * 3 and kept.closed == 1
    metrics.close()
    assert kept.closed == 1
    with pytest.raises(zgraph.ZgraphError, match="it was closed; make another"):
        metrics.step()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": True}, "tokens=True; write how many"),
        ({"tokens": -1}, "tokens=-1"),
        ({"tokens": 2.5}, "tokens=2.5"),
        ({"grad_norm": torch.ones(2)}, "grad_norm has 2 elements; pass one number"),
        ({"loss": "low"}, "loss is a str; pass a number, or a tensor of one"),
        ({"loss": None}, "loss is a NoneType"),
        ({"step_ms": 1.0}, "step_ms is one of zgraph's own values; give yours another name"),
    ],
)
def test_values_that_say_nothing_are_refused(given: dict[str, Any], message: str) -> None:
    metrics = zgraph.Metrics(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"zgraph.Metrics.step: {message}"):
        metrics.step(**given)
    metrics.step()
    assert metrics.last is not None and metrics.last.step == 1  # what was refused does not count


def test_a_norm_that_would_have_to_be_exchanged_is_refused() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        metrics = zgraph.Metrics(nn.Linear(2, 2))
        for placement in (Partial(), Shard(0)):
            norm = DTensor.from_local(torch.ones(1), mesh, [placement], run_check=False)
            with pytest.raises(
                ValueError, match=r"grad_norm is spread over ranks .* grad_norm.full_tensor\(\), or for"
            ):
                metrics.step(grad_norm=norm)
        metrics.step(grad_norm=DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()], run_check=False))
    assert metrics.last is not None and metrics.last.grad_norm == 2


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model is a dict; pass what zgraph.shard returned"):
        zgraph.Metrics({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_norm_every=-1; write a number of steps"):
        zgraph.Metrics(nn.Linear(2, 2), error_norm_every=-1)
    with pytest.raises(ValueError, match=r"writers has a str, which cannot write; pass such as zgraph.metrics"):
        zgraph.Metrics(nn.Linear(2, 2), writers=["run.jsonl"])  # type: ignore[list-item]
    model = build()
    metrics = zgraph.Metrics(model)
    with fake_world(2):
        zgraph.shard(model)
        with pytest.raises(zgraph.ZgraphError, match=r"sharded after its Metrics was made; make it after zgraph"):
            metrics.step()
