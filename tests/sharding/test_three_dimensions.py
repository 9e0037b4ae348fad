"""Pipeline x data parallel x tensor parallel: every gradient, every norm, and the steps that follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zgraph
from tests.support.ranks import Ranks, fresh_ranks, worlds
from tests.support.whole_tensors import whole
from zgraph.sharding.pipeline.weight_backwards import WeightBackwards

WIDTH, CHUNKS, MICRO_BATCHES, STEPS = 8, 4, 4, 3
ROUNDING = 1e-5  # tensor parallelism splits sums, and the mean over ranks comes after that over micro-batches


class Chunk(nn.Module):
    """A stage: columns, rows, and a norm that all tensor-parallel ranks compute; `time` is in all chunks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(1 + number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x) + self.time(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 4 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, y


Trained = tuple[dict[str, Tensor], dict[str, Tensor], list[float]]


def on_one_rank() -> Trained:
    """Clipped gradients of the last step, parameters after it, and norms; one `time` in all chunks."""
    model = nn.Sequential(*[Chunk(number) for number in range(CHUNKS)])
    for chunk in model:
        chunk.time = model[0].time
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: value.detach() for name, value in model.named_parameters()}, norms


def on_a_mesh(dp_size: int, zero_stage: int, mode: str, schedule_name: str = "Interleaved1F1B") -> Trained:
    """Of this rank's chunks, two of each stage; on 2 x dp x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, dp_size, 2), mesh_dim_names=("pp", "dp", "tp"))
    rank, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    numbers = [rank, 3 - rank if schedule_name == "ZBVZeroBubble" else rank + 2]
    make: Any = get_schedule_class(schedule_name)
    chunks = [Chunk(number) for number in numbers]
    stages: list[Any] = []
    for number, chunk in zip(numbers, chunks, strict=True):
        parallelize_module(chunk, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        zgraph.shard(chunk, mesh["dp"], zero_stage=zero_stage)
        called: Any = chunk if mode == "eager" else torch.compile(chunk, backend="zgraph", options={"lowering": mode})
        stages.append(zgraph.PipelineStage(called, number, CHUNKS, torch.device("cpu"), group=mesh.get_group("pp")))
    schedule = make(stages, MICRO_BATCHES, loss_fn=F.mse_loss)
    replicas = zgraph.Replicas(mesh["pp"], {"time": [chunk.time for chunk in chunks]})
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    norms: list[float] = []
    named = list(zip(numbers, chunks, strict=True))
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        x, y = (rows.chunk(dp_size)[dp] for rows in batch(step))
        more: dict[str, Any] = {"target": y} if CHUNKS - 1 in numbers else {}
        schedule.step(*((x,) if rank == 0 else ()), **more)
        replicas.all_reduce_grads()
        norms.append(whole(replicas.clip_grad_norm_(parameters, 0.1)).item())
        pairs = [(f"{number}.{name}", one.grad) for number, c in named for name, one in c.named_parameters()]
        gradients = {name: whole(grad).clone() for name, grad in pairs if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    replicas.check_equal()
    values = {f"{number}.{name}": whole(v).detach() for number, c in named for name, v in c.named_parameters()}
    return gradients, values, norms


def assert_equal_to_one_model(found: list[Trained]) -> None:
    *expected, norms = on_one_rank()
    compared: set[str] = set()
    for *values, found_norms in found:
        assert found_norms == pytest.approx(norms, rel=ROUNDING)
        for here, wanted in zip(values, expected, strict=True):  # gradients, then parameters
            for name, value in here.items():
                one = wanted[name if not name.endswith("time.weight") else "0.time.weight"]
                torch.testing.assert_close(value, one)
            compared |= here.keys()
            assert len(here) == 2 * len(list(Chunk(0).parameters()))
    assert compared >= set(expected[1])


@worlds(4)
@pytest.mark.parametrize(
    ("zero_stage", "mode"),
    [(0, "eager"), (2, "fx"), pytest.param(3, "inductor", marks=pytest.mark.long)],  # a C++ compiler on four ranks
)
def test_pipeline_and_tensor_parallel_train_like_one_model(ranks: Ranks, zero_stage: int, mode: str) -> None:
    assert_equal_to_one_model(ranks.run(on_a_mesh, 1, zero_stage, mode))


def halves_on_a_mesh(zero_stage: int, mode: str, schedule_name: str) -> tuple[Trained, int]:
    """The same, and how many compiled backwards have left their weights for later."""
    left: list[WeightBackwards] = []
    add = WeightBackwards.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightBackwards, "add", lambda one, *args: (left.append(one), add(one, *args)))
        return on_a_mesh(1, zero_stage, mode, schedule_name), len(left)


@worlds(4)
@pytest.mark.parametrize(
    ("zero_stage", "mode", "schedule_name"),
    [
        (2, "fx", "InterleavedZeroBubble"),
        (0, "eager", "InterleavedZeroBubble"),
        (0, "fx", "ZBVZeroBubble"),
        (3, "eager", "ZBVZeroBubble"),
    ],
)
def test_tensor_parallel_stages_run_without_bubble(
    ranks: Ranks, zero_stage: int, mode: str, schedule_name: str
) -> None:
    """No compiled backward is split: it runs whole where the schedule wants the gradients of inputs."""
    found = ranks.run(halves_on_a_mesh, zero_stage, mode, schedule_name)
    assert [left for _, left in found] == [0] * 4
    wanted = ranks.run(on_a_mesh, 1, zero_stage, mode)
    trained = [one for one, _ in found]
    is_v = schedule_name == "ZBVZeroBubble"  # whose ranks have other chunks, and sum replicas and norms in that order
    for *_, norms in trained:
        assert norms == (pytest.approx(wanted[0][2], rel=1e-6) if is_v else wanted[0][2])
    for place in (0, 1):  # gradients, then parameters
        ours, theirs = (
            {name: value for one in of_all for name, value in one[place].items()} for of_all in (trained, wanted)
        )
        assert ours.keys() == theirs.keys() and len(ours) == CHUNKS * len(list(Chunk(0).parameters()))
        for name, one in ours.items():
            assert torch.allclose(one, theirs[name], rtol=1e-5, atol=1e-6) if is_v else torch.equal(one, theirs[name])


@pytest.mark.parametrize(
    ("zero_stage", "mode"),
    [
        (1, "eager"),  # eight ranks
        pytest.param(3, "fx", marks=pytest.mark.long),  # all of which compile
    ],
)
def test_three_dimensions_train_like_one_model(zero_stage: int, mode: str) -> None:
    with fresh_ranks(8, timeout_s=120) as ranks:
        assert_equal_to_one_model(ranks.run(on_a_mesh, 2, zero_stage, mode))
