"""Gathers that carry codes: what travels, what forwards read, and what they read when nothing has changed."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.testing import FileCheck

import zgraph
from tests.support import models
from tests.support.compiled import with_fx
from tests.support.graphs import (
    Autocast,
    Drawing,
    Traced,
    apply,
    by_rank,
    fake_world,
    mlp,
    traced,
)
from tests.support.judges.lockstep import assert_same_results
from tests.support.judges.replicated import (
    Case,
    Replicated,
    assert_equal,
    batches,
    hybrid_mesh,
    token_batch,
    whole,
)
from tests.support.ranks import Ranks, fresh_ranks
from zgraph import PassList, VerifyError
from zgraph.analysis.liveness import memory_curve
from zgraph.codegen.kernels import reference
from zgraph.compiler.verify import Where, check_gathers_released
from zgraph.compression.methods import BlockMethod, RngKey
from zgraph.graph import meta, nodes, traits
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.graph.traffic import transfers
from zgraph.passes import (
    BucketCollectives,
    LoCo,
    LowerGathers,
    LowerReductions,
    NoFeedback,
    QuantizeGathers,
    SinkWaits,
    TwoHop,
    presets,
)

EIGHT = NoFeedback(bits=8, group=32)
FOUR = NoFeedback(bits=4, group=32, rotate=True, clip_search=True)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def every_matrix(method: BlockMethod = EIGHT, **options: Any) -> QuantizeGathers:
    return QuantizeGathers(method=method, min_numel=1, **options)


def quantized(found: Traced, entry: QuantizeGathers | None = None, direction: Any = "forward") -> fx.Graph:
    assert apply(entry or every_matrix(), found, direction)
    return found.graphs[direction].graph


def gathers(graph: fx.Graph) -> list[tuple[str, torch.dtype]]:
    return [(node.name, meta.tensor_value(node).dtype) for node in nodes.call_functions(graph, nodes.is_gather)]


# --- the graph ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_matrix_codes_are_sent_and_decoded_before_first_use() -> None:
    """[7, 5] over two ranks: shards of 20 elements, one group of 32 codes, a scale of 2 bytes, filled up to 48."""
    found = traced(mlp)
    text = graph_text(quantized(found))
    (
        FileCheck()
        .check("quantize_0_weight: u8[48]")
        .check("all_gather_0_weight: u8[96]")
        .check("wait_0_weight")
        .check("dequantize_0_weight: f32[40]")
        .check("[8, 5]")
        .check("slice.Tensor(")
        .check("unshard(")  # the bias
        .check("aten.addmm")
        .check("quantize_4_weight")
        .check("dequantize_4_weight")
        .check("aten.mm")
        .run(text)
    )
    assert found.ctx.notes == [("quantize_gathers", "forward", "3 of 5 gathers send codes")]
    apply(LowerGathers(), found, "forward")
    assert [dtype for _, dtype in gathers(found.graphs["forward"].graph)].count(torch.float32) == 2


@pytest.mark.usefixtures("world")
def test_backward_gathers_codes_again_and_forward_saves_no_weight() -> None:
    found = traced(mlp, [every_matrix(), LowerGathers(), LowerReductions()])
    assert [name for name, dtype in gathers(found.graphs["backward"].graph) if dtype == torch.uint8] == [
        "all_gather_4_weight",
        "all_gather_2_weight",
    ]
    saved = nodes.returned_by(found.graphs["forward"].graph)[1:]
    shapes = {tuple(meta.tensor_value(node).shape) for node in saved}
    assert not shapes & {(7, 5), (5, 7), (5, 5), (8, 5), (40,), (42,), (30,)}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"skip": ("2.*",)}, 2),
        ({"min_numel": 30}, 2),
        ({"min_dims": 1}, 5),
        ({"min_dims": 3}, 0),
        ({"min_numel": 2**14}, 0),
    ],
)
def test_excluded_parameters_are_left_alone(options: dict[str, Any], left: int) -> None:
    found = traced(mlp)
    entry = replace(every_matrix(), **options)
    assert apply(entry, found, "forward") == (left > 0)
    graph = found.graphs["forward"].graph
    assert len(list(nodes.call_functions(graph, nodes.is_quantize_shards))) == left
    assert len(list(nodes.call_functions(graph, nodes.is_unshard))) == 5 - left


def test_parameters_without_gathers_are_left_alone() -> None:
    with fake_world(2):
        assert not apply(every_matrix(), traced(mlp, zero_stage=0), "forward")
    with fake_world(1):
        assert not apply(every_matrix(), traced(mlp, world=1), "forward")


@pytest.mark.usefixtures("world")
def test_second_run_changes_nothing() -> None:
    found = traced(mlp)
    quantized(found)
    assert not apply(every_matrix(), found, "forward")
    assert found.ctx.notes[-1][2] == "0 of 2 gathers send codes"


@pytest.mark.usefixtures("world")
def test_a_cast_that_every_reader_applies_is_what_is_decoded() -> None:
    graph = quantized(traced(Autocast))
    decoded = list(nodes.call_functions(graph, nodes.is_dequantize_shards))
    assert {meta.tensor_value(node).dtype for node in decoded} == {torch.bfloat16}
    assert not [node for node in graph.nodes if traits.cast_dtype(node) and traits.is_decoding(node.all_input_nodes[0])]


@pytest.mark.usefixtures("world")
def test_kept_gathers_keep_codes() -> None:
    """In a window the payload is kept, by the dtype of bytes, and decoded in each forward."""
    drawing = Drawing()
    shard, handle = drawing.input("shard", 4, 8), drawing.input("handle", 96, dtype=torch.uint8)
    policy = ([8, 8], torch.float32, None, None, 2, "mean", "open", "", "0")
    unshard = drawing.call(torch.ops.zgraph.unshard.default, shard, handle, *policy, works_for="w")
    gm = drawing.done(drawing.call(torch.ops.aten.relu.default, unshard))
    graph = quantized(Traced(gm, {"forward": gm}, traced(mlp).ctx))
    (start,) = nodes.call_functions(graph, nodes.is_kept_gather)
    assert meta.tensor_value(start).dtype == torch.uint8
    assert nodes.is_quantized_gather(start)


@pytest.mark.usefixtures("world")
def test_the_verifier_sees_through_codes() -> None:
    """A decoded weight that is saved for backward against its lifetime."""
    graph = quantized(traced(mlp))
    (output,) = graph.find_nodes(op="output")
    saved = next(node for node in graph.nodes if node.target is torch.ops.aten.slice.Tensor)
    output.args = ((*output.args[0], saved),)
    with pytest.raises(VerifyError, match=r"saves the gathered 0\.weight"):
        check_gathers_released(graph, 1, Where(pass_name="test", direction="forward"))


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: QuantizeGathers(method=LoCo()), r"write zgraph\.passes\.NoFeedback\(bits=4, group=128\)"),
        (lambda: QuantizeGathers(method=TwoHop()), "does not quantize gathers"),  # pyright: ignore[reportArgumentType]
        (lambda: QuantizeGathers(min_numel=0), "min_numel=0"),
        (lambda: QuantizeGathers(skip="embed"), r"write a tuple of patterns, \('embed',\)"),  # pyright: ignore
    ],
)
def test_options_that_do_not_fit(build: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


def test_it_is_refused_behind_lower_gathers() -> None:
    passes = presets.default()
    place = next(number for number, entry in enumerate(passes) if isinstance(entry, LowerGathers))
    with pytest.raises(zgraph.PreconditionError, match="quantize_gathers cannot run after lower_gathers"):
        PassList([*passes[: place + 1], QuantizeGathers(), *passes[place + 1 :]])


def test_the_preset_takes_a_method() -> None:
    def found(**options: Any) -> list[object]:
        return [entry.method for entry in presets.default(**options) if isinstance(entry, QuantizeGathers)]

    assert found() == []
    assert found(gather_compression=EIGHT) == [EIGHT]
    assert QuantizeGathers().method == NoFeedback(bits=8, group=128)


# --- buckets --------------------------------------------------------------------------------------------------------

LOWERED = (every_matrix(), LowerGathers(), LowerReductions())


@pytest.mark.usefixtures("world")
def test_bucket_is_one_payload_and_gather_decoded_individually() -> None:
    found = traced(mlp, [*LOWERED, BucketCollectives(bucket_bytes=1000), SinkWaits()])
    text = graph_text(found.graphs["forward"].graph)
    (
        FileCheck()
        .check_count("zgraph.quantize_shards", 1, exactly=True)
        .check("all_gather_bucket_0_weight_3: u8[288]")
        .check("wait_bucket_0_weight_3")
        .check(", 20, 0, 2, torch.float32)  # 0.weight")
        .check("aten.addmm")
        .check(", 21, 48, 2, torch.float32)  # 2.weight")
        .check("aten.addmm")
        .check(", 15, 96, 2, torch.float32)  # 4.weight")
        .check("aten.mm")
        .run(text)
    )
    assert "clone" not in text.split("# 0.weight, 2.weight, 4.weight")[0]


@pytest.mark.usefixtures("world")
def test_codes_of_other_methods_and_plain_bytes_stay_out() -> None:
    eight, four = every_matrix(skip=("2.*",)), every_matrix(FOUR)
    found = traced(mlp, [eight, four, LowerGathers(), LowerReductions(), BucketCollectives(bucket_bytes=1000)])
    names = [name for name, dtype in gathers(found.graphs["forward"].graph) if dtype == torch.uint8]
    assert sorted(names) == ["all_gather_2_weight", "all_gather_bucket_0_weight_2"]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("mode", ["coalesced", "sequential"])
def test_other_ways_to_share_a_gather(mode: Any) -> None:
    found = traced(mlp, [*LOWERED, BucketCollectives(bucket_bytes=1000, gathers=mode)])
    graph = found.graphs["forward"].graph
    decoded = list(nodes.call_functions(graph, nodes.is_dequantize_shards))
    assert len(decoded) == 3
    read = [node.all_input_nodes[0] for node in decoded]
    assert all(nodes.is_getitem(node) if mode == "coalesced" else nodes.is_wait(node) for node in read)
    if mode == "sequential":
        order = nodes.order_of(graph)
        products = [node for node in graph.nodes if node.target in (torch.ops.aten.addmm.default, torch.ops.aten.mm)]
        assert order[products[0]] < order[nodes.start_of(decoded[1].all_input_nodes[0])]


@pytest.mark.parametrize("gathering", ["flat", "coalesced", "sequential"])
def test_a_bucket_changes_no_bit(gathering: Any) -> None:
    """Four ranks in lockstep, one of which holds no row of some parameters."""
    bucketing = BucketCollectives(bucket_bytes=1000, gathers=gathering)
    alone, together = (by_rank(mlp, [*LOWERED, *more], world=4) for more in ((), (bucketing,)))
    for direction in ("forward", "backward"):
        assert_same_results(
            [copy_of(found.graphs[direction]) for found in alone], [found.graphs[direction] for found in together]
        )


# --- bytes and memory -----------------------------------------------------------------------------------------------

MATRICES = [(7, 5), (5, 7), (5, 5)]
BIASES = [7, 5]


def expected_bytes(world: int, bits: int, group: int) -> int:
    """What one rank sends: codes of full groups, a scale of two bytes for each, filled up to 16; and the biases."""
    total = sum(-(-rows // world) * 4 for rows in BIASES)
    for rows, columns in MATRICES:
        groups = -(-(-(-rows // world) * columns) // group)
        total += -(-groups * (group * bits // 8 + 2) // 16) * 16
    return total * (world - 1)


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_sent_bytes_equal_the_count_by_hand(world_size: int, bucketed: bool) -> None:
    entry = every_matrix(NoFeedback(bits=4, group=8))
    bucketing = [BucketCollectives(bucket_bytes=1000)] if bucketed else []
    with fake_world(world_size):
        found = traced(mlp, [entry, LowerGathers(), LowerReductions(), *bucketing], world=world_size)
        graph = found.graphs["forward"].graph
        assert sum(sent.sent_bytes for sent in transfers(graph)) == expected_bytes(world_size, 4, 8)


def test_half_the_bytes_of_bf16_plus_scales() -> None:
    """Groups of 128: 130 bytes where bf16 has 256."""
    with fake_world(2):
        found = traced(wide, [QuantizeGathers(), LowerGathers()])
        sent = sum(sent.sent_bytes for sent in transfers(found.graphs["forward"].graph))
    assert sent == 2 * 128 * 64 * 130 // 128


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False))


def test_ranks_with_uneven_shards_agree_on_collectives_and_peak() -> None:
    ranks = by_rank(mlp, [*LOWERED, BucketCollectives(bucket_bytes=100), SinkWaits()], world=4)
    for direction in ("forward", "backward"):
        with fake_world(4):
            graphs = [found.graphs[direction].graph for found in ranks]
            sent = [[(one.kind, one.dtype, one.payload_bytes) for one in transfers(graph)] for graph in graphs]
            assert sent == [sent[0]] * 4
            assert len({memory_curve(graph, agreed=True).peak_bytes for graph in graphs}) == 1


# --- numbers --------------------------------------------------------------------------------------------------------


def decoded(row: Tensor, method: BlockMethod, rank: int) -> Tensor:
    """What one rank's codes of these elements stand for."""
    codes, scales = reference.quantize(row.view(1, -1), {}, method, RngKey(0), rank)
    return reference.dequantize_sum(codes, scales, row.numel(), method, RngKey(0), rank)


