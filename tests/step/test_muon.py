"""Muon by owners: the bits of one rank, an equal share of the work for each rank, and few bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations

import zgraph
from tests.support import muon
from tests.support.graphs import Keep
from tests.support.muon import Case, Training, Twin, differences, relative, ulps
from tests.support.ranks import Ranks, RanksPool, worlds
from tests.support.whole_tensors import whole
from zgraph.graph import nodes
from zgraph.graph.traffic import transfers_of
from zgraph.runtime.owned_matrices import assign_owners, newton_schulz_flops, plan_buckets
from zgraph.torch_compat.groups import fake_world

P = zgraph.passes
H100 = zgraph.Hardware.preset("h100")
BF16 = {"param_dtype": torch.bfloat16}
STEPS = 5  # of Newton-Schulz

EQUAL = {
    "stage 3": Case(),
    "stage 2, four micro-batches": Case(stage=2, k=4, clips=True),
    "stage 1, bf16, four under no_sync": Case(stage=1, shard=BF16, k=4, waits=True),
    "stage 0, autocast": Case(stage=0, autocast=True, k=2),
    "stage 0, planned": Case(stage=0, target=zgraph.Target(hardware=H100)),
    "planned, many buckets": Case(target=zgraph.Target(hardware=H100), bucket_bytes=64, autocast=True),
    "a budget": Case(target=zgraph.Target(hardware=H100, budget_bytes=60_000), shard=BF16, bucket_bytes=64),
    "interleaved, many buckets": Case(preset={"interleave_micro_batches": True}, k=4, bucket_bytes=64),
    "compressed": Case(preset={"compression": P.LoCo()}, stage=2, bucket_bytes=64),
    "other options": Case(muon={"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}, clips=True),
    "at rest on the host": Case(shard={"offload": zgraph.Offload(params="host", optimizer="host")}),
    "a layer of each rank's own": Case(ignores=True, bucket_bytes=64),
    "a layer of each rank's own, plain lines": Case(ignores=True, captured=False, stage=0),
    "plain lines": Case(captured=False, k=2),
    "plain lines, stage 0": Case(captured=False, stage=0, clips=True),
}


@worlds(2)
@pytest.mark.parametrize("name", EQUAL)
def test_results_are_those_of_one_rank(ranks: Ranks, name: str) -> None:
    assert ranks.run(differences, EQUAL[name]) == [{}] * ranks.world


@worlds(1, 3)
@pytest.mark.parametrize("name", ["stage 2, four micro-batches", "stage 0, autocast", "planned, many buckets"])
def test_the_number_of_ranks_does_not_matter(ranks: Ranks, name: str) -> None:
    assert ranks.run(differences, EQUAL[name]) == [{}] * ranks.world


@worlds(4)
@pytest.mark.parametrize("stage", [3, 0])
def test_replicas_of_shards_compute_the_same(ranks: Ranks, stage: int) -> None:
    assert ranks.run(differences, Case(stage=stage, replicas=2, bucket_bytes=64)) == [{}] * 4


@worlds(2)
def test_state_on_disk(ranks: Ranks, tmp_path: Path) -> None:
    case = Case(shard={"offload": zgraph.Offload(optimizer="disk", path=tmp_path)})
    assert ranks.run(differences, case) == [{}] * 2


# torch rounds the sum of bf16 weights and a transposed update differently from that with a contiguous one.
@worlds(2)
def test_bf16_weights_are_rounded_once_more(ranks: Ranks) -> None:
    assert max(ranks.run(ulps, Case(dtype=torch.bfloat16))) <= 2


# Newton-Schulz rounds to bf16: gradients that are nearly equal give updates that are within a few percent.
@worlds(2)
@pytest.mark.parametrize(
    ("case", "other"),
    [
        (Case(stage=2, lowering="inductor", autocast=True), None),  # compiles C++
        (Case(k=1), Case(k=4)),
        (Case(k=4, waits=True), Case(k=4, preset={"interleave_micro_batches": True})),
    ],
    ids=["inductor", "accumulation", "interleaved"],
)
def test_updates_from_nearly_equal_gradients_are_close(ranks: Ranks, case: Case, other: Case | None) -> None:
    assert max(ranks.run(relative, case, other)) < 0.02


def saved(path: Path) -> Path:
    training = Training(Case())
    training.train(0)
    return zgraph.save_checkpoint(path, training.model, [training.muon, training.adamw], step=1)


def resumed(path: Path, stage: int) -> list[str]:
    """Matrices that differ from the twin's after the next step of a resumed run."""
    training = Training(Case(stage=stage))
    zgraph.load_checkpoint(path, training.model, [training.muon, training.adamw])
    training.plain = training.values()
    twin = Twin(training)
    for name, one in training.matrices.items():
        momentum = whole(training.muon.state[one]["momentum_buffer"]).clone()
        twin.muon.state[twin.matrices[name]]["momentum_buffer"] = momentum
    twin.step(training.train(1))
    return different(training, twin)


