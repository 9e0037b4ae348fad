"""Where updates of what rests on the host run, chosen on the simulator: the same on all ranks, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zgraph
from tests.support.graphs import KeepEach, fake_world
from tests.support.hash_seeds import HashSeeds
from tests.support.lazy_streams import late_gpu
from tests.support.ranks import Ranks, every_world, worlds
from tests.support.resting import HOST, STATE, machine
from tests.support.whole_steps import Case, assert_same, train
from zgraph.analysis.cost import CostModel
from zgraph.analysis.liveness import curve_of, memory_curve
from zgraph.analysis.storages import storages_of
from zgraph.graph import meta
from zgraph.graph.text import graph_text
from zgraph.passes import StreamStates, presets
from zgraph.passes.memory.updates_at_rest import Outcome, choose_updates, predicted
from zgraph.planner.planned_step import Plan
from zgraph.torch_compat.operators import is_fused_update

H100 = zgraph.Hardware.preset("h100")
WIDTH, LAYERS = 64, 4
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
BUDGET = 1000


# --- the search -------------------------------------------------------------------------------------------------------


def searched(
    count: int,
    us: Callable[[int], float],
    held: Callable[[int], int] = lambda on_host: 0,
    by_rules: Callable[[int], float] | None = None,
) -> tuple[Any, list[tuple[int, bool]]]:
    """What is chosen, where a step with so many updates on the host takes `us` and holds `held`; what was asked."""
    asked: list[tuple[int, bool]] = []

    def outcome_of(on_host: int, by_costs: bool) -> Outcome:
        asked.append((on_host, by_costs))
        excess = max(0, held(on_host) - BUDGET)
        took = us(on_host) if by_costs or by_rules is None else by_rules(on_host)
        return Outcome(on_host=on_host, excess_bytes=excess, step_us=took, compute_us=100.0)

    found = choose_updates(count, lambda on_host: outcome_of(on_host, False), lambda on_host: outcome_of(on_host, True))
    assert len(asked) == len(set(asked))
    return found, asked


@pytest.mark.parametrize(
    ("us", "held", "best"),
    [
        (lambda on_host: 200.0, lambda on_host: 0, 16),  # the host, where nothing is better
        (lambda on_host: 198.5 if on_host == 0 else 200.0, lambda on_host: 0, 16),  # by more than predictions are off
        (lambda on_host: 197.0 if on_host == 0 else 200.0, lambda on_host: 0, 0),
        (lambda on_host: 100.0 + max(10 * on_host, 6 * (16 - on_host)), lambda on_host: 0, 6),
        (lambda on_host: 100.0 + max(10 * on_host, 30 * (16 - on_host)), lambda on_host: 0, 12),
        (lambda on_host: 100.0 + max(40 * on_host, 6 * (16 - on_host)), lambda on_host: 0, 2),
        (lambda on_host: 100.0 + on_host, lambda on_host: 900 + (16 - on_host) * 10, 6),  # as many as the budget allows
        (lambda on_host: 100.0 + on_host, lambda on_host: 2000 + (16 - on_host) * 10, 16),  # none fits: the least
        (lambda on_host: 500.0 - on_host, lambda on_host: 1000 + on_host, 0),
    ],
)
def test_the_fastest_within_the_budget_is_chosen(
    us: Callable[[int], float], held: Callable[[int], int], best: int
) -> None:
    found, _ = searched(16, us, held)
    assert found.best.on_host == best
    assert (found.host.on_host, found.device.on_host) == (16, 0)


def test_mixtures_are_tried_only_where_one_may_be_better() -> None:
    both = [(16, True), (0, True)]
    assert searched(16, lambda on_host: 100.5)[1] == both  # the device computes all the time
    tried = [(on_host, False) for on_host in (14, 12, 10, 8, 6, 4, 2)]
    assert searched(16, lambda on_host: 200.0)[1] == [*both, *tried, (14, True)]
    found, asked = searched(16, lambda on_host: 200.0 - on_host % 16, by_rules=lambda on_host: abs(on_host - 4.0))
    assert asked == [*both, *tried, (4, True)] and found.best.on_host == 4  # the best of rules alone
    assert searched(1, lambda on_host: 200.0)[1] == [(1, True), (0, True)]
    assert searched(2, lambda on_host: 200.0)[1] == [(2, True), (0, True), (1, False), (1, True)]


def test_a_choice_says_what_it_was_made_by() -> None:
    found, _ = searched(4, lambda on_host: 300.0 - on_host)
    assert str(found) == "updates on the host: 296 us predicted, 300 us on the device"
    found, _ = searched(4, lambda on_host: 200.0 + 10 * on_host, lambda on_host: 997 + on_host)
    assert str(found) == "updates on the device: 200 us predicted, 240 us on the host, 1 bytes above the budgets"
    found, _ = searched(4, lambda on_host: 200.0 + max(40 * on_host, 20 * (4 - on_host)))
    assert str(found) == (
        "1 of 4 updates on the host, the later ones on the device: 260 us predicted, 360 us with all on the host, "
        "280 us with all on the device"
    )


# --- plans: each schedules the copies of a step up to four times, which takes seconds ---------------------------------


SLOW_UPDATES, SLOW_LINK, BALANCED = (20_000.0, 50.0), (100.0, 20_000.0), (500.0, 700.0)


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def planned(
    hardware: zgraph.Hardware,
    offload: zgraph.Offload,
    budget_bytes: int | None = None,
    world: int = 2,
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    found: list[fx.GraphModule] | None = None,
) -> Plan:
    """The plan of a step; its final graph goes to `found`."""
    target = zgraph.Target(hardware=hardware, budget_bytes=budget_bytes)
    passes = [*presets.planned(bucket_bytes=4 * WIDTH * WIDTH), *([] if found is None else [KeepEach(found)])]
    return zgraph.plan(
        build,
        world_size=world,
        batch=lambda: (torch.zeros(8, WIDTH),),
        hardware=hardware,
        passes=zgraph.PassList(passes, target=target),
        offload=offload,
        optimizer_fn=optimizer_fn,
    )


def decision_of(plan: Plan) -> str:
    (graph,) = plan.compiled.graphs
    (text,) = graph.decisions
    assert f"    {text}" in str(plan).splitlines()
    assert f"stream_states on step: {text}" in plan.compiled.notes
    return text


def updated_on_host(plan: Plan) -> int:
    return next((lane.count for lane in plan.compiled.graphs[0].copies if lane.lane == "host_updates"), 0)


@pytest.mark.parametrize(
    ("rates", "gpu", "offload", "chosen"),
    [
        (SLOW_UPDATES, True, HOST, "updates on the device"),
        (SLOW_LINK, False, HOST, "updates on the host"),
        (SLOW_LINK, True, HOST, "updates on the host"),
        (SLOW_UPDATES, False, STATE, "updates on the device"),
        (BALANCED, True, HOST, "of 4 updates on the host, the later ones on the device"),
        (SLOW_UPDATES, True, STATE, "updates on the device"),
        # Where parameters stay on the device, both ways copy: each takes a part, of the gradients or of the state.
        (SLOW_LINK, True, STATE, "of 4 updates on the host, the later ones on the device"),
    ],
)
def test_a_plan_updates_where_the_step_is_fastest(
    rates: tuple[float, float], gpu: bool, offload: zgraph.Offload, chosen: str
) -> None:
    """Beside plans in which it was said where."""
    hardware = machine(*rates, gpu=gpu)
    found = planned(hardware, offload)
    host, device = (planned(hardware, replace(offload, update=place)) for place in ("host", "device"))
    text = decision_of(found)
    assert text.partition(":")[0].endswith(chosen)
    assert not host.compiled.graphs[0].decisions
    assert found.step_us <= min(host.step_us, device.step_us) * 1.01
    for us in (found.step_us, host.step_us, device.step_us):
        assert f"{us:.0f} us" in text
    on_host = updated_on_host(found)
    assert on_host == {"updates on the host": LAYERS, "updates on the device": 0}.get(chosen, on_host)
    assert updated_on_host(host) == LAYERS and updated_on_host(device) == 0
    assert 0 < on_host < LAYERS or chosen.startswith("updates")


def test_a_prediction_says_by_how_much_it_exceeds_both_budgets() -> None:
    hardware, graphs = machine(*BALANCED), list[fx.GraphModule]()
    # Without groups; what comes from disk passes through pinned memory of the host.
    offload = zgraph.Offload(params="disk", optimizer="host", path="unused", update="host")
    planned(hardware, offload, world=1, found=graphs)
    order = list(graphs[0].graph.nodes)
    peak = curve_of(order, storages_of(order, agreed=True)).peak_bytes
    host = memory_curve(graphs[0].graph, device_type="cuda", agreed=True).peak_in("host")
    assert host > memory_curve(graphs[0].graph, agreed=True).peak_in("host")
    ctx = zgraph.PassContext(direction="step", cost_of=CostModel(hardware).cost, planned_backend="nccl")
    for device_bytes, host_bytes, excess in (
        (None, None, 0),
        (peak, host, 0),
        (peak - 5, None, 5),
        (None, host - 7, 7),
        (peak - 5, host - 7, 12),
    ):
        limited = replace(ctx, plan_bytes=device_bytes, host_budget_bytes=host_bytes)
        assert predicted(graphs[0].graph, limited, 1, by_costs=False).excess_bytes == excess


def test_the_budget_of_the_host_can_leave_the_device_alone() -> None:
    """On a GPU, gradients on their way to the host take memory there."""
    hardware = machine(*SLOW_LINK)
    at_rest = 3 * PARAMETER_BYTES // 2
    with pytest.raises(ValueError, match=f"host_budget_bytes={at_rest}"):
        planned(hardware, replace(HOST, update="host", host_budget_bytes=at_rest))
    found = planned(hardware, replace(HOST, host_budget_bytes=at_rest))
    assert decision_of(found).startswith("updates on the device")
    assert found.host_bytes == at_rest
    roomy = planned(hardware, replace(HOST, host_budget_bytes=2 * at_rest))
    assert decision_of(roomy).startswith("updates on the host")


def test_nothing_is_chosen_where_there_is_no_choice() -> None:
    """Of many small calls, of state on the device, of what is said, and of rules."""
    hardware = machine(*SLOW_UPDATES)
    for offload, optimizer_fn in (
        (HOST, lambda model: torch.optim.AdamW(model.parameters(), foreach=True)),
        (replace(HOST, update="host"), adamw),
    ):
        assert not planned(hardware, offload, optimizer_fn=optimizer_fn).compiled.graphs[0].decisions
    for pipeline, updates in (
        (None, "at_rest"),
        (zgraph.PassList(presets.default()), "at_rest"),
        (zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=H100)), "planned"),
        (zgraph.PassList(presets.planned()[:-2], target=zgraph.Target(hardware=H100)), "planned"),
    ):
        passes = presets.with_streams(pipeline).passes
        assert [one.updates for one in passes if isinstance(one, StreamStates)] == [updates]
    with pytest.raises(
        zgraph.PreconditionError, match="stream_states plans by costs, and the list of passes has no target"
    ):
        zgraph.PassList([*presets.default()[:-1], StreamStates(updates="planned")])


@pytest.mark.parametrize("gpu", [True, False])
def test_the_first_updates_run_on_the_host(gpu: bool) -> None:
    graphs: list[fx.GraphModule] = []
    text = decision_of(planned(machine(*BALANCED, gpu=gpu), HOST, found=graphs))
    on_host = [meta.beside(node) is not None for node in graphs[0].graph.nodes if is_fused_update(node.target)]
    assert len(on_host) == LAYERS and on_host == sorted(on_host, reverse=True)
    assert f"{sum(on_host)} of {LAYERS} updates on the host" in text


def test_a_plan_that_is_made_again_chooses_the_same() -> None:
    graphs: list[fx.GraphModule] = []
    first, again = (planned(machine(*BALANCED), HOST, found=graphs) for _ in range(2))
    assert decision_of(first) == decision_of(again)
    assert graph_text(graphs[0].graph) == graph_text(graphs[1].graph)


def printed() -> None:
    print(decision_of(planned(machine(*BALANCED), HOST)))


# --- training: ranks compile a plan and run it beside the plain loop, which takes seconds -----------------------------

SLOW_BOTH, IN_BF16 = (20.0, 30.0), (20.0, 80.0)  # for a small model
STEPS = {
    "host": Case(at_rest=HOST, planned=True, hardware=machine(*SLOW_LINK), clip="torch"),
    "device": Case(at_rest=STATE, planned=True, hardware=machine(*SLOW_UPDATES), stage=2, accumulation=2, no_sync=True),
    "some": Case(at_rest=HOST, planned=True, hardware=machine(*SLOW_BOTH)),
    "some, resumed": Case(at_rest=HOST, planned=True, hardware=machine(*SLOW_BOTH), resume=True, stage=1),
    "some, frugal": Case(at_rest=STATE, frugal=True, hardware=machine(*IN_BF16), precision="bf16", schedule=True),
}


def chosen_by(case: Case, gpu: bool) -> list[str]:
    """What was chosen for the steps that find state; they leave the same bits as the plain loop on the device."""
    expected = train(replace(case, at_rest=None, frugal=False, planned=False), whole_step=False)
    if gpu:
        with late_gpu():
            found = train(case, whole_step=True)
    else:
        found = train(case, whole_step=True)
    assert_same(found, expected)
    return [note for note in found.notes if " us predicted" in note and note.startswith("stream_states")]


@worlds(2)
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("some", True),
        ("host", False),
        ("host", True),
        ("device", False),
        ("device", True),
        ("some", False),
        *((name, gpu) for name in ("some, resumed", "some, frugal") for gpu in (False, True)),
    ],
)
def test_steps_are_the_same_bits_wherever_they_update(ranks: Ranks, name: str, gpu: bool) -> None:
    first, *others = ranks.run(chosen_by, STEPS[name], gpu)
    assert others == [first] * len(others)
    assert first and all(("the later ones" in note) == name.startswith("some") for note in first), first


@every_world
def test_ranks_without_rows_choose_as_the_others(ranks: Ranks) -> None:
    found = ranks.run(chosen_by, replace(STEPS["some"], started=True), False)
    chosen = [[note.partition(": ")[2].partition(":")[0] for note in notes] for notes in found]
    assert chosen[0] and chosen == [chosen[0]] * len(chosen)


def test_the_choice_is_the_same_under_every_hash_seed(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    one, other = hash_seeds.printed(f"from {__name__} import printed; printed()", tmp_path)
    assert "the later ones on the device" in one and one == other


def explained(offload: zgraph.Offload) -> tuple[str, str]:
    model = zgraph.shard(build(), offload=offload)
    optimizer = adamw(model)
    target = zgraph.Target(hardware=machine(*SLOW_UPDATES, gpu=False))
    options: dict[str, Any] = {"lowering": "fx", "passes": zgraph.PassList(presets.planned(), target=target)}

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured: Any = zgraph.training_step(model, optimizer, options=options)(step)
    for _ in range(2):
        captured(torch.zeros(8, WIDTH))
    found = zgraph.explain(model)
    return str(found), str(found.tables()[-1])


def test_an_explanation_shows_where_updates_run() -> None:
    with fake_world(2):
        for text in explained(HOST):
            assert "updates on the device: " in text and " us on the host" in text
