"""Buckets as large as their link wants, no member waited for too long, and the mode that costs least and fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, Traced, apply, deep, fake_world, traced
from zgraph import Hardware, PassContext, PassList, PreconditionError
from zgraph.analysis.cost import NodeCost
from zgraph.analysis.hardware import Link
from zgraph.analysis.liveness import memory_curve
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compiler.target import Target
from zgraph.graph import meta, nodes, traits
from zgraph.passes import (
    BucketCollectives,
    HoistStarts,
    LowerGathers,
    LowerReductions,
    ScheduleOverlap,
    SinkWaits,
    presets,
)
from zgraph.passes.common.bucket_costs import link_bytes
from zgraph.tiers.lanes import COMPUTE

aten = torch.ops.aten
LOWERED = (LowerGathers(), LowerReductions())
LAYER_BYTES = 8 * 8 * 4  # of `deep`


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def machine(latency_us: float, layer_us: float = 10.0, **others: Any) -> Hardware:
    """One whose link takes so long for a message, and so long more for a layer of `deep` between two ranks."""
    link = Link(latency_us=latency_us, bytes_per_us=LAYER_BYTES / 2 / layer_us)
    return replace(Hardware.preset("cpu"), inter_host=link, **others)


def costed(found: Traced, hardware: Hardware, mm_us: float) -> Traced:
    """Nothing but matmuls takes compute."""
    cost_of = lambda node: NodeCost(COMPUTE, mm_us if node.target is aten.mm.default else 0.0)  # noqa: E731
    found.know(hardware=hardware, cost_of=cost_of)
    return found


def members(graph: fx.Graph, kind: Any = nodes.is_gather) -> list[int]:
    return [len(meta.parameters(node)) for node in nodes.call_functions(graph, kind)]


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total_bytes", "latency_us", "compute_us", "latency_share", "expected"),
    [
        (100_000_000, 100, 50_000, 0.1, 1_000_000),  # latency 100 us, transfer 1000 us
        (100_000_000, 100, 50_000, 0.2, 500_000),
        (1_000_000, 100, 5_000, 0.1, 316_228),  # the square root of 100 us latency / 1000 us transfer
        (1_000_000, 100, 400, 0.1, 500_000),  # of 100 us latency / 400 us compute
        (1_000_000, 100, 0, 0.1, 1_000_000),  # nothing hides anything
        (1_000_000, 0, 5_000, 0.1, 1),  # nothing is saved
    ],
)
def test_a_bucket_is_as_large_as_its_link_wants(
    total_bytes: int, latency_us: float, compute_us: float, latency_share: float, expected: int
) -> None:
    """At 1000 bytes/us."""
    found = link_bytes(
        total_bytes=total_bytes,
        latency_us=latency_us,
        transfer_us=total_bytes / 1000,
        compute_us=compute_us,
        latency_share=latency_share,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("latency_us", "mm_us", "expected"),
    [
        (10, 0, [6]),  # nothing to hide behind: the fewest latencies
        # G10 mm30 ...: the first reader would wait for the second gather as well; later ones have the time.
        (10, 30, [1, 2, 2, 1]),
        # mm100: all are early but the first; two fit, by the size for 60 us of transfer.
        (10, 100, [1, 2, 2, 1]),
        (1, 30, [1] * 6),  # latencies hardly count
        (40, 5, [6]),  # all behind the link, which the latencies would hold up
    ],
)
def test_gathers_merge_if_waiting_costs_less_than_it_saves(
    latency_us: float, mm_us: float, expected: list[int]
) -> None:
    """G mm G mm G mm G mm G mm G mm, each G 10 us and a latency."""
    found = costed(traced(deep, LOWERED), machine(latency_us), mm_us)
    apply(BucketCollectives(bucket_bytes=None), found, "forward")
    assert members(found.graphs["forward"].graph) == expected


@pytest.mark.parametrize(
    ("before_us", "between_us", "expected"),
    [
        (0, 100, [1, 2]),  # a is done long before b is there
        (95, 5, [2, 1]),  # b is there before a could be done
        (0, 0, [3]),  # nothing to hide behind: the fewest latencies
    ],
)
def test_reduction_waits_for_a_gradient_only_if_faster(
    before_us: float, between_us: float, expected: list[int]
) -> None:
    """before, a, between, b c: each 10 us on the link and 20 us latency; two share one where compute hides some."""
    drawing = Drawing()
    square = drawing.input("square", 8, 8)
    pieces = [drawing.input(name, 8, 8) for name in "abc"]
    means: list[fx.Node] = []
    for piece, compute in zip(pieces, ("before", "between", ""), strict=True):
        if compute:
            square = drawing.call(aten.mm.default, square, square, name=compute)
        received = drawing.wait(drawing.start_exchange(piece, piece.name))
        means.append(
            drawing.call(torch.ops.zgraph.sum_ranks.default, received, 2, 2, torch.float32, works_for=piece.name)
        )
    gm = drawing.done(square, *means)
    spent = {"before": before_us, "between": between_us}
    cost_of = lambda node: NodeCost(COMPUTE, spent.get(node.name, 0.0))  # noqa: E731
    ctx = PassContext(direction="backward", hardware=machine(20), cost_of=cost_of)
    apply(BucketCollectives(bucket_bytes=None), Traced(gm, {"backward": gm}, ctx), "backward")
    assert members(gm.graph, nodes.is_all_to_all) == expected
    limit_bytes = 628 if before_us + between_us else 768
    assert [text for _, _, text in ctx.notes] == [
        f"all_to_all_single on group 0: up to {limit_bytes} bytes each, for 20.0 us latency"
    ]


def test_the_link_needs_hardware() -> None:
    with pytest.raises(
        PreconditionError, match="bucket_collectives plans by costs, and the list of passes has no target"
    ):
        PassList(presets.planned(interleave_micro_batches=False))


def test_preset_uses_the_link_unless_told_otherwise() -> None:
    def size(passes: list[GraphPass]) -> int | str | None:
        (found,) = [entry for entry in passes if isinstance(entry, BucketCollectives)]
        return found.bucket_bytes

    assert size(presets.default()) == "auto"
    assert size(presets.planned()) is None
    assert size(presets.planned(bucket_bytes=77)) == 77


# --- modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (machine(100), "flat"),  # two more launches of single members cost more than copies
        (machine(100, backend="nccl"), "coalesced"),  # which launches them as one
        (machine(1, launch_us=5.0), "coalesced"),  # 15 us for three kernels, 1 us for one more launch
    ],
)
def test_the_cheaper_mode_is_taken(hardware: Hardware, expected: str) -> None:
    found = costed(traced(deep, LOWERED), hardware, 1)
    assert apply(BucketCollectives(bucket_bytes=2 * LAYER_BYTES), found, "forward")
    grouped = [*map(nodes.is_grouped_gather, nodes.call_functions(found.graphs["forward"].graph, nodes.is_gather))]
    assert grouped == [expected == "coalesced"] * 3
    assert found.ctx.notes == [("bucket_collectives", "forward", f"gathers: 3 {expected}")]


@pytest.mark.parametrize(("backend", "expected"), [("nccl", [True] * 3), ("gloo", [False] * 3)])
def test_without_hardware_the_backend_decides(backend: str, expected: list[bool]) -> None:
    found = traced(deep, LOWERED)
    found.know(planned_backend=backend)
    assert apply(BucketCollectives(bucket_bytes=2 * LAYER_BYTES), found, "forward")
    gathers = nodes.call_functions(found.graphs["forward"].graph, nodes.is_gather)
    assert [*map(nodes.is_grouped_gather, gathers)] == expected


@pytest.mark.parametrize(
    ("room", "expected"),
    [(3, "2 flat"), (2, "1 coalesced, 1 flat"), (1, "1 flat, 1 sequential"), (-2, "2 sequential")],
)
def test_tight_budget_gathers_fewer_layers_simultaneously(room: int, expected: str) -> None:
    """Three layers in a bucket, one whole in any case. Beside the second bucket three more activations are alive."""
    found = costed(traced(deep, LOWERED), machine(100), 1)
    activation = 6 * 8 * 4
    limit_bytes = LAYER_BYTES + 6 * activation + room * LAYER_BYTES
    found.know(plan_bytes=limit_bytes)
    assert apply(BucketCollectives(bucket_bytes=3 * LAYER_BYTES), found, "forward")
    assert [text for _, _, text in found.ctx.notes] == [f"gathers: {expected}"]
    apply(SinkWaits(), found, "forward")
    assert memory_curve(found.graphs["forward"].graph).peak_bytes <= limit_bytes or room < 0


@pytest.mark.parametrize("movers", [[SinkWaits(), HoistStarts(prefetch=3)], [ScheduleOverlap()]])
def test_sequential_gathers_stay_where_they_are_read(movers: list[GraphPass]) -> None:
    """start wait mm start wait mm ..., whatever wants to start early; a second run changes nothing."""
    found = costed(traced(deep, LOWERED), machine(5), 30)
    bucketing = BucketCollectives(bucket_bytes=2**20, gathers="sequential")
    for direction, layers in (("forward", 6), ("backward", 5)):
        assert apply(bucketing, found, direction)
        assert not apply(bucketing, found, direction)
        for mover in movers:
            apply(mover, found, direction)
        graph = found.graphs[direction].graph
        readers = [node for node in graph.nodes if node.target is aten.mm.default]
        sizes: list[int] = []
        for start in nodes.call_functions(graph, nodes.is_gather):
            (wait,) = nodes.waits_of(start)
            assert start.next is wait
            follower = wait.next
            while traits.is_reshaping(follower):
                follower = follower.next
            assert follower in readers
            sizes.append(len(meta.parameters(start)))
        assert sizes == [1] * layers
    assert members(found.graphs["backward"].graph, nodes.is_all_to_all) == [6]


def test_bad_options_are_refused_when_the_pass_is_built() -> None:
    with pytest.raises(ValueError, match=r"gathers='all' is unknown; write \"auto\", \"flat\""):
        BucketCollectives(bucket_bytes=1, gathers="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="latency_share=0 is the part"):
        BucketCollectives(bucket_bytes=None, latency_share=0)


def test_plans_with_a_target_ask_it() -> None:
    found = traced(deep, LOWERED)
    hardware = machine(1000, layer_us=1.0)
    found.aim_at(Target(hardware=hardware))
    assert apply(BucketCollectives(bucket_bytes=None), found, "forward")
    assert members(found.graphs["forward"].graph) == [6]
    PassList(presets.planned(), target=Target(hardware=hardware))