@worlds(3)
@pytest.mark.parametrize("stage", [2, 0])
def test_another_number_of_ranks_resumes(pool: RanksPool, ranks: Ranks, tmp_path: Path, stage: int) -> None:
    path = pool.of(2).run(saved, tmp_path)[0]
    assert ranks.run(resumed, path, stage) == [[]] * 3


def with_new_options(captured: bool) -> list[str]:
    """Matrices that differ from the twin's where every option changes between steps."""
    training = Training(Case(captured=captured))
    twin = Twin(training)
    for number in range(4):
        for optimizer in (training.muon, twin.muon):
            for group in optimizer.param_groups:
                group |= {
                    "lr": 0.01 * (1 + number),
                    "weight_decay": 0.1 * number,
                    "momentum": 0.9 + 0.01 * number,
                    "ns_coefficients": (3.0, -4.0, 2.0) if number == 2 else (3.4445, -4.7750, 2.0315),
                    "eps": 10.0 if number == 3 else 1e-7,
                    "nesterov": number != 1,
                }
        twin.step(training.train(number))
    return different(training, twin)


@worlds(2)
@pytest.mark.parametrize("captured", [True, False])
def test_options_may_change_between_steps(ranks: Ranks, captured: bool) -> None:
    assert ranks.run(with_new_options, captured) == [[], []]


def different(training: Training, twin: Twin) -> list[str]:
    found = training.values()
    return [name for name, one in twin.matrices.items() if not torch.equal(found[name], one)]


