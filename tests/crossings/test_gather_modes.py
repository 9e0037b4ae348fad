"""How parameters share a gather changes memory and launches, and no bit of a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import zgraph
from tests.support.compiled import with_fx
from tests.support.graphs import Keep, by_rank, mlp
from tests.support.judges.lockstep import assert_same_results
from tests.support.memory import gloo_buffers
from tests.support.memory.allocations import counted
from tests.support.models import Uneven
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph import Hardware, PassList
from zgraph.analysis.liveness import memory_curve, step_curve
from zgraph.compiler.target import Target
from zgraph.graph import nodes
from zgraph.passes import (
    BucketCollectives,
    HoistStarts,
    LowerGathers,
    LowerReductions,
    ScheduleOverlap,
    SinkWaits,
    presets,
)
from zgraph.passes.common.merge_collectives import Mode

MODES: tuple[Mode, ...] = get_args(Mode)
MIB = 2**20
WIDTH = 256
STEPS = 5


def with_gathers(mode: Mode, bucket_bytes: int = MIB) -> PassList:
    bucketing = BucketCollectives(bucket_bytes=bucket_bytes, gathers=mode)
    return PassList([bucketing if entry.name == bucketing.name else entry for entry in presets.default()])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_passes_keep_every_bit(mode: Mode, world: int) -> None:
    """Whatever moves starts and waits afterwards, on ranks with uneven rows."""
    lowered = [LowerGathers(), LowerReductions()]
    bucketing = BucketCollectives(bucket_bytes=400, gathers=mode)
    target = Target(hardware=Hardware.preset("cpu"))
    before = by_rank(mlp, world=world)
    for movers in ([SinkWaits(), HoistStarts(prefetch=2)], [ScheduleOverlap()]):
        after = by_rank(mlp, [*lowered, bucketing, *movers], world=world, target=target)
        for direction in ("forward", "backward"):
            graphs = [found.graphs[direction] for found in after]
            assert_same_results([found.graphs[direction] for found in before], graphs)
            members = [nodes.is_grouped_gather(node) for node in nodes.call_functions(graphs[0].graph, nodes.is_gather)]
            assert any(members) == (mode == "coalesced")


# --- real ranks -----------------------------------------------------------------------------------------------------


def results_by_mode(dtype: torch.dtype) -> int:
    """Compares outputs and every gradient of each mode with eager mode; how many tensors were compared."""
    torch.manual_seed(0)
    source = Uneven()
    batch = torch.randn(7, 6)
    found: list[list[Tensor | None]] = []
    for mode in (None, *MODES):
        model = zgraph.shard(Uneven(), zero_stage=3, param_dtype=dtype)
        model.load_state_dict(source.state_dict())
        called: Any = model if mode is None else with_fx(model, passes=with_gathers(mode, 2000))
        result = called(batch)
        result.float().square().mean().backward()
        found.append([result.detach(), *(parameter.grad for parameter in model.parameters())])
    for mode, compiled in zip(MODES, found[1:], strict=True):
        for one, other in zip(found[0], compiled, strict=True):
            assert (one is None) == (other is None), mode
            assert one is None or other is None or torch.equal(whole(one), whole(other)), mode
    return sum(one is not None for one in found[0])


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(3, torch.bfloat16), (2, torch.float32)], indirect=["ranks"], scope="session"
)
def test_results_are_bitwise_those_of_eager_mode(ranks: Ranks, dtype: torch.dtype) -> None:
    compared = ranks.run(results_by_mode, dtype)
    assert compared == [compared[0]] * ranks.world and compared[0] > 5


def layers() -> nn.Module:
    """Four weights of 256 KiB, so few activations that nothing else counts."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])


def measured_peaks(mode: Mode) -> list[tuple[int, int]]:
    """The predicted and the measured peak, of a forward alone and of a training step."""
    torch.compiler.reset()
    model = zgraph.shard(layers(), zero_stage=3)
    keep = Keep()
    called: Any = with_fx(model, passes=PassList([*with_gathers(mode).passes, keep]))

    def forward() -> None:
        with torch.no_grad():
            called(torch.ones(4, WIDTH))

    def step() -> None:
        called(torch.ones(4, WIDTH)).square().mean().backward()

    measured = [least_peak(model, forward), least_peak(model, step)]
    graphs = keep.kept["forward"].graph, keep.kept["backward"].graph
    curve = step_curve(*graphs, user_outputs=keep.kept["ctx"].user_outputs)
    return [(memory_curve(keep.kept["inference"].graph).peak_bytes, measured[0]), (curve.peak_bytes, measured[1])]


def least_peak(model: nn.Module, run: Callable[[], None]) -> int:
    """Of some runs after the first two: what a thread of gloo still holds from before only adds."""
    peaks: list[int] = []
    for _ in range(2 + STEPS):
        model.zero_grad()
        gloo_buffers.flush()
        with counted() as count:
            run()
        peaks.append(count.rise_bytes)
    return min(peaks[2:])


def test_each_mode_holds_what_is_predicted(ranks: Ranks) -> None:
    """In forward: one weight; all of them; all of them and two copied out of the bucket, which then goes."""
    forward: dict[Mode, int] = {}
    weight = WIDTH * WIDTH * 4
    for mode in MODES:
        for found in ranks.run(measured_peaks, mode):
            for predicted, measured in found:
                assert 0.95 * predicted < measured < 1.05 * predicted, (mode, found)
            forward[mode] = found[0][1]
    few = weight // 4
    assert weight < forward["sequential"] < weight + few
    assert 4 * weight < forward["coalesced"] < 4 * weight + few
    assert 6 * weight < forward["flat"] < 6 * weight + few