def rounded(weight: Tensor, method: BlockMethod, world: int) -> Tensor:
    """The whole parameter as every rank decodes it: chunk by chunk, zeros behind the end."""
    chunk = -(-weight.shape[0] // world) * math.prod(weight.shape[1:])
    flat = torch.nn.functional.pad(weight.flatten(), (0, world * chunk - weight.numel()))
    parts = [decoded(part, method, rank) for rank, part in enumerate(flat.split(chunk))]
    return torch.cat(parts)[: weight.numel()].view(weight.shape)


CASES: dict[str, Case] = {
    "uneven": Case(build=models.Uneven, steps=2),
    "window": Case(build=models.Uneven, micro_batches=3),
    "language": Case(build=lambda: models.Language(layers=1), batch=token_batch, steps=2),
    "bf16": Case(build=models.Uneven, options={"param_dtype": torch.bfloat16}),
    "autocast": Case(build=models.Uneven, autocast=torch.bfloat16, steps=2),
    "hybrid": Case(build=models.Uneven, replicas=2),
}


def follow(name: str, zero_stage: int, method: BlockMethod, bucketed: bool) -> list[Tensor]:
    """Train beside the replicated model whose weights are what the codes stand for; every output and gradient equal.

    Returns:
        The weights at the end of what was read, for a comparison between ranks.
    """
    case = CASES[name]
    torch.manual_seed(5)
    model = case.build()
    expected = Replicated(case, copy.deepcopy(model), zero_stage)
    model = zgraph.shard(model, hybrid_mesh(case.replicas), zero_stage=zero_stage, **case.options)
    passes = [
        entry
        for entry in presets.default(gather_compression=method)
        if bucketed or not isinstance(entry, BucketCollectives)
    ]
    passes = [every_matrix(method) if isinstance(entry, QuantizeGathers) else entry for entry in passes]
    called = with_fx(model, passes=PassList(passes, replay_all=dist.get_rank() == 0))
    world = dist.get_world_size() // case.replicas
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exact = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    for step in range(case.steps):
        for parameter_name, parameter in expected.model.named_parameters():
            weight = exact[parameter_name]
            parameter.data = rounded(weight, method, world) if weight.dim() > 1 else weight.clone()
        outputs, grads = expected.step(step)
        for repeated in range(2):  # the second time nothing has changed since the first
            model.zero_grad()
            for micro, output in enumerate(outputs):
                index = step * case.micro_batches + micro
                inputs, target = batches(case, index)[dist.get_rank()]
                waits = micro < case.micro_batches - 1
                with zgraph.no_sync(model) if waits else contextlib.nullcontext():
                    found = case.call(called, inputs)
                assert_equal(f"output {micro} of step {step}, time {repeated}", found.detach(), output)
                with torch.no_grad():  # an evaluation in between reads the same, and leaves no trace
                    assert_equal(f"evaluation {micro} of step {step}", case.call(called, inputs), output)
                case.loss(found, target).backward()
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert_equal(f"gradient of {parameter_name}", whole(parameter.grad), grads[parameter_name])
        optimizer.step()
        for parameter_name, parameter in model.named_parameters():
            grad = grads[parameter_name]
            assert grad is not None
            exact[parameter_name] = exact[parameter_name] - 0.1 * grad
            torch.testing.assert_close(whole(parameter.detach()), exact[parameter_name])
            exact[parameter_name] = whole(parameter.detach()).clone()  # SGD fuses, which rounds in another place
    return [parameter.detach() for parameter in expected.model.parameters()]


def equal_on_all_ranks(found: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("name", "zero_stage", "bucketed"),
    [
        ("uneven", 3, False),
        ("window", 1, True),
        ("bf16", 1, False),
        ("autocast", 2, True),
        ("language", 3, True),
    ],
)
def test_forwards_read_what_codes_stand_for(ranks: Ranks, name: str, zero_stage: int, bucketed: bool) -> None:
    """Outputs, gradients and evaluations equal, bit for bit, those of a model that was rounded beforehand."""
    assert equal_on_all_ranks(ranks.run(follow, name, zero_stage, EIGHT, bucketed))


@pytest.mark.parametrize(("zero_stage", "method"), [(3, EIGHT), (2, FOUR)])
def test_hybrid_sharding_quantizes_inside(zero_stage: int, method: BlockMethod) -> None:
    with fresh_ranks(4) as ranks:
        assert equal_on_all_ranks(ranks.run(follow, "hybrid", zero_stage, method, True))


@pytest.mark.parametrize("group", [32, 128])
def test_eight_bits_lose_under_one_percent_of_group_maximum(group: int) -> None:
    """Half a step of 1/127, and half a unit in the last place of the bf16 scale."""
    weight = torch.randn(13, 77, generator=torch.Generator().manual_seed(0)).exp()
    found = rounded(weight, NoFeedback(bits=8, group=group), 2)
    for whole_shard, read in zip(weight.split(7), found.split(7), strict=True):
        for exact, near in zip(whole_shard.flatten().split(group), read.flatten().split(group), strict=True):
            assert ((exact - near).abs() <= exact.abs().max() * (0.502 / 127 + 2**-8)).all()