def with_a_hook() -> list[str]:
    """A hook before the step halves gradients; registered after `step_on_shards`."""
    training = Training(Case(captured=False))
    twin = Twin(training)

    def halve(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(0.5)

    training.muon.register_step_pre_hook(halve)
    for number in range(2):
        twin.step(training.train(number))  # which returns the halved gradients
    return different(training, twin)


def with_state_of_one_rank(captured: bool) -> list[str]:
    """The state dict is that of a Muon without ranks."""
    training = Training(Case(captured=captured))
    twin = Twin(training)
    twin.step({name: torch.ones_like(one) for name, one in twin.matrices.items()})
    training.muon.load_state_dict(twin.muon.state_dict())
    for name, one in twin.matrices.items():
        one.data.copy_(training.plain[name])
    twin.step(training.train(0))
    return different(training, twin)


@worlds(2)
def test_hooks_before_a_plain_step_come_first(ranks: Ranks) -> None:
    assert ranks.run(with_a_hook) == [[], []]


@worlds(2)
@pytest.mark.parametrize("captured", [True, False])
def test_state_of_one_rank_is_loaded(ranks: Ranks, captured: bool) -> None:
    assert ranks.run(with_state_of_one_rank, captured) == [[], []]


# --- refused, or stepped on DTensors


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize(("tied", "named"), [(False, r"embed\.weight and head\.weight"), (True, r"embed\.weight,")])
def test_embeddings_and_heads_are_refused_by_name(tied: bool, named: str) -> None:
    with fake_world(2):
        model = zgraph.shard(Language(tied=tied))
        every = optim.Muon([one for one in model.parameters() if one.ndim == 2])
        with pytest.raises(ValueError, match=f"Muon steps {named}.*embeddings_by_muon"):
            zgraph.training_step(model, every)
        zgraph.training_step(model, every, options={"embeddings_by_muon": True})
        zgraph.training_step(model, optim.Muon([model.hidden.weight]))


def test_an_embedding_whose_weight_is_computed_is_no_obstacle() -> None:
    with fake_world(2):
        model = nn.Sequential(parametrizations.weight_norm(nn.Embedding(11, 8)), nn.Linear(8, 8))
        zgraph.training_step(zgraph.shard(model), optim.Muon([model[1].weight]))


def split_by_tensor_parallelism() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 36, bias=False), nn.Tanh(), nn.Linear(36, 24, bias=False))
    before = [one.detach().clone() for one in model.parameters()]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    zgraph.shard(model, mesh["dp"])
    opt = optim.Muon(model.parameters(), lr=0.02)

    @zgraph.training_step(model, opt, options={"lowering": "fx"})
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        opt.step()

    step(torch.randn(64, 24, generator=torch.Generator().manual_seed(dist.get_rank() // 2)))
    plain = [nn.Parameter(one.clone()) for one in before]
    for one, found in zip(plain, model.parameters(), strict=True):
        one.grad = found.grad.full_tensor()  # type: ignore[union-attr]
    optim.Muon(plain, lr=0.02).step()
    found = [one.full_tensor() for one in model.parameters()]  # type: ignore[operator]
    pairs = zip(found, plain, before, strict=True)
    return [((one - right).norm() / (right - old).norm()).item() for one, right, old in pairs]


@worlds(4)
def test_matrices_split_by_tensor_parallelism_are_stepped_on_dtensors(ranks: Ranks) -> None:
    for shares in ranks.run(split_by_tensor_parallelism):
        assert max(shares) < 0.05  # DTensor sums parts of products in bf16


# --- the work, the bytes, the order


def gpt(layers: int, width: int) -> list[tuple[int, int]]:
    """Shapes of the matrices of a GPT, in the order in which gradients arrive."""
    return [(width, 4 * width), (4 * width, width), (width, width), (3 * width, width)] * layers


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_share_the_work(world: int) -> None:
    shapes = gpt(12, 64)
    whole_work = sum(newton_schulz_flops(*shape, STEPS) for shape in shapes)
    loads, sent = [0] * world, 0
    for bucket in plan_buckets(shapes, world, is_sharded=True, least_numel=64 * 64 * 12, steps=STEPS):
        for member, owner in zip(bucket.members, bucket.layout.owners, strict=True):
            loads[owner] += newton_schulz_flops(*shapes[member], STEPS)
        sent += world * world * bucket.layout.part_numel
    assert sum(loads) == whole_work
    assert sent <= 4 / 3 * sum(rows * columns for rows, columns in shapes)  # all parts are as long as the longest
    assert max(loads) <= 1.2 * whole_work / world


def test_the_largest_matrices_get_owners_first() -> None:
    assert assign_owners([1, 8, 4, 3], [1, 8, 4, 3], [0, 0]) == [1, 0, 1, 1]
    assert assign_owners([1, 1], [1, 1], [5, 0]) == [1, 1]


def kept_step(case: Case) -> dict[str, Any]:
    keep = Keep()
    muon.graph_of(case, [keep])
    return described(keep.kept["step"].graph)


def described(graph: fx.Graph) -> dict[str, Any]:
    """Bytes of the exchanges of matrices, and the order of all collectives and of the owners' work by name."""
    starts = list(nodes.call_functions(graph, nodes.is_collective))
    exchanges = [start for start in starts if nodes.is_for_owners(nodes.sent_by(start)[0])]
    order = [node.name for node in graph.nodes if node in starts or nodes.is_for_owners(node)]
    return {"sent": sum(one.sent_bytes for start in exchanges for one in transfers_of(start)), "order": order}


@worlds(2)
def test_rows_travel_once_each_way_in_bf16(ranks: Ranks) -> None:
    numel = sum(one.numel() for one in muon.Layers().parameters() if one.ndim == 2)
    for found in ranks.run(kept_step, Case(bucket_bytes=64)):
        assert numel <= found["sent"] <= 1.5 * numel  # half of half the rows, twice; some are padded
    for found in ranks.run(kept_step, Case(stage=0, bucket_bytes=64)):
        assert numel <= found["sent"] <= 2 * numel  # half of the results; parts are as long as the longest


@worlds(2)
def test_a_bucket_is_computed_when_the_next_is_on_its_way(ranks: Ranks) -> None:
    # Each gradient is reduced by itself.
    for found in ranks.run(kept_step, Case(bucket_bytes=64, preset={"bucket_bytes": 1})):
        place = {name: number for number, name in enumerate(found["order"])}
        assert place["all_to_all_momenta_1"] < place["orthogonalize_0"]
        assert place["all_to_all_momenta_0"] < place["all_to_all_layers_0_weight"]  # backward has not ended
