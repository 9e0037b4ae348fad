"""Replicas on pipeline stages: the sum of all their gradients, one norm, equal bits, and errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

import zgraph
from tests.support.budget import long
from tests.support.graphs import fake_world
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole
from zgraph import passes as P
from zgraph.errors import ZgraphError

CHUNKS = 2
WIDTH = 6


class Chunk(nn.Module):
    """A layer conditioned on an embedding, of which every chunk of a pipeline has its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(5, WIDTH)
        torch.manual_seed(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(x) + self.time(time)), time


def gradient(chunk: Chunk) -> Tensor:
    found = chunk.time.weight.grad
    assert found is not None
    return whole(found)


def pipeline() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))["pp"]


def replicas_of(chunks: Sequence[Chunk], **options: Any) -> zgraph.Replicas:
    return zgraph.Replicas(pipeline(), {"time": [chunk.time for chunk in chunks]}, **options)


# --- sums -----------------------------------------------------------------------------------------------------------


def filled(dtype: torch.dtype) -> list[list[float]]:
    """Gradients of chunk c on rank p hold 10 p + c."""
    chunks = [Chunk(seed).to(dtype) for seed in range(CHUNKS)]
    replicas = replicas_of(chunks)
    for number, chunk in enumerate(chunks):
        chunk.time.weight.grad = torch.full_like(chunk.time.weight, 10 * dist.get_rank() + number)
    replicas.all_reduce_grads()
    return [gradient(chunk).unique().tolist() for chunk in chunks]


@worlds(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_replica_gets_the_sum_of_all(ranks: Ranks, dtype: torch.dtype) -> None:
    """The known answer of Megatron-LM's test, which is 124 on four ranks."""
    expected = float(sum(10 * rank + chunk for rank in range(ranks.world) for chunk in range(CHUNKS)))
    assert ranks.world != 4 or expected == 124
    assert ranks.run(filled, dtype) == [[[expected]] * CHUNKS] * ranks.world


def some_without() -> tuple[list[float], list[bool]]:
    chunks = [Chunk(seed) for seed in range(CHUNKS)]
    both = zgraph.Replicas(
        pipeline().get_group(),
        {
            "time": [chunk.time for chunk in chunks],
            "bias": [] if dist.get_rank() else [nn.Parameter(torch.zeros(3))],
        },
    )
    if dist.get_rank():
        chunks[1].time.weight.grad = torch.ones_like(chunks[1].time.weight)
    both.all_reduce_grads()
    found = [gradient(chunk).unique().item() for chunk in chunks]
    for chunk in chunks:
        chunk.time.weight.grad = None
    both.all_reduce_grads()
    return found, [chunk.time.weight.grad is None for chunk in chunks]


@worlds(2)
def test_missing_gradient_counts_as_zero_or_stays_none(ranks: Ranks) -> None:
    assert ranks.run(some_without) == [([1.0, 1.0], [True, True])] * 2


def tied() -> float | None:
    """Input and output embedding on the first and the last stage."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    held = [nn.Parameter(torch.ones(3, 2))] if rank in (0, last) else []
    replicas = zgraph.Replicas(pipeline(), {"embedding": held})
    for parameter in held:
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    replicas.all_reduce_grads()
    found = [parameter.grad.unique().item() for parameter in held if parameter.grad is not None]
    return found[0] if found else None


@worlds(3)
def test_only_the_ranks_that_hold_a_replica_take_part(ranks: Ranks) -> None:
    assert ranks.run(tied) == [4.0, None, 4.0]


def sharded(zero_stage: int) -> bool:
    """Two stages of two ranks each; every rank of a stage has its part of the gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    chunk = Chunk(mesh.get_local_rank("pp"))
    zgraph.shard(chunk, mesh["dp"], zero_stage=zero_stage)
    replicas = zgraph.Replicas(mesh["pp"], {"time": [chunk.time]})
    inputs = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    times = torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(2))
    own = dist.get_rank()
    chunk(inputs[own], times[own])[0].square().sum().backward()
    replicas.all_reduce_grads()
    expected = torch.zeros(WIDTH, 5)
    for stage in range(2):
        other = Chunk(stage)
        for row in (2 * stage, 2 * stage + 1):
            (other(inputs[row], times[row])[0].square().sum() / 2).backward()
        expected += gradient(other)
    torch.testing.assert_close(gradient(chunk), expected)
    replicas.check_equal()
    return isinstance(chunk.time.weight.grad, DTensor)


@worlds(4)
@pytest.mark.parametrize("zero_stage", range(4))
def test_replicas_may_be_sharded(ranks: Ranks, zero_stage: int) -> None:
    assert ranks.run(sharded, zero_stage) == [True] * 4


# --- training -------------------------------------------------------------------------------------------------------

