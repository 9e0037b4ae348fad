"""CompressGradients with LowRank: every gradient equals the plain twin's; what is sent and when; what is left alone."""

from __future__ import annotations

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
from tests.support.compressing import feedback_of
from tests.support.graphs import Twice, apply, fake_world, traced
from tests.support.judges.compressed import local_gradients
from tests.support.judges.low_rank import Paper, compile_low_rank
from tests.support.judges.replicated import assert_equal
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.compression.low_rank import LowRank
from zgraph.graph import meta, nodes, operator_arguments
from zgraph.graph.traffic import transfers
from zgraph.passes import BucketCollectives, CompressGradients, LoCo, LowerReductions, SinkWaits, presets

METHOD = LowRank(rank=2, bucket_bytes=9000)  # three buckets of the model below


class Mixed(nn.Module):
    """Matrices whose rows no number of ranks divides, a convolution, and a matrix that is too small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.convolution = nn.Conv1d(5, 19, 3)
        self.layers = nn.Sequential(nn.Linear(19, 31), nn.Tanh(), nn.Linear(31, 37), nn.Tanh(), nn.Linear(37, 31))
        self.again = nn.Sequential(nn.Tanh(), nn.Linear(31, 37), nn.Tanh(), nn.Linear(37, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layers(self.convolution(x).mean(2)))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def compare(
    zero_stage: int,
    replicas: int = 1,
    dtype: torch.dtype | None = None,
    hardware: bool = False,
    method: LowRank = METHOD,
) -> int:
    """Three steps of gradients against the plain twin; returns how many were compressed."""
    world, mesh = dist.get_world_size(), None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    sharded = zgraph.shard(Mixed(), mesh, zero_stage=zero_stage, param_dtype=dtype)
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100")) if hardware else None
    plain, call = Mixed(), compile_low_rank(sharded, method, target=target)
    paper = Paper(method, world, zero_stage, 2 if dtype else 4)
    for step in range(3):
        grads = [local_gradients(plain, batch(step, rank), loss_of, dtype) for rank in range(world)]
        loss_of(call(batch(step, dist.get_rank()))).backward()
        for name, parameter in sharded.named_parameters():
            if paper.covers(parameter.shape) or replicas == 1:  # the order of other sums is not our business here
                expected = paper.mean(name, [found[name] for found in grads])
                assert_equal(f"{name} in step {step}", whole(cast(Tensor, parameter.grad)), expected)
        sharded.zero_grad()
    assert feedback_of(sharded).keys() == paper.errors.keys()
    for name, slots in feedback_of(sharded).items():
        assert_equal(name, slots["first_hop"].tensors["error"], paper.errors[name][dist.get_rank()])
    return len(paper.errors)


# Stages 1 and 2 are those of windows below; test_sent_bytes_are_rank_times_rows_and_columns has stage 0.
@pytest.mark.parametrize("zero_stage", [3, 0, *long(1, 2)])
def test_every_gradient_is_what_the_twin_computes(ranks: Ranks, zero_stage: int) -> None:
    assert ranks.run(compare, zero_stage) == [5 + (zero_stage == 0)] * 2  # replicated, the smallest one pays too


@pytest.mark.parametrize(
    ("zero_stage", "hardware"),
    [(3, False), (0, True), (0, False), (3, True)],
    ids=["3-rules", "0-planned", "0-rules", "3-planned"],
)
@worlds(3)
def test_on_three_ranks(ranks: Ranks, zero_stage: int, hardware: bool) -> None:
    assert ranks.run(compare, zero_stage, 1, None, hardware) == [5 + (zero_stage == 0)] * 3


def test_narrow_gradients_match_the_reference(ranks: Ranks) -> None:
    assert min(ranks.run(compare, 2, 1, torch.bfloat16, False, replace(METHOD, least_saving=1.0))) >= 1


@pytest.mark.parametrize("zero_stage", [3, 0])
def test_replicas_match_the_reference(ranks: Ranks, zero_stage: int) -> None:
    """Hybrid sharding whose shards are whole: factors travel between the replicas."""
    assert min(ranks.run(compare, zero_stage, 2)) >= 4


# --- two exchanges, one after the other -------------------------------------------------------------------------------


def large_factors() -> list[Tensor]:
    """Two steps of one wide matrix on three ranks, whose factors travel in parts and come back."""
    torch.manual_seed(0)
    sharded = zgraph.shard(nn.Linear(70_000, 20, bias=False), zero_stage=2)
    report = zgraph.Report()
    call = compile_low_rank(sharded, LowRank(rank=4), report=report)
    for step in range(2):
        sharded.zero_grad()
        inputs = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss_of(call(inputs)).backward()
    kinds = [one.kind for graph in report.graphs if graph.direction == "backward" for one in graph.transfers]
    return [whole(sharded.weight.grad), torch.tensor(kinds.count("all_to_all_single"))]


@worlds(3)
def test_large_factors_are_reduced_in_parts(ranks: Ranks) -> None:
    (first, exchanges), *others = ranks.run(large_factors)
    assert exchanges == 1, "the right factor alone is worth it"
    assert all(torch.equal(grad, first) for grad, _ in others) and first.isfinite().all()


# --- under Inductor, and beside other features ------------------------------------------------------------------------


def under_inductor(zero_stage: int, autocast: bool) -> list[float]:
    """Trained losses; each rank's gradients equal those of the others, where they are replicated."""
    torch.manual_seed(0)
    sharded = zgraph.shard(Mixed(), zero_stage=zero_stage)
    call = compile_low_rank(sharded, replace(METHOD, least_saving=1.0), lowering="inductor")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    losses: list[float] = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(call(batch(0, dist.get_rank())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(found := loss.detach().clone())
        losses.append(found.item())
    assert feedback_of(sharded)
    for parameter in sharded.parameters() if zero_stage == 0 else ():
        copies = [torch.empty_like(parameter.to_local()) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.to_local().detach())
        assert torch.equal(copies[0], copies[1])
    return losses


# Inductor's C++ compiler takes seconds for each kernel.
@pytest.mark.parametrize(("zero_stage", "autocast"), [(3, False), (0, True), *long((0, False), (3, True))])
def test_training_under_inductor_lowers_the_loss(ranks: Ranks, zero_stage: int, autocast: bool) -> None:
    losses = ranks.run(under_inductor, zero_stage, autocast)[0]
    assert losses[-1] < 0.5 * losses[0], losses


def windows(zero_stage: int) -> list[tuple[int, int]]:
    sharded = zgraph.shard(Mixed(), zero_stage=zero_stage)
    call = compile_low_rank(sharded, METHOD)
    for _ in range(2):
        sharded.zero_grad()
        with zgraph.no_sync(sharded):
            loss_of(call(batch(0, dist.get_rank()))).backward()
        loss_of(call(batch(1, dist.get_rank()))).backward()
    if zero_stage < 2:
        paper = Paper(METHOD, 2, zero_stage)
        for _ in range(2):
            of_ranks = [
                [local_gradients(Mixed(), batch(step, rank), loss_of) for step in range(2)] for rank in range(2)
            ]
            name = "layers.0.weight"
            expected = paper.mean(name, [first[name] + second[name] for first, second in of_ranks])
        assert_equal(name, whole(cast(Tensor, sharded.get_parameter(name).grad)), expected)
    return sorted({(kept["first_hop"].reductions, kept["first_hop"].steps) for kept in feedback_of(sharded).values()})


@pytest.mark.parametrize("zero_stage", [0, 1, *long(2, 3)])  # 2 and 3 as in test_compress_gradients.py
def test_a_window_counts_as_one_step(ranks: Ranks, zero_stage: int) -> None:
    """Stages 0 and 1 reduce the sum of its gradients, 2 and 3 each of them."""
    assert ranks.run(windows, zero_stage) == [[(2, 2)] if zero_stage < 2 else [(4, 2)]] * 2


def warms_up() -> None:
    """Two steps as they are, then as if compression had begun with the third."""
    sharded = zgraph.shard(Mixed(), zero_stage=3)
    call, paper, name = compile_low_rank(sharded, METHOD, warmup_steps=2), Paper(METHOD, 2, 3), "layers.2.weight"
    for step in range(4):
        sharded.zero_grad()
        loss_of(call(batch(step, dist.get_rank()))).backward()
        grads = [local_gradients(Mixed(), batch(step, rank), loss_of)[name] for rank in range(2)]
        expected = (grads[0] + grads[1]) / 2 if step < 2 else paper.mean(name, grads)
        assert_equal(f"step {step}", whole(cast(Tensor, sharded.get_parameter(name).grad)), expected)


def test_while_it_warms_up_gradients_travel_as_they_are(ranks: Ranks) -> None:
    ranks.run(warms_up)


def drops_a_step() -> None:
    """Rank 1's second gradients overflow, so the step is dropped; the error and factor are those of the first."""
    sharded = zgraph.shard(Mixed(), zero_stage=1)
    call = compile_low_rank(sharded, METHOD)
    zgraph.set_loss_scale(sharded, 4.0)
    (4.0 * loss_of(call(batch(0, dist.get_rank())))).backward()
    zgraph.set_loss_scale(sharded, 4.0)
    before = {
        name: {k: v.clone() for k, v in kept["first_hop"].tensors.items()}
        for name, kept in feedback_of(sharded).items()
    }
    inputs = batch(1, dist.get_rank())
    if dist.get_rank() == 1:
        inputs[0, 0] = math.inf
    sharded.zero_grad()
    (4.0 * loss_of(call(inputs))).backward()
    assert whole(cast(Tensor, sharded.get_parameter("layers.0.weight").grad)).isnan().all()
    zgraph.set_loss_scale(sharded, 2.0)
    for name, kept in feedback_of(sharded).items():
        assert torch.equal(kept["first_hop"].tensors["error"], before[name]["error"] / 2), name
        assert torch.equal(kept["first_hop"].tensors["right"], before[name]["right"]), name
        assert kept["first_hop"].steps == 1


def test_dropped_step_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(drops_a_step)


def kept_bytes() -> tuple[int, str]:
    sharded = zgraph.shard(Mixed(), zero_stage=3)
    loss_of(compile_low_rank(sharded, METHOD)(batch(0, 0))).backward()
    covered = [one for one in Mixed().parameters() if Paper(METHOD, 2, 3).covers(one.shape)]
    expected = sum(4 * (one.numel() + 2 * one[0].numel()) for one in covered)
    assert expected == sum(kept["first_hop"].kept_bytes for kept in feedback_of(sharded).values())
    return expected, str(zgraph.explain(sharded))


def test_kept_bytes_are_reported(ranks: Ranks) -> None:
    expected, text = ranks.run(kept_bytes)[0]
    assert f"error feedback: {expected / 1024:.2f} KiB" in text, text


# --- bytes and order --------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])


def low_rank_graph(world: int, zero_stage: int, method: LowRank, build: Any = wide) -> Any:
    found = traced(build, world=world, zero_stage=zero_stage)
    compress = CompressGradients(method=method, min_numel=1)
    for entry in (
        compress,
        LowerReductions(),
        BucketCollectives(bucket_bytes=2**21),
        SinkWaits(reductions_in_flight=3),
    ):
        apply(entry, found, "backward")
    return found.graphs["backward"].graph


@pytest.mark.parametrize(("zero_stage", "world", "rank"), [(0, 2, 1), (3, 2, 4), (3, 3, 2), (0, 3, 2)])
def test_sent_bytes_are_rank_times_rows_and_columns(zero_stage: int, world: int, rank: int) -> None:
    """To each other rank, in fp32, of all six matrices; and one exchange more than there are buckets."""
    with fake_world(world):
        graph = low_rank_graph(world, zero_stage, LowRank(rank=rank, bucket_bytes=2 * 4 * 256 * 256))
        sent = [one for one in transfers(graph) if one.kind == "all_gather_into_tensor"]
        sent = [one for one in sent if one.payload_bytes < 256 * 256]  # stage 3 gathers parameters too
        assert sum(one.sent_bytes for one in sent) == (world - 1) * 4 * rank * 6 * (256 + 256)
        assert len(sent) == 3 + 1
        assert not list(nodes.call_functions(graph, nodes.is_all_to_all))


def test_factors_of_many_ranks_travel_twice_but_in_parts() -> None:
    """2 (N - 1) / N of them, where sending all to all would cost more than it spares."""
    with fake_world(16):
        graph = low_rank_graph(16, 2, LowRank(rank=16, bucket_bytes=2**30))
        sent = [one for one in transfers(graph) if one.dtype == torch.float32]
        factors = 4 * 16 * 6 * (256 + 256)
        reduced = [one for one in sent if one.kind == "all_to_all_single"]
        assert sum(one.sent_bytes for one in reduced) == factors * 15 // 16
        assert len(reduced) == 2


def test_model_products_run_between_exchange_and_wait() -> None:
    with fake_world(2):
        graph = low_rank_graph(2, 2, LowRank(rank=1, bucket_bytes=2 * 4 * 256 * 256))
        order = nodes.order_of(graph)
        starts = [start for start in nodes.call_functions(graph, nodes.is_all_gather) if nodes.gathers_addends(start)]
        products = [order[node] for node in graph.nodes if node.target is torch.ops.aten.mm.default]
        hidden = [
            sum(order[start] < product < order[cast(Any, nodes.wait_of(start))] for product in products)
            for start in starts
        ]
        assert len(hidden) == 4 and min(hidden[:2]) >= 2, hidden  # of the last two nothing is left to compute


def with_bias() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def large_with_bias() -> nn.Module:
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])


