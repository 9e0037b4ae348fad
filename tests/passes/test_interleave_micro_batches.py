"""Micro-batches of a captured step that run together through each layer: the same sums, for the bytes of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import zgraph
from tests.support.graphs import Keep
from tests.support.micro_batches import (
    Averaged,
    Case,
    Checkpointed,
    Clipped,
    Dropping,
    EightBit,
    Noisy,
    Normed,
    Preferences,
    Recurrent,
    Scaled,
    Several,
    Skips,
    Stepping,
    Tasks,
    TwoLosses,
    Watched,
    Wide,
    compiled,
    differences,
    peaks,
    tokens,
)
from tests.support.models import Language
from tests.support.ranks import Ranks, worlds
from zgraph.analysis.hardware import Link
from zgraph.graph import nodes
from zgraph.graph.sizes import tensor_bytes, tensors_of

P = zgraph.passes
H100 = zgraph.Hardware.preset("h100")
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
LOCO = {"compression": P.LoCo()}

# Every value occurs with most others: stages, precision, windows, the number of micro-batches, what is recomputed,
# planning, and loops that users write.
EQUAL = {
    "stage 3": Case(),
    "stage 2, no windows": Case(stage=2, no_sync=False, k=4),
    "stage 1, bf16": Case(stage=1, shard=BF16, recompute=False),
    "stage 0, autocast": Case(stage=0, autocast=True, k=2),
    "bf16, no windows, clipped": Case(loop=Clipped, shard=BF16, no_sync=False),
    "autocast, kept": Case(autocast=True, recompute=False, k=5),
    "planned, clipped": Case(loop=Clipped, target=zgraph.Target(hardware=H100)),
    "planned, kept": Case(target=zgraph.Target(hardware=H100), recompute=False, stage=2, no_sync=False),
    "a budget": Case(target=zgraph.Target(hardware=H100, budget_bytes=60_000), k=4),
    "a loss scale": Case(loop=Scaled, stage=2),
    "checkpointed": Case(build=Checkpointed, shard=BF16),
    "statistics of batches": Case(build=Normed, k=4),
    "skips": Case(build=Skips, stage=2, recompute=True),
    "at rest on the host": Case(shard={"offload": zgraph.Offload(params="host", optimizer="host")}, k=2),
    "an average of weights": Case(loop=Averaged, stage=2, k=2),
    "noise": Case(loop=Noisy, stage=2, k=2),
    "8 bits": Case(loop=EightBit, build=Wide, stage=2, shard={"offload": zgraph.Offload(optimizer="host")}, k=2),
    "activations on the host": Case(preset={"offload_activations": True}, k=4),
    "the same, kept": Case(preset={"offload_activations": True}, k=2, recompute=False, no_sync=False),
    "updates in between": Case(loop=Stepping, k=4, no_sync=False),
}


@worlds(2)
@pytest.mark.parametrize("name", EQUAL)
def test_results_are_those_of_gradients_summed_and_then_reduced(ranks: Ranks, name: str) -> None:
    case = EQUAL[name]
    stage = 0 if case.stage == 0 else 1  # fused AdamW rounds whole tensors and shards differently
    for found, windows in ranks.run(differences, case, stage):
        assert found == {}
        assert windows == (2 if case.loop is Stepping else 1)


@worlds(2)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(preset=LOCO, k=2), id="loco"),
        pytest.param(Case(preset={"compression": P.LowRank(rank=1, least_saving=1.0)}, stage=2), id="low rank"),
        pytest.param(Case(preset={"gather_compression": P.NoFeedback(bits=8)}), id="coded parameters"),
    ],
)
def test_compression_codes_the_sum(ranks: Ranks, case: Case) -> None:
    for found in ranks.run(differences, case):
        assert found == ({}, 1)


@worlds(4)
def test_replicas_of_shards(ranks: Ranks) -> None:
    for found in ranks.run(differences, Case(replicas=True, k=2)):
        assert found == ({}, 1)


@worlds(2)
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        pytest.param(Case(build=Language, sgd=True), 5e-7, id="tied weights"),
        pytest.param(Case(build=Recurrent, k=2, sgd=True), 5e-7, id="gates overwritten in place"),
        pytest.param(Case(loop=TwoLosses, k=2, sgd=True), 5e-7, id="two losses"),
        pytest.param(Case(loop=Preferences, sgd=True), 5e-7, id="two forwards"),
        pytest.param(
            Case(loop=Preferences, stage=2, no_sync=False, recompute=False, sgd=True), 5e-7, id="the same, kept"
        ),
        pytest.param(Case(loop=Tasks, build=Several, k=4, no_sync=False, sgd=True), 5e-7, id="tasks"),
        pytest.param(Case(inductor=True, k=2, sgd=True), 1e-6, id="inductor"),  # compiles C++
        pytest.param(
            Case(inductor=True, k=2, shard=BF16, sgd=True, recompute=False), 2e-3, id="inductor, bf16"
        ),  # compiles C++; bf16 has 8 bits
    ],
)
def test_other_sums_differ_by_rounding(ranks: Ranks, case: Case, tolerance: float) -> None:
    for found, windows in ranks.run(differences, case, 3, case.no_sync):
        assert windows == 1
        assert found  # it was another order of additions
        assert max(found.values()) < tolerance


def reasons(case: Case) -> tuple[str, ...]:
    """Decisions of the compile of the loop's second call, or its error."""
    loop, report = case.loop(case, case.stage, no_sync=case.no_sync), zgraph.Report()
    step = compiled(loop, report=report)
    try:
        for number in range(2):
            step([tokens(number, micro) for micro in range(case.k)])
    except zgraph.ZgraphError as error:
        return (str(error),)
    return report.graphs[-1].decisions


