"""CompressGradients: every gradient equals what the reference kernels send, bit for bit; and what is left alone."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.graphs import Twice, apply, fake_world, mlp, traced
from tests.support.judges.compressed import Codec, Hybrid, OneHop, TwoHops, local_gradients
from tests.support.judges.replicated import assert_equal
from tests.support.ranks import Ranks, every_world, fresh_ranks, worlds
from tests.support.whole_tensors import whole
from zgraph import PreconditionError
from zgraph.compiler.graph_pass import GraphPass
from zgraph.compression.methods import RngKey
from zgraph.graph import meta, nodes
from zgraph.graph.traffic import transfers
from zgraph.passes import (
    BucketCollectives,
    CompressGradients,
    DedupeGathers,
    ErrorFeedback,
    LoCo,
    LowerReductions,
    NoFeedback,
    TwoHop,
    presets,
)
from zgraph.runtime.error_feedback import Feedback
from zgraph.runtime.window_state import state_behind
from zgraph.sharding.scope import state_of
from zgraph.tiers.lanes import HOST_TO_DEVICE

SMALL = LoCo(group=32)
LEAST = 100  # elements of a compressed gradient here


def model() -> nn.Module:
    """Matrices of odd sizes, the last too small to be compressed; biases never are."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 5))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(1000 * step + rank))


def passes(compress: CompressGradients, **options: Any) -> list[GraphPass]:
    found = presets.default(compression=SMALL, **options)
    return [compress if isinstance(entry, CompressGradients) else entry for entry in found]


def compiled(module: nn.Module, compress: CompressGradients, **options: Any) -> Any:
    pipeline = zgraph.PassList(passes(compress, **options), replay_all=dist.get_rank() == 0)
    return with_fx(module, passes=pipeline)


def feedbacks(module: nn.Module, slot: str = "first_hop") -> dict[str, Feedback]:
    """By parameter name, of those that have any."""
    found: dict[str, Feedback] = {}
    for part in module.modules():
        state = state_of(part)
        for read in state.by_attribute.values() if state is not None else ():
            kept = state_behind(read.handle).feedbacks.by_slot.get(slot)
            if kept is not None:
                found[read.name] = kept
    return found


def sender(method: Any, zero_stage: int, replicas: int) -> OneHop | TwoHops | Hybrid:
    if replicas > 1:
        if method == LoCo(group=32):  # of "auto" hops
            method = TwoHop(inter_host=replace(method, hops=1))
        elif isinstance(method, LoCo):
            method = TwoHop(intra_host=method, inter_host=method)
        return Hybrid(method, zero_stage, replicas)
    return (
        TwoHops(method, zero_stage, method.ranks_per_host) if isinstance(method, TwoHop) else OneHop(method, zero_stage)
    )


def weight_grad(layer: nn.Module) -> Tensor:
    return whole(cast(Tensor, cast(nn.Linear, layer).weight.grad))


def parts(values: list[Tensor], count: int) -> list[list[Tensor]]:
    return [values[first : first + count] for first in range(0, len(values), count)]


def in_order(values: list[Tensor]) -> Tensor:
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return total


# --- every gradient -------------------------------------------------------------------------------------------------