def test_no_later_gradient_joins_an_exchange_that_compute_waits_for() -> None:
    """Factors that travel in parts, like biases: these come along where they are there, and never make factors late."""
    with fake_world(16):
        graph = low_rank_graph(16, 0, LowRank(rank=24, bucket_bytes=4 * 512 * 512), large_with_bias)
        named = [meta.parameters(start) for start in nodes.call_functions(graph, nodes.is_all_to_all)]
        kinds = ["".join("b" if name.endswith("bias") else "w" for name in names) for names in named]
        assert all(re.fullmatch("b*w*", kind) for kind in kinds) and kinds.count("bww") >= 2, kinds


def test_a_planned_run_counts_factors() -> None:
    for world in (2, 3):
        passes = presets.default(compression=LowRank(rank=2))
        plan = zgraph.plan(wide, world_size=world, batch=lambda: (torch.zeros(2, 256),), passes=zgraph.PassList(passes))
        gathered = 2 * (world - 1) * 6 * -(-256 // world) * 256 * 4
        factors = (world - 1) * 4 * 2 * 6 * (256 + 256)
        assert abs(plan.sent_bytes - gathered - factors) <= 2 * 256 * 256 * 4, (plan.sent_bytes, gathered, factors)


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_matrices_without_savings_are_sent_uncompressed() -> None:
    with fake_world(2):
        found = traced(with_bias, zero_stage=0)
        assert not apply(CompressGradients(method=LowRank(rank=17), min_numel=1), found, "backward")
        assert "0 of 8 gradients are compressed" in found.ctx.notes[-1][2]
        assert apply(CompressGradients(method=LowRank(rank=16), min_numel=1), found, "backward")
        assert not apply(CompressGradients(method=LowRank(rank=16), min_numel=1, min_dims=1), found, "backward")


def test_a_sharded_gradient_is_sent_once_and_so_pays_less() -> None:
    method = LowRank(rank=9)
    assert method.pays((64, 64), 2 * 4 * 64 * 64) and not method.pays((64, 64), 4 * 64 * 64)
    assert not method.pays((4096,), 2**30)


def test_a_weight_that_is_read_twice_is_compressed_once() -> None:
    with fake_world(2):
        found = traced(Twice, zero_stage=0)
        apply(CompressGradients(method=LowRank(rank=1, least_saving=1.0), min_numel=1), found, "backward")
        graph = found.graphs["backward"].graph
        lefts = [
            operator_arguments.LowRankArgs.of(node) for node in nodes.call_functions(graph, nodes.is_low_rank_left)
        ]
        handles = [handle for args in lefts for handle in args.handles]
        assert len(handles) == len(set(handles)) == 2  # the head's is the other


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LowRank(rank=0), "rank=0; write 1 or more"),
        (lambda: LowRank(least_saving=0.5), "least_saving=0.5; factors that need more bytes"),
        (lambda: LowRank(bucket_bytes=0), "bucket_bytes=0 holds nothing"),
        (lambda: CompressGradients(method=LowRank(), mean_codec=LoCo(bits=8)), "leave mean_codec out"),
    ],
)
def test_options_that_cannot_be_honoured(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
