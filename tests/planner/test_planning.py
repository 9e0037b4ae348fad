"""Plans of a cluster on one machine: the same graphs as on real ranks, memory by the formulas, errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks
from zgraph.analysis.cuda_workspace import COMMUNICATOR_BYTES
from zgraph.graph import nodes
from zgraph.passes import BucketCollectives, presets
from zgraph.planner.planned_step import Plan
from zgraph.planner.whole_step import loop_body
from zgraph.reporting.tables import size
from zgraph.tiers.lanes import Lane

WIDTH, LAYERS = 64, 6
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4


def build() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)])


def planned(world: int, hardware: Any = "cpu", zero_stage: int = 3, **options: Any) -> Plan:
    return zgraph.plan(
        build,
        world_size=world,
        shard_fn=functools.partial(zgraph.shard, zero_stage=zero_stage),
        hardware=hardware,
        batch=lambda: (torch.zeros(8, WIDTH, requires_grad=True),),
        **options,
    )


def compiled_for_real(zero_stage: int) -> tuple[int, list[int]]:
    model = zgraph.shard(build(), zero_stage=zero_stage)
    with_fx(model)(torch.zeros(8, WIDTH, requires_grad=True)).sum().backward()
    report = zgraph.summary(model)
    return report.step_bytes, [graph.nodes for graph in report.graphs]


@pytest.mark.parametrize("zero_stage", [2, 0, 3])  # which gathers once, and reduces twice
def test_it_plans_what_real_ranks_compile(ranks: Ranks, zero_stage: int) -> None:
    found = planned(2, zero_stage=zero_stage)
    assert (found.sent_bytes, [graph.nodes for graph in found.graphs]) == ranks.run(compiled_for_real, zero_stage)[0]


def test_other_shapes_compiled_before_do_not_matter() -> None:
    """They would make sizes symbols, which are inputs of the graph."""

    def nodes_planned() -> list[int]:
        return [graph.nodes for graph in planned(2).graphs]

    expected = nodes_planned()
    with fake_world(2):
        called = with_fx(zgraph.shard(build()))
        for rows in (3, 5):
            called(torch.zeros(rows, WIDTH, requires_grad=True))
    assert nodes_planned() == expected


@pytest.mark.parametrize("world", [8, 64])
def test_bytes_follow_the_formulas(world: int) -> None:
    """3P (N-1)/N on the wire; P/N and two moments of it at rest; a gradient of each shard at the end."""
    found = planned(world)
    assert found.sent_bytes == 3 * PARAMETER_BYTES * (world - 1) // world
    assert found.parameter_bytes == PARAMETER_BYTES // world
    assert found.moment_bytes == 2 * found.parameter_bytes
    assert found.peak_bytes == found.parameter_bytes + found.moment_bytes + found.step_bytes
    assert found.curves[0].bytes_after[-1] >= PARAMETER_BYTES // world


def test_on_gpus_libraries_hold_memory_too() -> None:
    """The groups of gathers and of reductions; forward's handle of cuBLAS and backward's."""
    found, alone = planned(8, "h100"), planned(1, "a100")
    assert (found.cublas_bytes, found.communicator_bytes) == (2 * 32 * 2**20, 2 * COMMUNICATOR_BYTES)
    assert (alone.cublas_bytes, alone.communicator_bytes) == (2 * (2 * 4096 + 8 * 16) * 2**10, 0)
    libraries = found.cublas_bytes + found.communicator_bytes
    assert found.peak_bytes == found.parameter_bytes + found.moment_bytes + found.step_bytes + libraries
    assert f"cuBLAS workspaces 64.00 MiB, NCCL communicators {size(2 * COMMUNICATOR_BYTES)}" in str(found)
    assert "cuBLAS" not in str(planned(8, "cpu"))


def test_without_another_wish_the_stage_is_3() -> None:
    found = zgraph.plan(build, world_size=4, hardware="cpu", batch=lambda: (torch.zeros(8, WIDTH),))
    assert found.parameter_bytes == PARAMETER_BYTES // 4


def test_gpus_reduce_by_nccl() -> None:
    def starts(found: Plan) -> list[bool]:
        return [
            nodes.is_reduce_scatter(node) for node in found.graphs[1].timeline.exposed_us if not nodes.is_gather(node)
        ]

    found = planned(8, "h100")
    assert str(found).startswith("zgraph.plan for 8 ranks of h100")
    assert all(starts(found)) and not any(starts(planned(8, "cpu")))


def test_slower_machine_has_longer_step_and_plan_explains_it() -> None:
    fast, slow = planned(8, "h100"), planned(8, "cpu")
    assert fast.step_us < slow.step_us
    for graph in slow.graphs:
        assert graph.exposed_us <= graph.timeline.step_us
        assert Lane.of_group("0") in graph.timeline.busy_us
    assert "ms exposed" in str(slow) and "of 256 GiB" in str(slow)
    assert f"peak of the step beside them {size(slow.step_bytes)}; together {size(slow.peak_bytes)} of" in str(slow)
    assert f"  peak {size(slow.step_bytes)} while " in str(slow)


def test_a_schedule_that_knows_the_machine_is_not_slower() -> None:
    machine = zgraph.Hardware.preset("cpu")
    rules = [BucketCollectives(bucket_bytes=20_000) if p.name == "bucket_collectives" else p for p in presets.default()]
    target = zgraph.Target(hardware=machine)
    by_rules = planned(8, machine, passes=zgraph.PassList(rules))
    by_costs = planned(8, machine, passes=zgraph.PassList(presets.planned(bucket_bytes=20_000), target=target))
    assert by_costs.step_us <= by_rules.step_us


@pytest.mark.parametrize("world", [0, True])
def test_a_world_of_nobody_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match=r"zgraph.plan: world_size=.*; write the number of ranks"):
        planned(world)


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'h100'"):
        planned(2, "h10")


@pytest.mark.parametrize(
    ("model_fn", "batch", "message"),
    [
        (nn.Linear(4, 4), tuple, "model_fn is a Linear; pass a function that makes the model"),
        (None, tuple, "model_fn is a NoneType; pass a function"),
        (build, (torch.zeros(8, WIDTH),), "batch is a tuple; pass a function that returns the tuple"),
        (build, lambda: torch.zeros(1, 8, WIDTH), r"batch returned a .*Tensor; return the tuple .*\(tokens,\)"),
    ],
)
def test_unplannable_model_or_batch_is_refused(model_fn: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"zgraph\.plan: {message}"):
        zgraph.plan(model_fn, world_size=2, hardware="cpu", batch=batch)


def test_it_needs_a_process_of_its_own() -> None:
    with fake_world(2), pytest.raises(zgraph.ZgraphError, match="in a process group already"):
        planned(2)


def test_the_group_is_gone_afterwards_also_after_an_error() -> None:
    def broken() -> tuple[Tensor]:
        raise RuntimeError("no batch today")

    with pytest.raises(RuntimeError, match="no batch today"):
        zgraph.plan(build, world_size=2, batch=broken)
    assert not torch.distributed.is_initialized()


# --- whole steps ----------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    *hidden, last = model.parameters()
    return [torch.optim.Muon(hidden), torch.optim.AdamW([last], fused=True)]


def captured_for_real(zero_stage: int, make: Any = adamw, lines: Any = None) -> tuple[int, int]:
    model = zgraph.shard(build(), zero_stage=zero_stage)
    optimizer = make(model)
    report = zgraph.Report()
    options = {"lowering": "fx", "report": report}
    step: Any = zgraph.training_step(model, optimizer, options=options)((lines or clipped)(model, optimizer))
    for _ in range(2):
        step(torch.zeros(8, WIDTH))
    last = report.graphs[-1]
    return last.nodes, last.sent_bytes


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_plan_with_an_optimizer_covers_the_whole_step(ranks: Ranks, zero_stage: int) -> None:
    found = planned(2, zero_stage=zero_stage, optimizer_fn=adamw, step_fn=clipped)
    (graph,) = found.graphs
    assert graph.direction == "step"
    assert (graph.nodes, found.sent_bytes) == ranks.run(captured_for_real, zero_stage)[0]


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_plan_takes_several_optimizers(ranks: Ranks, zero_stage: int) -> None:
    found = planned(2, zero_stage=zero_stage, optimizer_fn=muon_and_adamw)
    (graph,) = found.graphs
    with_lines = ranks.run(captured_for_real, zero_stage, muon_and_adamw, loop_body)[0]
    assert (graph.nodes, found.sent_bytes) == with_lines
    assert found.optimizer == "Muon and AdamW"
    assert found.moment_bytes < planned(2, zero_stage=zero_stage).moment_bytes  # one moment of a matrix instead of two


def test_the_step_of_a_plan_includes_its_optimizer() -> None:
    alone, whole = planned(8), planned(8, optimizer_fn=adamw)
    scalars = LAYERS * 4  # of counted steps
    assert whole.moment_bytes == alone.moment_bytes + scalars
    (graph,) = whole.graphs
    (update_us,) = (span.us for node, span in graph.timeline.spans.items() if "_fused_adamw_" in str(node.target))
    moved = 7 * PARAMETER_BYTES // 8 + 2 * scalars  # read: shard, gradient, moments, counts; written: without gradient
    hardware = zgraph.Hardware.preset("cpu")
    assert update_us == pytest.approx(hardware.compute_us(0, moved, torch.float32), rel=0.01)
    assert "step with AdamW: " in str(whole) and "state of AdamW" in str(whole)
    assert whole.as_json()["optimizer"] == "AdamW" and alone.as_json()["optimizer"] is None
    assert "step without optimizer" in str(alone)


def test_a_whole_step_is_planned_within_a_budget() -> None:
    def within(budget_bytes: int | None) -> Plan:
        target = zgraph.Target(hardware=zgraph.Hardware.preset("cpu"), budget_bytes=budget_bytes)
        pipeline = zgraph.PassList(presets.planned(), target=target)
        return planned(2, optimizer_fn=adamw, passes=pipeline)

    plenty = within(10**9).step_bytes
    with pytest.raises(ValueError, match="smallest budget that it was found to fit into is") as error:
        within(1)
    least = int(str(error.value).split("found to fit into is ")[1].split()[0])
    assert least <= plenty and within(least).step_bytes <= least


def test_a_step_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a step_fn and no optimizer_fn"):
        planned(2, step_fn=clipped)
    with pytest.raises(zgraph.ZgraphError, match=r"does not call optimizer\.step"):
        planned(2, optimizer_fn=adamw, step_fn=lambda model, optimizer: lambda x: model(x).sum().backward())
    with pytest.raises(zgraph.ZgraphError, match=r"in RAdam\.step\(\), decides in Python by a value"):
        planned(2, optimizer_fn=lambda model: torch.optim.RAdam(model.parameters()))


class Embedded(nn.Module):
    """Its peak is the workspace of the embedding's backward on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.embedding(tokens)).sum()


def test_a_budget_counts_the_workspaces_of_the_planned_gpu() -> None:
    """A CPU, which stands for the GPU while it plans, would need less."""
    h100 = zgraph.Hardware.preset("h100")

    def within(budget_bytes: int) -> Plan:
        passes = zgraph.PassList(presets.planned(), target=zgraph.Target(hardware=h100, budget_bytes=budget_bytes))
        tokens = (torch.zeros(64, 1024, dtype=torch.long),)
        return zgraph.plan(Embedded, world_size=4, batch=lambda: tokens, hardware=h100, passes=passes)

    least = within(2**30).step_bytes
    assert within(least).step_bytes == least
    with pytest.raises(Exception, match=f"does not fit into budget_bytes={least - 1}.*{least} bytes"):
        within(least - 1)
