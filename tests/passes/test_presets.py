"""The default pipeline as a whole: on every rank the same communication, the fewest bytes, the same text every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.graphs import Autocast, Twice, apply, by_rank, deep, fake_world, mlp, traced
from tests.support.hash_seeds import HashSeeds
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassList
from zgraph.graph import meta, nodes
from zgraph.graph.text import graph_text
from zgraph.graph.traffic import transfers
from zgraph.passes import BucketCollectives, HoistStarts, SinkWaits, presets

GRAPH_PASSES = tuple(PassList(presets.default()).of("graph"))


def test_default_is_a_plain_list_to_be_edited() -> None:
    passes = presets.default()
    assert type(passes) is list
    passes.append(SinkWaits())
    assert len(presets.default()) == len(passes) - 1
    edited = [HoistStarts(prefetch=5) if entry.name == "hoist_starts" else entry for entry in presets.default()]
    assert HoistStarts(prefetch=5) in PassList(edited).passes


def test_every_prefix_of_the_default_is_a_valid_pipeline() -> None:
    for length in range(len(presets.default()) + 1):
        PassList(presets.default()[:length])


def test_bucket_size_is_passed_on() -> None:
    (bucketing,) = [entry for entry in presets.default(bucket_bytes=77) if isinstance(entry, BucketCollectives)]
    assert bucketing.bucket_bytes == 77


@pytest.mark.parametrize("build", [mlp, Autocast])
def test_ranks_with_uneven_shards_run_the_same_collectives(build: Any) -> None:
    """7 and 5 rows over four ranks: some hold one row less, some none."""
    ranks = by_rank(build, [*GRAPH_PASSES[:2], BucketCollectives(bucket_bytes=120), *GRAPH_PASSES[3:]], world=4)
    for direction in ("forward", "backward"):
        with fake_world(4):
            found = [
                [(sent.kind, sent.dtype, sent.payload_bytes, sent.parameters) for sent in transfers(gm.graph)]
                for gm in (rank.graphs[direction] for rank in ranks)
            ]
        assert len(found[0]) > 2
        assert found == [found[0]] * 4


def expected_bytes(world: int, rows: list[tuple[int, int]], itemsize: int) -> int:
    """Every rank sends each padded chunk to N-1 others."""
    return sum(-(-count // world) * width * itemsize * (world - 1) for count, width in rows)


MLP_ROWS = [(7, 5), (7, 1), (5, 7), (5, 1), (5, 5)]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sent_bytes_are_those_of_the_formula(world: int) -> None:
    with fake_world(world):
        found = traced(mlp, GRAPH_PASSES, world=world)
        forward = sum(sent.sent_bytes for sent in transfers(found.graphs["forward"].graph))
        backward = sum(sent.sent_bytes for sent in transfers(found.graphs["backward"].graph))
    assert forward == expected_bytes(world, MLP_ROWS, 4)
    # The two weights behind the first layer are gathered again; every gradient is exchanged.
    assert backward == expected_bytes(world, [(5, 7), (5, 5)], 4) + expected_bytes(world, MLP_ROWS, 4)


@pytest.mark.parametrize("build", [mlp, Twice, deep])
@pytest.mark.parametrize("train", [True, False])
def test_passes_do_not_change_the_bytes_that_the_markers_promise(build: Any, train: bool) -> None:
    with fake_world(2):
        before, after = traced(build, train=train), traced(build, GRAPH_PASSES, train=train)
        for direction in before.graphs:
            promised, kept = (list(transfers(found.graphs[direction].graph)) for found in (before, after))
            assert sum(sent.sent_bytes for sent in promised) == sum(sent.sent_bytes for sent in kept)
            names = [sorted(name for sent in each for name in sent.parameters) for each in (promised, kept)]
            assert names[0] == names[1]


def test_autocast_halves_the_bytes() -> None:
    with fake_world(2):
        wide, narrow = (traced(build, GRAPH_PASSES) for build in (mlp, Autocast))
        for direction in ("forward", "backward"):
            full, half = (
                sum(sent.sent_bytes for sent in transfers(found.graphs[direction].graph)) for found in (wide, narrow)
            )
            assert full == 2 * half


def test_no_marker_and_no_saved_weight_is_left() -> None:
    with fake_world(2):
        found = traced(mlp, GRAPH_PASSES)
        for gm in found.graphs.values():
            assert not [node for node in gm.graph.nodes if nodes.is_marker(node)]
        saved = nodes.returned_by(found.graphs["forward"].graph)[1:]
        shapes = {tuple(meta.value(out).shape) for out in saved if isinstance(meta.value(out), torch.Tensor)}
        assert not shapes & {(7, 5), (5, 7), (5, 5), (7,)}


def test_every_pass_may_run_twice_where_its_contracts_allow() -> None:
    with fake_world(2):
        found = traced(mlp, GRAPH_PASSES)
        for entry in GRAPH_PASSES:
            if entry.name != "bucket_collectives":
                for direction in ("forward", "backward"):
                    assert not apply(entry, found, direction)


def test_results_are_bitwise_those_of_the_markers() -> None:
    before, after = (by_rank(mlp, passes, world=4) for passes in ((), GRAPH_PASSES))
    for direction in ("forward", "backward"):
        assert_same_results([found.graphs[direction] for found in before], [found.graphs[direction] for found in after])


_PRINT_GRAPHS = """
import torch, zgraph
from tests.support.costs import cost_by_size
from tests.support.graphs import Autocast, apply, compile_model, fake_world, mlp, traced
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions, ScheduleOverlap

class Show(zgraph.GraphPass):
    name = "show"
    def run(self, gm, ctx):
        print(ctx.direction, graph_text(gm.graph), flush=True)
        return False

with fake_world(3, 2):
    passes = zgraph.passes.presets.default(bucket_bytes=120)
    mixed = [part for entry in passes for part in ([entry, Show()] if entry.phase == "graph" else [entry])]
    compile_model(mlp, {"passes": zgraph.PassList(mixed)})
    compile_model(Autocast, {"passes": zgraph.PassList(mixed)}, train=False)
    for buckets in ([], [BucketCollectives(bucket_bytes=120)]):
        found = traced(mlp, [LowerGathers(), LowerReductions(), *buckets], world=3, rank=2)
        found.know(cost_of=cost_by_size, plan_bytes=1500)
        for direction in ("forward", "backward"):
            apply(ScheduleOverlap(), found, direction)
            print("scheduled", direction, graph_text(found.graphs[direction].graph), found.ctx.notes)
"""


def test_hash_seed_changes_nothing(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    """After every pass, and after a schedule, the same text, whatever order sets and dicts of strings have."""
    texts = hash_seeds.printed(_PRINT_GRAPHS, tmp_path)
    assert texts[0].count("backward") >= 7 and texts[0].count("scheduled backward") == 2
    assert texts[0] == texts[1]


def test_two_compiles_in_one_process_give_the_same_text() -> None:
    with fake_world(2):
        texts = []
        for _ in range(2):
            found = traced(mlp, GRAPH_PASSES)
            texts.append([graph_text(gm.graph) for gm in found.graphs.values()])
    assert texts[0] == texts[1]