STEPS, MICRO_BATCHES, MAX_NORM = 3, 4, 0.3


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(8, WIDTH, generator=generator), torch.rand(8, 5, generator=generator)) for _ in range(STEPS)]


def loss_of(output: Any, target: Tensor) -> Tensor:
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def on_one_rank(chunks: int, dp: int) -> tuple[dict[str, Tensor], list[float]]:
    """The same model with one embedding in all chunks."""
    parts = [Chunk(seed) for seed in range(chunks)]
    for part in parts[1:]:
        part.time = parts[0].time
    parameters = list(nn.ModuleList(parts).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    norms: list[float] = []
    for x, time in batches():
        for rows, times in zip(x.chunk(MICRO_BATCHES * dp), time.chunk(MICRO_BATCHES * dp), strict=True):
            for part in parts:
                rows, _ = part(rows, times)
            (rows.square().mean() / (MICRO_BATCHES * dp)).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    values = {f"{number}.weight": part.layer.weight.detach() for number, part in enumerate(parts)}
    return values | {"time": parts[0].time.weight.detach()}, norms


def trained(
    synced: bool, zero_stage: int | None, compile_options: dict[str, Any] | None = None, **shard: Any
) -> tuple[dict[str, Tensor], list[float], list[Tensor]]:
    """Chunks of this rank of two stages, or, sharded and compiled, of its data-parallel part of one."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    rank, world = mesh.get_local_rank("pp"), 2
    numbers = [rank + world * chunk for chunk in range(CHUNKS)]
    chunks = [Chunk(number) for number in numbers]
    if zero_stage is not None:
        for chunk in chunks:
            zgraph.shard(chunk, mesh["dp"], zero_stage=zero_stage, **shard)
    forwards: Any = chunks
    if compile_options is not None:
        forwards = [torch.compile(chunk, backend="zgraph", options=compile_options) for chunk in chunks]
    stages: Any = [  # torch names its list's type for subclasses alone
        zgraph.PipelineStage(forward, number, CHUNKS * world, torch.device("cpu"), group=mesh["pp"].get_group())
        for number, forward in zip(numbers, forwards, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_of)
    replicas = zgraph.Replicas(mesh["pp"], {"time": [chunk.time for chunk in chunks]})
    parameters = list(nn.ModuleList(chunks).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    norms: list[float] = []
    for every_x, every_time in batches():
        x, time = (rows.chunk(mesh.size(1))[mesh.get_local_rank("dp")] for rows in (every_x, every_time))
        # torch 2.12 sends a gradient back for every tensor that a stage passes on.
        first = (x, time.requires_grad_()) if rank == 0 else ()
        more: dict[str, Any] = {"target": x} if rank == world - 1 else {}
        schedule.step(*first, **more)
        if synced:
            replicas.all_reduce_grads()
        norms.append(replicas.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    if synced:
        replicas.check_equal()
    values = {
        f"{number}.weight": whole(chunk.layer.weight).detach() for number, chunk in zip(numbers, chunks, strict=True)
    }
    return values, norms, [whole(chunk.time.weight).detach() for chunk in chunks]


def assert_equals_one_model(found: Sequence[tuple[dict[str, Tensor], list[float], list[Tensor]]], dp: int) -> None:
    expected, norms = on_one_rank(CHUNKS * 2, dp)
    assert max(norms) > MAX_NORM
    for values, found_norms, times in found:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name])
        for time in times:
            torch.testing.assert_close(time, expected["time"])
            assert torch.equal(time, times[0])


@worlds(2)
@pytest.mark.parametrize("zero_stage", [None, 3], ids=["plain", "stage 3"])
def test_a_pipeline_trains_like_one_model_with_one_embedding(ranks: Ranks, zero_stage: int | None) -> None:
    assert_equals_one_model(ranks.run(trained, True, zero_stage), dp=1)


@worlds(4)
@pytest.mark.parametrize("zero_stage", range(4))
def test_stages_may_be_sharded_and_compiled(ranks: Ranks, zero_stage: int) -> None:
    assert_equals_one_model(ranks.run(trained, True, zero_stage, {"lowering": "fx"}), dp=2)


def crossed(name: str) -> tuple[list[Tensor], list[float]]:
    zero_stage, lowering, compressed, shard, _ = CROSSED[name]
    pipeline = P.presets.default(compression=P.LoCo() if compressed else None)
    small = P.CompressGradients(method=P.LoCo(), min_numel=16)
    pipeline = [small if isinstance(one, P.CompressGradients) else one for one in pipeline]
    options: dict[str, Any] = {"lowering": lowering, "passes": zgraph.PassList(pipeline)}
    _, norms, times = trained(True, zero_stage, options, **shard)
    return times, norms


BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
# How far the embedding may end from that of one model, as a part of the way that it went. bf16 rounds by 2^-9 at a
# time; codes of four bits by up to a fifteenth of a group's largest entry, which error feedback makes up for later.
CROSSED: dict[str, tuple[int, str, bool, dict[str, Any], float]] = {
    "stage 3, bf16": (3, "fx", False, BF16, 2**-7),
    "stage 0, LoCo": (0, "fx", True, {}, 1 / 15),
    "stage 2, LoCo, bf16, Inductor": (2, "inductor", True, BF16, 1 / 15),
    "stage 3, Inductor": (3, "inductor", False, {}, 1e-5),
}


@worlds(4)
@pytest.mark.parametrize("name", [*[*CROSSED][:3], *long("stage 3, Inductor")])
def test_replicas_stay_equal_whatever_rounds_their_gradients(ranks: Ranks, name: str) -> None:
    """And near the model with one embedding: gradients lose digits in bf16, and most of them in codes of four bits."""
    *_, bound = CROSSED[name]
    expected, norms = on_one_rank(CHUNKS * 2, 2)
    way = (expected["time"] - Chunk(0).time.weight.detach()).norm()
    for times, found_norms in ranks.run(crossed, name):
        assert found_norms == pytest.approx(norms, rel=bound)
        for time in times:
            assert torch.equal(time, times[0])
            assert (time - expected["time"]).norm() <= bound * way


@worlds(2)
def test_without_the_sum_replicas_drift_apart(ranks: Ranks) -> None:
    times = [time for _, _, found in ranks.run(trained, False, None) for time in found]
    assert all(not torch.equal(time, other) for time in times for other in times if other is not time)


# --- errors ---------------------------------------------------------------------------------------------------------


def built(change: Callable[[int, dict[str, Any]], None], **options: Any) -> str:
    found = {"time": [Chunk(seed).time for seed in range(CHUNKS)]}
    change(dist.get_rank(), found)
    try:
        zgraph.Replicas(pipeline(), found, **options)
    except ZgraphError as error:
        return str(error)
    return f"{found['time'][0].weight.detach().sum().item():.3f}"


def other_name(rank: int, found: dict[str, Any]) -> None:
    if rank:
        found["label"] = found.pop("time")


def other_size(rank: int, found: dict[str, Any]) -> None:
    if rank:
        found["time"][1] = nn.Linear(5, WIDTH + 1)


def frozen(rank: int, found: dict[str, Any]) -> None:
    if rank:
        found["time"][0].requires_grad_(False)


def other_values(rank: int, found: dict[str, Any]) -> None:
    if rank:
        with torch.no_grad():
            found["time"][1].weight[2, 3] += 1


def without_values(rank: int, found: dict[str, Any]) -> None:
    found["time"] = [nn.Linear(5, WIDTH, device="meta")]


def nowhere(rank: int, found: dict[str, Any]) -> None:
    found["time"] = []


@worlds(2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (other_name, "rank 1 of the pipeline names ['label'], rank 0 ['time']; give every rank the same names"),
        (other_size, "time.weight is 7x5, float32 on rank 1 of the pipeline, and 6x5, float32 on rank 0"),
        (frozen, "time.weight is 6x5, float32, frozen on rank 1 of the pipeline, and 6x5, float32 on rank 0"),
        (
            other_values,
            "time.weight on rank 1 of the pipeline differs from its first replica; load or seed",
        ),
        (without_values, "time.weight has no values yet; call zgraph.materialize"),
        (nowhere, "no rank of the pipeline has a replica of 'time'; leave it out"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_non_replica_is_refused_on_all_ranks(
    ranks: Ranks, change: Callable[[int, dict[str, Any]], None], text: str
) -> None:
    for found in ranks.run(built, change):
        assert found.startswith("zgraph.Replicas: ") and text in found


def copied() -> str:
    return built(other_values, copy_first=True)


@worlds(2)
def test_the_first_replica_can_be_copied_to_the_others(ranks: Ranks) -> None:
    first, other = ranks.run(copied)
    assert first == other


@pytest.mark.parametrize("one", [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Parameter(torch.ones(2, 2))])
def test_a_replica_that_is_not_in_a_list_is_refused(one: Any) -> None:
    """Its layers, or rows, are no replicas of one another."""
    with fake_world(2), pytest.raises(ValueError, match=r"'time' is a \w+, and not a list of this rank's replicas"):
        zgraph.Replicas(init_device_mesh("cpu", (2,)), {"time": one}, copy_first=True)


def test_a_mesh_of_several_axes_is_refused() -> None:
    with fake_world(4), pytest.raises(ValueError, match=r"the mesh has 2 axes \('pp', 'dp'\); pass .* mesh\[\"pp\"\]"):
        zgraph.Replicas(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")), {"time": [nn.Linear(2, 2)]})