@worlds(2)
def test_micro_batches_that_draw_are_refused(ranks: Ranks) -> None:
    for (text,) in ranks.run(reasons, Case(build=Dropping)):
        assert "3 micro-batches cannot run layer by layer, because their layers draw random numbers" in text
        assert "Set dropout to 0" in text


@worlds(2)
def test_a_gradient_that_is_read_in_between_ends_a_window(ranks: Ranks) -> None:
    """Each norm is that of the sum so far: there is nothing to interleave."""
    assert ranks.run(reasons, Case(loop=Watched, no_sync=False)) == [(), ()]
    assert ranks.run(differences, Case(loop=Watched, no_sync=False), 3, False) == [({}, 0)] * 2


@worlds(2)
@pytest.mark.parametrize("recompute", [True, False])
def test_the_peak_is_the_predicted_one(ranks: Ranks, recompute: bool) -> None:
    for predicted, measured in ranks.run(peaks, Case(build=Wide, k=4, recompute=recompute)):
        assert measured == pytest.approx(predicted, rel=0.05)


# --- on paper ---------------------------------------------------------------------------------------------------------


class Deep(torch.nn.Module):
    """Six equal layers."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Linear(*sizes, bias=False) for sizes in ((64, hidden), (hidden, 64))))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in self.layers:
            x = x + down(torch.tanh(up(x)))
        return x.square().mean()


def planned(
    k: int = 3,
    hidden: int = 512,
    rows: int = 32,
    offload: zgraph.Offload | None = None,
    more: Sequence[zgraph.GraphPass] = (),
    loss: Any = lambda model, part: model(part),
    **options: Any,
) -> Any:
    """The plan of a step with k micro-batches on eight ranks with links of 1 Gbit/s."""
    link = Link(latency_us=20.0, bytes_per_us=125)
    hardware = replace(H100, inter_host=link, intra_host=link, ranks_per_host=1)

    def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for part in x.chunk(k):
                found = loss(model, part) / k
                found.backward()
                total = total + found.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return step

    passes = zgraph.PassList([*P.presets.planned(**options), *more], target=zgraph.Target(hardware=hardware))
    return zgraph.plan(
        lambda: Deep(hidden),
        world_size=8,
        batch=lambda: (torch.randn(rows * k, 64),),
        passes=passes,
        optimizer_fn=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        step_fn=step_of,
        offload=offload,
    )


def sent_parts(plan: Any, hidden: int = 512) -> float:
    """Bytes that a rank sends in a step, as a multiple of (N-1)/N of the parameters' bytes."""
    parameters = 4 * sum(parameter.numel() for parameter in Deep(hidden).parameters())
    (graph,) = plan.graphs
    return graph.sent_bytes / (parameters * 7 / 8)


def test_a_step_sends_what_one_micro_batch_sends() -> None:
    once = 3 - 1 / 12  # backward does not read the first of 12 weights
    assert sent_parts(planned(k=1, interleave_micro_batches=True)) == pytest.approx(once)
    assert sent_parts(planned(interleave_micro_batches=False)) == pytest.approx(3 * once)
    # Backward reads the first weight to recompute the first layer. In the last layer, forwards and backwards alternate,
    # and read one gather of each of its two weights.
    assert sent_parts(planned(interleave_micro_batches=True)) == pytest.approx(3 - 2 / 12)


def test_a_step_of_two_forwards_sends_what_one_forward_sends() -> None:
    def compared(model: torch.nn.Module, part: torch.Tensor) -> torch.Tensor:
        return model(part) - model(part.flip(1)).square()

    # With costs, backward recomputes what it must, and may read the first layer's gathers of forward.
    assert sent_parts(planned(k=2, interleave_micro_batches=True, loss=compared)) <= 3 - 2 / 12
    assert sent_parts(planned(k=2, loss=compared)) <= 3 - 2 / 12  # and that is what costs choose


def test_the_plan_interleaves_where_that_is_faster_and_fits() -> None:
    chosen, plain = planned(), planned(interleave_micro_batches=False)
    assert sent_parts(chosen) < 3
    assert chosen.step_us < 0.4 * plain.step_us
    assert chosen.curves[-1].peak_bytes < 1.25 * plain.curves[-1].peak_bytes
    # Here most of a layer's memory passes to the next layer, and every micro-batch would keep it.
    assert sent_parts(planned(k=6, hidden=32, rows=64), 32) > 12


def brought_bytes(k: int, *, interleaves: bool) -> int:
    """Bytes that a step copies from disk."""
    keep = Keep()
    at_rest = zgraph.Offload(params="disk", optimizer="disk", path="scratch")  # a plan makes no file
    planned(k, offload=at_rest, more=[keep], interleave_micro_batches=interleaves)
    brought = nodes.call_functions(keep.kept["step"].graph, nodes.is_reload)
    return sum(tensor_bytes(tensor) for start in brought for tensor in tensors_of(start))


def test_layers_come_from_disk_once() -> None:
    """Once for all forwards, and once for all backwards; state comes once in any case."""
    once = brought_bytes(1, interleaves=False)
    assert brought_bytes(4, interleaves=True) <= 1.15 * once
    assert brought_bytes(4, interleaves=False) > 2 * once


def test_what_micro_batches_keep_between_layers_may_wait_on_the_host() -> None:
    """In a step that sends as little, and is as fast."""
    options = {"rows": 256, "interleave_micro_batches": True}
    kept, waiting = (planned(4, offload_activations=chosen, **options) for chosen in (False, True))
    assert sent_parts(waiting) == sent_parts(kept) < 3
    assert waiting.curves[-1].peak_bytes < 0.9 * kept.curves[-1].peak_bytes and waiting.step_us < 1.01 * kept.step_us
