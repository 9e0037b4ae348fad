"""One gather per parameter and graph, one reduction for the sum of its gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from tests.support.graphs import Drawing, Traced, Twice, apply, by_rank, fake_world, mlp, traced
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassList, PreconditionError
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.graph.edits import copy_of
from zgraph.passes import DedupeGathers, LowerGathers

aten = torch.ops.aten


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def as_joint(found: Traced) -> Traced:
    """The graph before any pass, where a joint pass looks for it."""
    found.graphs["joint"] = found.captured
    return found


def markers_of(graph: fx.Graph) -> list[str]:
    return [
        f"{'gather' if nodes.is_unshard(node) else 'reduce'} {meta.parameters(node)[0]}"
        for node in graph.nodes
        if nodes.is_marker(node)
    ]


@pytest.mark.usefixtures("world")
def test_two_reads_share_one_gather_and_one_reduction() -> None:
    found = as_joint(traced(Twice))
    before = markers_of(found.captured.graph)
    assert before.count("gather layer.weight") == before.count("reduce layer.weight") == 2
    assert apply(DedupeGathers(), found, "joint")
    after = markers_of(found.captured.graph)
    assert after == list(dict.fromkeys(after))
    assert set(after) == set(before)


@pytest.mark.usefixtures("world")
def test_gradients_are_summed_before_they_are_reduced() -> None:
    found = as_joint(traced(Twice))
    apply(DedupeGathers(), found, "joint")
    reduced = {
        meta.parameters(node)[0]: operator_arguments.ReduceArgs.of(node).grad
        for node in nodes.call_functions(found.captured.graph, nodes.is_reduce_grad)
    }
    summed = {name for name, grad in reduced.items() if grad.target is aten.add.Tensor}
    assert summed == {"layer.weight", "layer.bias"}
    assert tuple(meta.tensor_value(reduced["layer.weight"]).shape) == (5, 5)


@pytest.mark.usefixtures("world")
def test_second_run_and_parameters_read_once_are_left_alone() -> None:
    found = as_joint(traced(Twice))
    assert apply(DedupeGathers(), found, "joint")
    assert not apply(DedupeGathers(), found, "joint")

    once = as_joint(traced(mlp))
    assert not apply(DedupeGathers(), once, "joint")
    assert once.ctx.notes == [("dedupe_gathers", "joint", "every parameter is read once")]


@pytest.mark.usefixtures("world")
def test_no_view_of_a_shard_is_left_without_reader() -> None:
    found = as_joint(traced(Twice))
    unused = [node.name for node in found.captured.graph.nodes if node.op == "call_function" and not node.users]
    apply(DedupeGathers(), found, "joint")
    assert [node.name for node in found.captured.graph.nodes if node.op == "call_function" and not node.users] == unused


def draw_two_gathers(second_dtype: torch.dtype, second_handle: bool, written: bool) -> Traced:
    drawing = Drawing()
    shard = drawing.input("shard", 4, 8)
    handle, other = drawing.input("handle", 96, dtype=torch.uint8), drawing.input("other", 96, dtype=torch.uint8)
    unshard = torch.ops.zgraph.unshard.default
    policy = (None, None, 3, "mean", "alone", "", "0")
    one = drawing.call(unshard, shard, handle, [8, 8], torch.float32, *policy, works_for="w")
    if written:
        drawing.call(aten.mul_.Tensor, drawing.call(aten.t.default, shard), 0.5)
    two = drawing.call(unshard, shard, other if second_handle else handle, [8, 8], second_dtype, *policy, works_for="w")
    gm = drawing.done(one, two)
    found = Traced(gm, {"joint": gm}, traced(mlp).ctx)
    return found


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("dtype", "other_handle", "written", "gathers"),
    [
        (torch.float32, False, False, 1),
        (torch.bfloat16, False, False, 2),
        (torch.float32, True, False, 2),
        (torch.float32, False, True, 2),
    ],
)
def test_only_reads_of_one_parameter_in_one_dtype_are_shared(
    dtype: torch.dtype, other_handle: bool, written: bool, gathers: int
) -> None:
    found = draw_two_gathers(dtype, other_handle, written)
    assert apply(DedupeGathers(), found, "joint") == (gathers == 1)
    assert len(list(nodes.call_functions(found.captured.graph, nodes.is_unshard))) == gathers


def draw_sum(read_elsewhere: bool = False, other_handle: bool = False, scaled: bool = False) -> Traced:
    """reduce(a) + reduce(b), and something that may forbid to fold it."""
    drawing = Drawing()
    a, b = drawing.input("a", 8, 8), drawing.input("b", 8, 8)
    handle, other = drawing.input("handle", 96, dtype=torch.uint8), drawing.input("other", 96, dtype=torch.uint8)
    reduce = torch.ops.zgraph.reduce_grad.default
    policy = (torch.float32, None, None, 3, "mean", "alone", "", "0")
    left = drawing.call(reduce, a, handle, *policy, works_for="w")
    right = drawing.call(reduce, b, other if other_handle else handle, *policy, works_for="w")
    if scaled:
        total = drawing.call(aten.add.Tensor, left, right, alpha=2)
    else:
        total = drawing.call(aten.add.Tensor, left, right)
    gm = drawing.done(total, left) if read_elsewhere else drawing.done(total)
    return Traced(gm, {"joint": gm}, traced(mlp).ctx)


@pytest.mark.usefixtures("world")
def test_sum_of_two_reductions_of_one_parameter_is_folded() -> None:
    found = draw_sum()
    assert apply(DedupeGathers(), found, "joint")
    assert markers_of(found.captured.graph) == ["reduce w"]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("near_miss", ["read_elsewhere", "other_handle", "scaled"])
def test_sum_that_is_more_than_one_gradient_is_left_alone(near_miss: str) -> None:
    found = draw_sum(**{near_miss: True})
    assert not apply(DedupeGathers(), found, "joint")
    assert markers_of(found.captured.graph) == ["reduce w", "reduce w"]


def test_results_stay_the_same_on_all_ranks() -> None:
    """In whole numbers and without a division the sum over uses and ranks is exact in any order."""
    ranks = by_rank(Twice, world=3, reduction="sum")
    before = [copy_of(found.captured) for found in ranks]
    for rank, found in enumerate(ranks):
        with fake_world(3, rank):
            assert apply(DedupeGathers(), as_joint(found), "joint")
    assert_same_results(before, [found.captured for found in ranks], whole_numbers=True)


@pytest.mark.usefixtures("world")
def test_inference_shares_gathers_too() -> None:
    found = traced(Twice, train=False)
    gathers = markers_of(found.graphs["inference"].graph)
    assert len(markers_of(found.captured.graph)) == 6
    assert gathers == ["gather layer.weight", "gather layer.bias", "gather head.weight", "gather head.bias"]


def test_it_is_refused_after_the_markers_are_gone() -> None:
    class JointLowerGathers(LowerGathers):
        phase = "joint"

    with pytest.raises(PreconditionError, match="dedupe_gathers cannot run after lower_gathers"):
        PassList([JointLowerGathers(), DedupeGathers()])
