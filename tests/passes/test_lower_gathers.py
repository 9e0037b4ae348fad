"""zgraph::unshard becomes a cast, a gather just before its first use, and a cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import FileCheck

from tests.support.graphs import (
    Autocast,
    Drawing,
    Leaky,
    Traced,
    apply,
    by_rank,
    fake_world,
    mlp,
    names_of,
    traced,
)
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassList, PreconditionError
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions

aten, prims = torch.ops.aten, torch.ops.prims


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def lowered(found: Traced, direction: str = "forward") -> fx.Graph:
    assert apply(LowerGathers(), found, direction)  # pyright: ignore[reportArgumentType]
    return found.graphs[direction].graph  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("world")
def test_gather_and_wait_stand_before_the_first_use() -> None:
    text = graph_text(lowered(traced(mlp)))
    (
        FileCheck()
        .check("all_gather_0_weight: f32[8, 5]")
        .check("wait_0_weight")
        .check("all_gather_0_bias")
        .check("aten.addmm")
        .check("all_gather_2_weight: f32[6, 7]")
        .check("wait_2_weight")
        .check("aten.addmm")
        .check("all_gather_4_weight")
        .check("aten.mm")
        .run(text)
    )
    assert "unshard" not in text


@pytest.mark.usefixtures("world")
def test_padding_is_cut_off_again() -> None:
    graph = lowered(traced(mlp))
    gather = next(node for node in graph.nodes if node.name == "wait_0_weight")
    (cut,) = gather.users
    assert (cut.target, cut.args[1:]) == (aten.slice.Tensor, (0, 0, 7))


def test_short_and_empty_shards_are_padded_and_others_not() -> None:
    """7 rows over 4 ranks: 2, 2, 2, 1; 5 rows: 2, 2, 1, 0."""
    padded: list[dict[str, list[int]]] = []
    for found in by_rank(mlp, [LowerGathers()], world=4):
        pads = [node for node in found.graphs["forward"].graph.nodes if node.target is aten.constant_pad_nd.default]
        padded.append({meta.parameters(node)[0]: node.args[1] for node in pads})
    assert padded[0] == padded[1] == {}
    assert padded[2] == {"2.weight": [0, 0, 0, 1], "2.bias": [0, 1], "4.weight": [0, 0, 0, 1]}
    assert padded[3] == {
        "0.weight": [0, 0, 0, 1],
        "0.bias": [0, 1],
        "2.weight": [0, 0, 0, 2],
        "2.bias": [0, 2],
        "4.weight": [0, 0, 0, 2],
    }


@pytest.mark.usefixtures("world")
def test_cast_of_the_marker_comes_before_the_gather() -> None:
    graph = lowered(traced(mlp, param_dtype=torch.bfloat16))
    gathers = list(nodes.call_functions(graph, nodes.is_all_gather))
    assert len(gathers) == 5
    assert {meta.tensor_value(node).dtype for node in gathers} == {torch.bfloat16}


@pytest.mark.usefixtures("world")
def test_cast_that_every_reader_applies_comes_before_the_gather() -> None:
    graph = lowered(traced(Autocast))
    gathers = list(nodes.call_functions(graph, nodes.is_all_gather))
    assert {meta.tensor_value(node).dtype for node in gathers} == {torch.bfloat16}
    FileCheck().check("prims.convert_element_type").check("all_gather_layers_0_weight: bf16").run(graph_text(graph))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("target", [aten._to_copy.default, prims.convert_element_type.default])
def test_a_cast_is_one_before_and_after_decompositions(target: Any) -> None:
    """autocast writes aten._to_copy; Inductor's decompositions turn it into a prim. Both bring bf16 onto the wire."""
    drawing = Drawing()
    shard, handle = drawing.input("shard", 4, 8), drawing.input("handle", 96, dtype=torch.uint8)
    policy = ([8, 8], torch.float32, None, None, 3, "mean", "alone", "", "0")
    whole = drawing.call(torch.ops.zgraph.unshard.default, shard, handle, *policy, works_for="w")
    narrow = (
        drawing.call(target, whole, dtype=torch.bfloat16)
        if target is aten._to_copy.default
        else drawing.call(target, whole, torch.bfloat16)
    )
    gm = drawing.done(drawing.call(aten.relu.default, narrow))
    graph = lowered(Traced(gm, {"forward": gm}, traced(mlp).ctx))
    (gather,) = nodes.call_functions(graph, nodes.is_all_gather)
    assert meta.tensor_value(gather).dtype == torch.bfloat16


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("second", [torch.float32, torch.float16, torch.float64])
def test_readers_that_disagree_about_the_cast_gather_wide(second: torch.dtype) -> None:
    drawing = Drawing()
    shard, handle = drawing.input("shard", 4, 8), drawing.input("handle", 96, dtype=torch.uint8)
    policy = ([8, 8], torch.float32, None, None, 3, "mean", "alone", "", "0")
    whole = drawing.call(torch.ops.zgraph.unshard.default, shard, handle, *policy, works_for="w")
    narrow = drawing.call(aten._to_copy.default, whole, dtype=torch.bfloat16)
    other = (
        drawing.call(aten.relu.default, whole)
        if second is torch.float32
        else drawing.call(aten._to_copy.default, whole, dtype=second)
    )
    gm = drawing.done(drawing.call(aten.relu.default, narrow), drawing.call(aten.relu.default, other))
    graph = lowered(Traced(gm, {"forward": gm}, traced(mlp).ctx))
    (gather,) = nodes.call_functions(graph, nodes.is_all_gather)
    assert meta.tensor_value(gather).dtype == torch.float32


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("dtype", "on_the_wire"), [(torch.float64, torch.float32), (torch.float16, torch.float16)])
def test_only_a_narrowing_cast_comes_before_the_gather(dtype: torch.dtype, on_the_wire: torch.dtype) -> None:
    drawing = Drawing()
    shard, handle = drawing.input("shard", 4, 8), drawing.input("handle", 96, dtype=torch.uint8)
    policy = ([8, 8], torch.float32, None, None, 3, "mean", "alone", "", "0")
    whole = drawing.call(torch.ops.zgraph.unshard.default, shard, handle, *policy, works_for="w")
    gm = drawing.done(drawing.call(aten.relu.default, drawing.call(aten._to_copy.default, whole, dtype=dtype)))
    graph = lowered(Traced(gm, {"forward": gm}, traced(mlp).ctx))
    (gather,) = nodes.call_functions(graph, nodes.is_all_gather)
    assert meta.tensor_value(gather).dtype == on_the_wire


