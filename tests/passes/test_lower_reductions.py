"""zgraph::reduce_grad becomes an exchange, a sum in rank order, and for replicated parameters a gather."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.testing import FileCheck

from tests.support.graphs import Autocast, Drawing, Traced, apply, by_rank, fake_world, mlp, traced
from tests.support.judges.lockstep import assert_same_results
from zgraph import PassList, PreconditionError
from zgraph.graph import meta, nodes, traits
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.passes import BucketCollectives, LowerGathers, LowerReductions

aten = torch.ops.aten


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def lowered(found: Traced, lowering: LowerReductions | None = None) -> fx.Graph:
    assert apply(lowering or LowerReductions(), found, "backward")
    return found.graphs["backward"].graph


def wires(graph: fx.Graph) -> set[torch.dtype]:
    starts = nodes.call_functions(graph, lambda node: nodes.is_all_to_all(node) or nodes.is_reduce_scatter(node))
    return {meta.tensor_value(node).dtype for node in starts}


@pytest.mark.usefixtures("world")
def test_each_gradient_is_padded_exchanged_and_summed_in_rank_order() -> None:
    text = graph_text(lowered(traced(mlp)))
    (
        FileCheck()
        .check("constant_pad_nd(t_6, [0, 0, 0, 1])")
        .check("all_to_all_4_weight: f32[6, 5]")
        .check("[3, 3], [3, 3], '0.reductions')")
        .check("wait_grad_4_weight")
        .check("f32[3, 5] = zgraph.sum_ranks(wait_grad_4_weight, 2, 2, torch.float32)")
        .check("all_to_all_0_weight")
        .run(text)
    )
    assert "reduce_grad" not in text


def test_the_last_ranks_keep_only_their_own_rows() -> None:
    kept: list[tuple[int, ...]] = []
    for found in by_rank(mlp, [LowerReductions()], world=4):
        outputs = [out for out in nodes.returned_by(found.graphs["backward"].graph) if isinstance(out, fx.Node)]
        kept.append(next(tuple(meta.tensor_value(out).shape) for out in outputs if "4.weight" in meta.parameters(out)))
    assert kept == [(2, 5), (2, 5), (1, 5), (0, 5)]


@pytest.mark.usefixtures("world")
def test_mean_of_a_replicated_parameter_is_gathered() -> None:
    graph = lowered(traced(mlp, zero_stage=0))
    gathers = [node.name for node in nodes.call_functions(graph, nodes.is_all_gather)]
    exchanges = [node.name for node in nodes.call_functions(graph, nodes.is_all_to_all)]
    assert gathers == [name.replace("all_to_all_", "all_gather_grad_") for name in exchanges]
    FileCheck().check("all_to_all_4_weight: f32[26]").check("sum_ranks").check("all_gather_grad_4_weight").check(
        "f32[5, 5] = aten.view("
    ).run(graph_text(graph))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reduce_dtype": torch.bfloat16}, torch.bfloat16),
        ({"param_dtype": torch.bfloat16}, torch.bfloat16),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32),
        ({"reduce_dtype": torch.bfloat16, "mean_dtype": torch.float32}, torch.float32),
        ({"build": Autocast}, torch.float32),
        ({"build": Autocast, "reduce_dtype": torch.bfloat16}, torch.bfloat16),
        ({"mean_dtype": torch.float64}, torch.float32),
    ],
    ids=str,
)
def test_means_travel_in_the_dtype_that_gradients_were_asked_to(options: dict[str, Any], expected: torch.dtype) -> None:
    graph = lowered(traced(**{"build": mlp, "zero_stage": 0, **options}))
    gathers = list(nodes.call_functions(graph, nodes.is_all_gather))
    assert {meta.tensor_value(node).dtype for node in gathers} == {expected}
    # Rounded once, by the operator that sums; and every gradient is its parameter's own dtype again.
    assert {node.args[3] for node in nodes.call_functions(graph, nodes.is_sum_ranks)} == {expected}
    gradients = [out for out in nodes.returned_by(graph) if isinstance(out, fx.Node) and meta.parameters(out)]
    assert {meta.tensor_value(out).dtype for out in gradients} == {torch.float32}


@pytest.mark.usefixtures("world")
def test_sum_does_not_divide() -> None:
    graph = lowered(traced(mlp, reduction="sum"))
    assert {node.args[2] for node in nodes.call_functions(graph, nodes.is_sum_ranks)} == {1}


@pytest.mark.usefixtures("world")
def test_gradient_is_sent_in_reduce_dtype_and_arrives_in_parameters() -> None:
    graph = lowered(traced(mlp, reduce_dtype=torch.bfloat16))
    assert wires(graph) == {torch.bfloat16}
    assert {node.args[3] for node in nodes.call_functions(graph, nodes.is_sum_ranks)} == {torch.float32}


@pytest.mark.usefixtures("world")
def test_a_wider_reduce_dtype_widens_nothing() -> None:
    graph = lowered(traced(mlp, param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert wires(graph) == {torch.bfloat16}


@pytest.mark.usefixtures("world")
def test_gradient_widened_by_autocast_is_sent_narrow_without_cast() -> None:
    found = traced(Autocast)
    casts = [node.name for node in found.graphs["backward"].graph.nodes if traits.cast_dtype(node) == torch.float32]
    assert len(casts) == 5
    graph = lowered(found)
    assert wires(graph) == {torch.bfloat16}
    assert not {node.name for node in graph.nodes} & set(casts)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("near_miss", ["moved", "narrowed"])
def test_other_casts_stay(near_miss: str) -> None:
    """A cast that does more than widen is computed before the exchange."""
    drawing = Drawing()
    handle = drawing.input("handle", 96, dtype=torch.uint8)
    if near_miss == "moved":
        grad = drawing.input("grad", 8, 8, dtype=torch.bfloat16)
        wide = drawing.call(aten._to_copy.default, grad, dtype=torch.float32, memory_format=torch.contiguous_format)
    else:
        grad = drawing.input("grad", 8, 8, dtype=torch.float64)
        wide = drawing.call(aten._to_copy.default, grad, dtype=torch.float32)
    policy = (torch.float32, None, None, 3, "mean", "alone", "", "0")
    reduced = drawing.call(torch.ops.zgraph.reduce_grad.default, wide, handle, *policy, works_for="w")
    gm = drawing.done(reduced)
    graph = lowered(Traced(gm, {"backward": gm}, traced(mlp).ctx))
    assert wires(graph) == {torch.float32}
    assert wide in graph.nodes


@pytest.mark.usefixtures("world")
def test_reduce_scatter_leaves_the_sum_to_the_backend_in_fp32() -> None:
    graph = lowered(traced(mlp, param_dtype=torch.bfloat16), LowerReductions(algorithm="reduce_scatter"))
    assert wires(graph) == {torch.float32}
    assert not list(nodes.call_functions(graph, nodes.is_all_to_all))
    FileCheck().check("reduce_scatter_4_weight").check("wait_grad_4_weight").check("sum_ranks").check(", 1, 2, ").run(
        graph_text(graph)
    )


@pytest.mark.parametrize(
    ("backend", "target"),
    [("nccl", "reduce_scatter_tensor"), ("gloo", "all_to_all_single"), ("fake", "all_to_all_single")],
)
@pytest.mark.usefixtures("world")
def test_auto_chooses_by_backend(backend: str, target: str) -> None:
    found = traced(mlp)
    found.know(planned_backend=backend)
    starts = {str(node.target).split(".")[1] for node in nodes.call_functions(lowered(found), nodes.is_start)}
    assert starts - {"all_gather_into_tensor"} == {target}


def test_a_group_of_one_only_casts() -> None:
    with fake_world(1):
        graph = lowered(traced(mlp, world=1, param_dtype=torch.bfloat16))
    assert not list(nodes.call_functions(graph, lambda node: nodes.is_start(node) or nodes.is_reduce_grad(node)))
    gradients = [out for out in nodes.returned_by(graph) if isinstance(out, fx.Node) and meta.parameters(out)]
    assert {meta.tensor_value(out).dtype for out in gradients} == {torch.float32}


@pytest.mark.usefixtures("world")
def test_second_run_and_forward_are_left_alone() -> None:
    found = traced(mlp)
    lowered(found)
    assert not apply(LowerReductions(), found, "backward")
    assert not apply(LowerReductions(), found, "forward")
    assert found.ctx.notes == [
        ("lower_reductions", where, "nothing is reduced here") for where in ("backward", "forward")
    ]


def test_bad_algorithm_is_refused_when_the_pass_is_built() -> None:
    with pytest.raises(ValueError, match='lower_reductions: algorithm=\'ring\' is unknown; write "auto", "all_to_all"'):
        LowerReductions(algorithm="ring")  # pyright: ignore[reportArgumentType]


def test_it_is_refused_after_buckets_were_made() -> None:
    with pytest.raises(PreconditionError, match="lower_reductions cannot run after bucket_collectives"):
        PassList([LowerGathers(), LowerReductions(), BucketCollectives(bucket_bytes=100), LowerReductions()])


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {}),
        (3, {}),
        (3, {"zero_stage": 0}),
        (3, {"reduction": "sum"}),
        (3, {"build": Autocast}),
        (3, {"zero_stage": 0, "reduce_dtype": torch.bfloat16, "mean_dtype": torch.float32}),
        (3, {"zero_stage": 0, "param_dtype": torch.bfloat16}),
        # Each dtype is met at the other end of the stages.
        (3, {"reduce_dtype": torch.bfloat16}),
        (3, {"param_dtype": torch.bfloat16}),
        (3, {"zero_stage": 0, "reduce_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_results_are_bitwise_the_same(world_size: int, options: dict[str, object]) -> None:
    ranks = by_rank(**{"build": mlp, "world": world_size, **options})  # pyright: ignore[reportArgumentType]
    before = [copy_of(found.graphs["backward"]) for found in ranks]
    for rank, found in enumerate(ranks):
        with fake_world(world_size, rank):
            lowered(found)
    assert_same_results(before, [found.graphs["backward"] for found in ranks])


# --- gradients that are not sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "window"), [(1, "alone"), (2, "open")])
def test_gradients_that_are_not_sent_are_not_copied(ranks: int, window: str) -> None:
    """Autograd keeps gradients and adds to them, so only those that share memory, or lie otherwise, are copied."""
    drawing = Drawing()
    x, y = drawing.input("x", 8, 8), drawing.input("y", 8, 8)
    handles = {name: drawing.input(f"handle_{name}", 96, dtype=torch.uint8) for name in ("own", "seen", "part", "bent")}
    policy = (torch.float32, None, None, 0, "mean", window, "", "0")
    product = drawing.call(aten.mm.default, x, y)
    turned = drawing.call(aten.t.default, drawing.call(aten.t.default, drawing.call(aten.mm.default, y, x)))
    grads = {
        "own": turned,
        "seen": product,
        "part": drawing.call(aten.slice.Tensor, drawing.call(aten.mm.default, y, y), 0, 0, 4),
        "bent": drawing.call(aten.t.default, drawing.call(aten.mm.default, x, x)),
    }
    markers = [
        drawing.call(torch.ops.zgraph.reduce_grad.default, grad, handles[name], *policy, works_for=name)
        for name, grad in grads.items()
    ]
    gm = drawing.done(*markers, drawing.call(aten.relu.default, product))
    with fake_world(ranks):
        graph = lowered(Traced(gm, {"backward": gm}, traced(mlp, world=ranks).ctx))
    own, *copies, _ = nodes.returned_by(graph)
    assert own.target is aten.alias.default and own.args == (turned,) and meta.parameters(own) == ("own",)
    assert [copy.target for copy in copies] == [aten.clone.default] * 3
    assert [copy.args[0] for copy in copies] == [grads[name] for name in ("seen", "part", "bent")]
    assert all(meta.tensor_value(copy).is_contiguous() for copy in copies)
    call = nodes.output_of(graph).prev
    if window == "open":
        assert call.target is torch.ops.zgraph.wait_in_grad.default and call.args == (list(handles.values()),)
        assert meta.parameters(call) == tuple(handles)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_closing_window_reduces_by_the_algorithm_of_the_pass(zero_stage: int) -> None:
    drawing = Drawing()
    x, handle = drawing.input("x", 8, 8), drawing.input("handle", 96, dtype=torch.uint8)
    policy = (torch.float32, None, None, zero_stage, "mean", "closing", "", "0")
    grad = drawing.call(aten.mm.default, x, x)
    gm = drawing.done(drawing.call(torch.ops.zgraph.reduce_grad.default, grad, handle, *policy, works_for="w"))
    graph = lowered(Traced(gm, {"backward": gm}, traced(mlp).ctx), LowerReductions(algorithm="reduce_scatter"))
    starts = [node.target for node in nodes.call_functions(graph, nodes.is_exchange)]
    assert starts and not list(nodes.call_functions(graph, nodes.is_all_to_all))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("zero_stage", "window"), [(0, "closing"), (1, "open"), (1, "closing"), (2, "open")])
def test_other_gradients_do_not_wait_in_grad(zero_stage: int, window: str) -> None:
    drawing = Drawing()
    x, handle = drawing.input("x", 8, 8), drawing.input("handle", 96, dtype=torch.uint8)
    grad = drawing.call(aten.mm.default, x, x)
    policy = (torch.float32, None, None, zero_stage, "mean", window, "", "0")
    gm = drawing.done(drawing.call(torch.ops.zgraph.reduce_grad.default, grad, handle, *policy, works_for="w"))
    graph = lowered(Traced(gm, {"backward": gm}, traced(mlp).ctx))
    targets = [node.target for node in graph.nodes]
    assert torch.ops.zgraph.wait_in_grad.default not in targets and nodes.returned_by(graph)[0] is not grad