def compare(zero_stage: int, compress: CompressGradients, replicas: int = 1, dtype: torch.dtype | None = None) -> int:
    """Three steps of gradients against the reference; returns how many were compressed."""
    world = dist.get_world_size()
    mesh = None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    sharded = zgraph.shard(model(), mesh, zero_stage=zero_stage, param_dtype=dtype)
    plain, call = model(), compiled(sharded, compress)
    expected_of: dict[str, OneHop | TwoHops | Hybrid] = {}
    for step in range(3):
        grads = [local_gradients(plain, batch(step, rank), loss_of, dtype) for rank in range(world)]
        loss_of(call(batch(step, dist.get_rank()))).backward()
        for name, parameter in sharded.named_parameters():
            of_ranks = [found[name] for found in grads]
            found = whole(cast(Tensor, parameter.grad))
            if parameter.dim() < 2 or parameter.numel() < LEAST or world == 1:
                inside = [in_order(own) for own in parts(of_ranks, world // replicas)]
                assert_equal(f"{name} in step {step}", found, in_order(inside) / world)
                continue
            if name not in expected_of:
                expected_of[name] = sender(compress.method, zero_stage, replicas)
            assert_equal(f"{name} in step {step}", found, expected_of[name].mean(of_ranks, step))
        sharded.zero_grad()
    return len(expected_of)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@every_world
def test_every_gradient_is_what_the_reference_sends(ranks: Ranks, zero_stage: int) -> None:
    compressed = ranks.run(compare, zero_stage, CompressGradients(method=SMALL, min_numel=LEAST))
    assert compressed == [0 if ranks.world == 1 else 2] * ranks.world


@pytest.mark.parametrize(
    "method",
    [
        NoFeedback(bits=8, group=64),
        ErrorFeedback(bits=2, group=16),
        LoCo(group=32, error_device="cpu"),
        LoCo(bits=4, group=128, error_dtype=torch.float32, clip_search=False),  # the kernels' tests have it
    ],
    ids=lambda method: f"{type(method).__name__}{method.bits}",
)
def test_each_method_matches_the_reference(ranks: Ranks, method: Any) -> None:
    assert ranks.run(compare, 3, CompressGradients(method=method, min_numel=LEAST)) == [2, 2]


@pytest.mark.parametrize("error_device", ["cpu", None])
def test_errors_are_forgotten_after_so_many_steps(ranks: Ranks, error_device: str | None) -> None:
    ranks.run(forgets, LoCo(group=32, error_device=error_device, reset_every=2))


def forgets(method: LoCo) -> None:
    """After two steps the gradients are those of a model that has just begun, but for signs."""
    sharded = zgraph.shard(model(), zero_stage=3)
    call = compiled(sharded, CompressGradients(method=method, min_numel=LEAST))
    for step in range(3):
        sharded.zero_grad()
        loss_of(call(batch(step, dist.get_rank()))).backward()
        kept = feedbacks(sharded)
        assert {(found.reductions, found.steps) for found in kept.values()} == {(step + 1, step + 1)}
    one_hop = OneHop(method, 3)
    grads = [local_gradients(model(), batch(2, rank), loss_of)["0.weight"] for rank in range(2)]
    assert_equal("the third gradient", weight_grad(sharded[0]), one_hop.mean(grads, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_match_the_reference(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(compare, 2, CompressGradients(method=SMALL, min_numel=LEAST), 1, dtype)


TWO_HOPS = TwoHop(intra_host=NoFeedback(bits=8, group=64), inter_host=LoCo(group=32))


@pytest.mark.parametrize("zero_stage", [0, 2])
@worlds(4)
def test_two_hops_over_given_nodes_sum_inside_first(ranks: Ranks, zero_stage: int) -> None:
    method = replace(TWO_HOPS, ranks_per_host=2)
    assert ranks.run(compare, zero_stage, CompressGradients(method=method, min_numel=LEAST)) == [2] * 4


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("method", [LoCo(group=32, hops=1), LoCo(group=32), TWO_HOPS], ids=["one", "auto", "two"])
@worlds(4)
def test_hybrid_sharding_sums_over_shards_then_over_replicas(ranks: Ranks, zero_stage: int, method: Any) -> None:
    assert ranks.run(compare, zero_stage, CompressGradients(method=method, min_numel=LEAST), 2) == [2] * 4


def test_means_of_replicated_parameters_may_be_compressed_too(ranks: Ranks) -> None:
    ranks.run(compressed_means)


def compressed_means() -> None:
    """Each rank decodes what both have made of their halves of the mean."""
    sharded, means = zgraph.shard(model(), zero_stage=0), LoCo(bits=8, group=32)
    call = compiled(sharded, CompressGradients(method=SMALL, min_numel=LEAST, mean_codec=means))
    codec, gathered = Codec(SMALL), [Codec(means) for _ in range(2)]
    numel = -(-31 * 17 // 2)
    for step in range(2):
        grads = [local_gradients(model(), batch(step, rank), loss_of)["2.weight"].view(-1) for rank in range(2)]
        halves = [total / 2 for total in codec.sums(grads, numel, RngKey(step))]
        sharded.zero_grad()
        loss_of(call(batch(step, dist.get_rank()))).backward()
        # A gather is an exchange in which a rank sends one part, under signs of its own.
        parted = [
            own.alone(half, RngKey(step, 4), rank)
            for rank, (own, half) in enumerate(zip(gathered, halves, strict=True))
        ]
        found = weight_grad(sharded[2])
        assert_equal(f"step {step}", found, torch.cat(parted)[: 31 * 17].view(17, 31))


# --- what shares, and what does not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_a_bucket_changes_no_bit(ranks: Ranks, zero_stage: int) -> None:
    ranks.run(bucketed_and_not, zero_stage)


def bucketed_and_not(zero_stage: int) -> None:
    found: list[list[Tensor]] = []
    for bucket_bytes in (1, 2**20):
        torch.compiler.reset()
        sharded = zgraph.shard(model(), zero_stage=zero_stage)
        compress = CompressGradients(method=SMALL, min_numel=LEAST)
        call = compiled(sharded, compress, bucket_bytes=bucket_bytes)
        for step in range(2):
            sharded.zero_grad()
            loss_of(call(batch(step, dist.get_rank()))).backward()
        found.append([whole(cast(Tensor, parameter.grad)) for parameter in sharded.parameters()])
    for first, second in zip(*found, strict=True):
        assert_equal("gradient", first, second)


def test_equal_blocks_that_share_a_graph_keep_their_own_errors(ranks: Ranks) -> None:
    ranks.run(blocks)


def blocks() -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)])
    sharded = zgraph.shard(copy.deepcopy(plain), zero_stage=3)
    report = zgraph.Report()
    for part in sharded:
        part.compile(
            backend="zgraph",
            options={
                "lowering": "fx",
                "report": report,
                "passes": zgraph.PassList(passes(CompressGradients(method=SMALL, min_numel=LEAST))),
            },
        )
    expected = {name: OneHop(SMALL, 3) for name, parameter in plain.named_parameters() if parameter.dim() > 1}
    for step in range(2):
        inputs = [torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)]
        grads = [local_gradients(plain, one, loss_of) for one in inputs]
        sharded.zero_grad()
        loss_of(sharded(inputs[dist.get_rank()])).backward()
        for name, sender in expected.items():
            found = whole(cast(Tensor, sharded.get_parameter(name).grad))
            assert_equal(f"{name} in step {step}", found, sender.mean([of_rank[name] for of_rank in grads], step))
    assert sum(graph.direction == "backward" for graph in report.graphs) < 3, "the blocks did not share a graph"


def test_a_weight_that_is_read_twice_is_compressed_once() -> None:
    with fake_world(2):
        found = traced(Twice)
        apply(CompressGradients(method=SMALL, min_numel=20), found, "backward")
        graph = found.graphs["backward"].graph
        quantized = list(nodes.call_functions(graph, nodes.is_quantize))
        assert [meta.parameters(node) for node in quantized] == [("layer.weight",)]


def test_a_second_run_finds_nothing_to_do() -> None:
    with fake_world(2):
        found = traced(mlp)
        compress = CompressGradients(method=SMALL, min_numel=20)
        assert apply(compress, found, "backward")
        assert not apply(compress, found, "backward")
        assert not apply(compress, traced(mlp), "forward")


def test_small_flat_or_skipped_gradients_are_sent_uncompressed() -> None:
    with fake_world(2):
        found = traced(mlp)
        apply(CompressGradients(method=SMALL, min_numel=30, skip=("2.*",)), found, "backward")
        graph = found.graphs["backward"].graph
        share = (5 * 7) / (5 * 7 + 7 + 7 * 5 + 5 + 5 * 5)
        assert f"1 of 5 gradients are compressed, {share:.1%} of their elements" in found.ctx.notes[-1][2]
        assert [meta.parameters(node) for node in nodes.call_functions(graph, nodes.is_quantize)] == [("0.weight",)]
        assert len(list(nodes.call_functions(graph, nodes.is_reduce_grad))) == 4
        apply(LowerReductions(), found, "backward")
        apply(BucketCollectives(bucket_bytes=2**20), found, "backward")
        starts = list(nodes.call_functions(graph, nodes.is_all_to_all))
        assert [meta.tensor_value(start).dtype for start in starts] == [torch.float32, torch.uint8]
        assert {name for start in starts for name in meta.parameters(start)} == {
            *("0.weight", "0.bias", "2.weight", "2.bias", "4.weight")
        }


@pytest.mark.parametrize(("min_dims", "biases"), [(2, 0), (1, 2)])
def test_vectors_are_compressed_if_one_wants_it(min_dims: int, biases: int) -> None:
    with fake_world(2):
        found = traced(mlp)
        apply(CompressGradients(method=SMALL, min_numel=1, min_dims=min_dims), found, "backward")
        names = [*map(meta.parameters, nodes.call_functions(found.graphs["backward"].graph, nodes.is_quantize))]
        assert len(names) == 3 + biases and sum("bias" in name for (name,) in names) == biases


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 768, bias=False), nn.ReLU(), nn.Linear(768, 512, bias=False))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_bucket_sends_at_most_26_percent_of_bf16(zero_stage: int) -> None:
    """Counted on what is handed to the collectives: codes and scales, all_to_all and the gather of bf16 means apart."""
    with fake_world(4):
        found = traced(wide, world=4, zero_stage=zero_stage)
        for entry in (CompressGradients(), LowerReductions(), BucketCollectives(bucket_bytes=2**24)):
            apply(entry, found, "backward")
        graph = found.graphs["backward"].graph
        exchanges = [one for one in transfers(graph) if one.kind == "all_to_all_single"]
        assert [one.parameters for one in exchanges] == [("2.weight", "0.weight")]
        assert exchanges[0].payload_bytes <= 0.26 * 2 * (2 * 512 * 768)
        means = [one.payload_bytes for one in transfers(graph) if one.dtype == torch.bfloat16]
        assert means == ([2 * 2 * 512 * 768 // 4] if zero_stage == 0 else [])


def test_a_planned_run_counts_what_codes_and_scales_take() -> None:
    for world in (2, 5):
        sent = [
            zgraph.plan(
                wide,
                world_size=world,
                batch=lambda: (torch.zeros(2, 512),),
                passes=zgraph.PassList(presets.default(compression=compression)),
            ).sent_bytes
            for compression in (None, LoCo())
        ]
        numels = [-(-768 // world) * 512, -(-512 // world) * 768]  # of a rank's rows of either matrix
        groups = sum(-(-numel // 128) for numel in numels)
        saved = (world - 1) * (4 * sum(numels) - 66 * groups)
        assert saved - 16 * world * 2 <= sent[0] - sent[1] <= saved


def test_errors_on_the_host_are_fetched_one_reduction_ahead() -> None:
    with fake_world(2):
        found = traced(wide)
        graph = found.graphs["backward"].graph
        apply(CompressGradients(method=LoCo(error_device="cpu")), found, "backward")
        loads = [node for node in graph.nodes if node.target is torch.ops.zgraph.load_errors.default]
        assert {meta.lane(load) for load in loads} == {HOST_TO_DEVICE}
        order = nodes.order_of(graph)
        first, second = nodes.call_functions(graph, nodes.is_quantize)
        of = {meta.parameters(load): order[load] for load in loads}
        assert max(of.values()) < order[first]
        assert meta.parameters(second) in of and meta.parameters(first) in of


# --- steps and windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [1, 2, *long(0, 3)])  # 0 waits as 1 does, 3 reduces as 2 does
def test_a_window_counts_as_one_step(ranks: Ranks, zero_stage: int) -> None:
    """Stages 0 and 1 reduce, and compress, once per window; 2 and 3 in each of its backwards."""
    assert ranks.run(windows, zero_stage) == [[(3, 3), (3, 3)] if zero_stage < 2 else [(9, 3), (9, 3)]] * 2


def windows(zero_stage: int) -> list[tuple[int, int]]:
    sharded = zgraph.shard(model(), zero_stage=zero_stage)
    call = compiled(sharded, CompressGradients(method=SMALL, min_numel=LEAST))
    for _ in range(3):
        sharded.zero_grad()
        with zgraph.no_sync(sharded):
            for micro in range(2):
                loss_of(call(batch(micro, dist.get_rank()))).backward()
        loss_of(call(batch(2, dist.get_rank()))).backward()
    return [(kept.reductions, kept.steps) for kept in feedbacks(sharded).values()]


def test_a_waiting_gradient_is_compressed_once_with_all_that_waited(ranks: Ranks) -> None:
    ranks.run(accumulated)


def accumulated() -> None:
    sharded = zgraph.shard(model(), zero_stage=1)
    call = compiled(sharded, CompressGradients(method=SMALL, min_numel=LEAST))
    with zgraph.no_sync(sharded):
        loss_of(call(batch(0, dist.get_rank()))).backward()
    loss_of(call(batch(1, dist.get_rank()))).backward()
    grads = []
    for rank in range(2):
        first, second = (local_gradients(model(), batch(step, rank), loss_of)["0.weight"] for step in range(2))
        grads.append(first + second)
    assert_equal("the sum", weight_grad(sharded[0]), OneHop(SMALL, 1).mean(grads, 0))


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_while_it_warms_up_gradients_travel_as_they_are(ranks: Ranks, zero_stage: int) -> None:
    ranks.run(warms_up, zero_stage)


def warms_up(zero_stage: int) -> None:
    """Two steps bitwise equal to no compression, then as if compression had begun with the third."""
    found: list[list[dict[str, Tensor]]] = []
    compress = CompressGradients(method=SMALL, min_numel=LEAST, warmup_steps=2)
    for pipeline in (presets.default(), passes(compress)):
        torch.compiler.reset()
        sharded = zgraph.shard(model(), zero_stage=zero_stage)
        call = with_fx(sharded, passes=zgraph.PassList(pipeline))
        steps = []
        for step in range(4):
            sharded.zero_grad()
            loss_of(call(batch(step, dist.get_rank()))).backward()
            steps.append({name: whole(cast(Tensor, one.grad)) for name, one in sharded.named_parameters()})
        found.append(steps)
    expected = OneHop(SMALL, zero_stage)
    for step in range(4):
        if step < 2:
            for name, exact in found[0][step].items():
                assert_equal(f"{name} in step {step}", found[1][step][name], exact)
        else:
            grads = [local_gradients(model(), batch(step, rank), loss_of)["0.weight"] for rank in range(2)]
            assert_equal(f"step {step}", found[1][step]["0.weight"], expected.mean(grads, step - 2))


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_nan_reaches_every_rank_and_training_goes_on(ranks: Ranks) -> None:
    ranks.run(poisoned)


def poisoned() -> None:
    """Rank 1's second batch is poisoned: its groups arrive as NaN, the errors stay, and the third step is as good."""
    sharded = zgraph.shard(model(), zero_stage=3)
    call = compiled(sharded, CompressGradients(method=SMALL, min_numel=LEAST))
    rank = dist.get_rank()
    for step in range(3):
        sharded.zero_grad()
        inputs = batch(step, rank)
        if step == 1 and rank == 1:
            inputs[0, 0] = math.nan
        before = {name: kept.tensors["error"].clone() for name, kept in feedbacks(sharded).items()}
        loss_of(call(inputs)).backward()
        found = weight_grad(sharded[2])
        if step == 1:
            assert found.isnan().all()
            for name, kept in feedbacks(sharded).items():
                assert torch.equal(kept.tensors["error"], before[name]) == (rank == 1), name
    exact = torch.stack([local_gradients(model(), batch(2, other), loss_of)["2.weight"] for other in range(2)]).mean(0)
    assert ((found - exact).square().sum() / exact.square().sum()).item() < 0.03


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LoCo(bits=3), "bits=3 do not fill whole bytes; write 2, 4 or 8"),
        (lambda: LoCo(group=48), "a group is a power of two from 8 to 1024"),
        (lambda: NoFeedback(group=1), "group=1; a group is a power of two"),
        (lambda: LoCo(group=16), "rotation mixes; write group=32 or more, or rotate=False"),
        (lambda: LoCo(beta=1.0), "beta=1.0"),
        (lambda: LoCo(reset_every=-1), "reset_every=-1"),
        (lambda: LoCo(hops=3), 'hops=3; write 1, 2 or "auto"'),  # type: ignore[arg-type]
        (lambda: LoCo(error_dtype=torch.float16), "write torch.int8 or torch.float32"),
        (lambda: LoCo(error_device="cuda"), 'write None or "cpu"'),
        (lambda: TwoHop(ranks_per_host=0), "ranks_per_host=0"),
        (lambda: CompressGradients(method=4), "is not a compression method"),  # type: ignore[arg-type]
        (lambda: CompressGradients(min_numel=0), "min_numel=0"),
        (lambda: CompressGradients(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: CompressGradients(skip="head.*"), "write a tuple of patterns"),  # type: ignore[arg-type]
        (lambda: CompressGradients(mean_codec=torch.int8), "mean_codec=torch.int8"),
    ],
)
def test_options_that_cannot_be_honoured(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("method", "text"),
    [(LoCo(hops=2), "which ranks share a host"), (TwoHop(ranks_per_host=3), "does not divide the 4")],
)
def test_nodes_that_are_not_known(method: Any, text: str) -> None:
    with fake_world(4), pytest.raises(ValueError, match=text):
        apply(CompressGradients(method=method, min_numel=20), traced(mlp, world=4), "backward")


def test_it_comes_before_the_reductions_are_lowered() -> None:
    with pytest.raises(PreconditionError, match="compress_gradients cannot run after lower_reductions"):
        zgraph.PassList([DedupeGathers(), LowerReductions(), CompressGradients()])


def test_ranks_that_compress_by_different_methods_are_told() -> None:
    """Their payloads have equal sizes: without a word each would decode the other's codes as its own."""
    with fresh_ranks(2) as ranks:
        for said in ranks.run(a_method_for_each):
            assert "different communication" in said and "all_to_all_single u8" in said, said
            assert "LoCo" in said and "NoFeedback" in said, said


def test_ranks_that_warm_up_for_different_steps_are_told() -> None:
    with fresh_ranks(2) as ranks:
        assert all("warm-up" in said for said in ranks.run(a_warm_up_for_each))


def a_method_for_each() -> str:
    method = SMALL if dist.get_rank() == 0 else NoFeedback(group=32)
    return said_by(CompressGradients(method=method, min_numel=LEAST))


def a_warm_up_for_each() -> str:
    return said_by(CompressGradients(method=SMALL, min_numel=LEAST, warmup_steps=2 + dist.get_rank()))


def said_by(compress: CompressGradients) -> str:
    sharded = zgraph.shard(model(), zero_stage=3)
    call = with_fx(sharded, passes=zgraph.PassList(passes(compress)), agreement_timeout_s=5)
    try:
        loss_of(call(batch(0, dist.get_rank()))).backward()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def test_another_method_does_not_take_over_an_error(ranks: Ranks) -> None:
    for text in ranks.run(two_methods):
        assert re.search(r"2\.weight keeps the error of .*LoCo.* and is now compressed by .*LoCo", text), text


def two_methods() -> str:
    """The error of the second method, which each rank raises before it sends anything."""
    sharded = zgraph.shard(model(), zero_stage=3)
    for method in (SMALL, LoCo(group=64)):
        torch.compiler.reset()
        call = compiled(sharded, CompressGradients(method=method, min_numel=LEAST))
        try:
            loss_of(call(batch(0, dist.get_rank()))).backward()
        except zgraph.ZgraphError as error:
            return str(error)
    return "nothing was raised"