@pytest.mark.usefixtures("world")
def test_replicated_parameters_need_no_collective() -> None:
    graph = lowered(traced(mlp, zero_stage=0))
    assert not list(nodes.call_functions(graph, nodes.is_start))
    assert not list(nodes.call_functions(graph, nodes.is_unshard))


def test_a_group_of_one_needs_no_collective() -> None:
    with fake_world(1):
        graph = lowered(traced(mlp, world=1))
    assert not list(nodes.call_functions(graph, nodes.is_start))


def test_a_returned_parameter_is_a_copy_and_never_its_shard() -> None:
    with fake_world(1):
        graph = lowered(traced(Leaky, world=1))
    out = nodes.returned_by(graph)[1]
    assert (out.target, out.args[0].op) == (aten.clone.default, "placeholder")


@pytest.mark.usefixtures("world")
def test_dead_views_of_shards_go_with_the_marker() -> None:
    found = traced(mlp)
    shards = {
        operator_arguments.UnshardArgs.of(node).shard.name
        for node in nodes.call_functions(found.graphs["forward"].graph, nodes.is_unshard)
    }
    graph = lowered(found)
    left = [node for node in graph.nodes if node.name in shards]
    assert all(node.users for node in left)  # what is saved for backward stays


@pytest.mark.usefixtures("world")
def test_second_run_changes_nothing() -> None:
    found = traced(mlp)
    lowered(found)
    assert not apply(LowerGathers(), found, "forward")
    assert found.ctx.notes[-1] == ("lower_gathers", "forward", "nothing is gathered here")


@pytest.mark.usefixtures("world")
def test_it_is_refused_after_buckets_were_made() -> None:
    with pytest.raises(PreconditionError, match="lower_gathers cannot run after bucket_collectives"):
        PassList([LowerGathers(), LowerReductions(), BucketCollectives(bucket_bytes=100), LowerGathers()])


@pytest.mark.parametrize(("build", "world_size"), [(mlp, 3), (mlp, 4), (Autocast, 3)])
def test_results_are_bitwise_the_same(build: type, world_size: int) -> None:
    ranks = by_rank(build, world=world_size)
    before = [copy_of(found.graphs["forward"]) for found in ranks]
    for rank, found in enumerate(ranks):
        with fake_world(world_size, rank):
            lowered(found)
    assert_same_results(before, [found.graphs["forward"] for found in ranks])
    gathers = [[name for name in names_of(found.graphs["forward"].graph) if "gather" in name] for found in ranks]
    assert gathers == [gathers[0]] * world_size
