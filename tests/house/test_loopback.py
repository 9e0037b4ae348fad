"""Compiled steps on a loopback group: collectives come late, freed memory is poison, and order is judged.

What eager markers compute on a group whose collectives are complete at once is what everything else must compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support import models
from tests.support.judges.happens_before import HappensBefore, judging
from tests.support.memory.allocations import poisoned
from zgraph.codegen.lower_fx import lower_fx
from zgraph.graph import nodes
from zgraph.passes import BucketCollectives, CompressGradients, LoCo, NoFeedback, presets
from zgraph.torch_compat.collectives import all_gather_op, all_to_all_op, grouped_gather_op, reduce_scatter_op, wait
from zgraph.torch_compat.groups import resolve_group

aten = torch.ops.aten
WORLD = 4
NAME = "0"


@pytest.fixture(autouse=True)
def no_file_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a group is taken for NCCL's, collectives are numbered in a file beside the flight recorder's dump."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dump"))


# --- the group itself -------------------------------------------------------------------------------------------------


def test_every_rank_sends_what_this_one_sends() -> None:
    for rank in (0, 2):
        with loopback(WORLD, Wire(), rank):
            x = torch.arange(8.0)
            own = x[2 * rank : 2 * rank + 2]
            splits = [2] * WORLD
            assert torch.equal(wait(all_gather_op()(x, WORLD, NAME)), x.repeat(WORLD))
            for one, shard in zip(grouped_gather_op()([x, x + 1], WORLD, NAME), (x, x + 1), strict=True):
                assert torch.equal(wait(one), shard.repeat(WORLD))
            assert torch.equal(wait(all_to_all_op()(x, splits, splits, NAME)), own.repeat(WORLD))
            assert torch.equal(wait(reduce_scatter_op()(x, "sum", WORLD, NAME)), 4 * own)
            assert torch.equal(wait(reduce_scatter_op()(x, "avg", WORLD, NAME)), own)
            summed, largest, said = x.clone(), x.clone(), x.clone()
            dist.all_reduce(summed)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            dist.broadcast(said, src=3)
            dist.barrier()
            assert torch.equal(summed, 4 * x) and torch.equal(largest, x) and torch.equal(said, x)
            with pytest.raises(ValueError, match=rf"rank {rank} sends itself 2 rows.*\[1, 2, 2, 3\]"):
                all_to_all_op()(x, [1, 2, 2, 3], splits, NAME)


@pytest.mark.parametrize(("backend", "beside"), [("loopback", "reductions"), ("nccl", "gathers")])
def test_groups_made_from_it_are_loopbacks_too(backend: str, beside: str) -> None:
    """And are taken for what the wire says."""
    with loopback(WORLD, Wire(backend=backend)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
        zgraph.shard(torch.nn.Linear(4, 4), mesh)
        local = mesh.get_group("local").group_name
        for name, ranks in ((NAME, 4), (local, 2), (f"{local}.{beside}", 2)):
            assert resolve_group(name).size() == ranks
            assert zgraph.runtime.groups.group_backend(name, torch.device("cpu")) == backend


def test_collective_is_complete_only_when_awaited() -> None:
    """The second of one group brings the first one along; that of another group stays away."""
    x = torch.ones(2)
    with loopback(WORLD, Wire()):
        dist.new_group(list(range(WORLD)))
        first, second, other = (all_gather_op()(x, WORLD, name) for name in (NAME, NAME, "1"))
        assert first.isnan().all() and second.isnan().all() and other.isnan().all()
        wait(second)
        assert first.eq(1).all() and second.eq(1).all() and other.isnan().all()
        wait(first), wait(other)
        assert other.eq(1).all()
        x.fill_(2)
        third = all_gather_op()(x, WORLD, NAME)
        x.fill_(3)  # too early: what is sent is read as late as it may be
        assert wait(third).eq(3).all()


# --- compiled steps ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """Two steps of training.

    Attributes:
        zero_stage: of all parameters.
        micro_batches: of a step, all but the last under no_sync.
        replicas: of each shard.
        rank: which one this process is.
        compression, gather_compression: for the preset; small parameters are compressed, too.
        gathers: for BucketCollectives.
        lowering: None: eager markers.
        model: what is trained.
    """

    zero_stage: int = 3
    micro_batches: int = 1
    replicas: int = 1
    rank: int = 0
    compression: Any = None
    gather_compression: Any = None
    gathers: Any = "auto"
    lowering: str | None = "fx"
    model: Callable[[], torch.nn.Module] = models.Uneven

    def pipeline(self) -> zgraph.PassList:
        """With buckets so small that several are in flight."""
        passes = presets.default(compression=self.compression, gather_compression=self.gather_compression)
        edited: list[Any] = []
        for each in passes:
            if isinstance(each, BucketCollectives):
                each = BucketCollectives(bucket_bytes=256, gathers=self.gathers)
            elif isinstance(each, CompressGradients):
                each = CompressGradients(method=each.method, min_numel=1)
            edited.append(each)
        return zgraph.PassList(edited)

    def __call__(self, wire: Wire) -> list[Tensor]:
        """Losses, gradients and parameters of each step."""
        found: list[Tensor] = []
        torch.compiler.reset()
        with loopback(WORLD, wire, self.rank):
            shape = (self.replicas, WORLD // self.replicas)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local")) if self.replicas > 1 else None
            torch.manual_seed(0)
            model = zgraph.shard(self.model(), mesh, zero_stage=self.zero_stage)
            shards = [parameter.detach().to_local() for parameter in model.parameters()]  # pyright: ignore
            for shard in shards:  # rank 0 scatters, and no other has anything to scatter
                shard.copy_(torch.randn(shard.shape) / 3)
            called: Any = model
            if self.lowering is not None:
                options = {"lowering": self.lowering, "passes": self.pipeline()}
                called = torch.compile(model, backend="zgraph", options=options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
            for _ in range(2):
                for micro in range(self.micro_batches):
                    waits = micro < self.micro_batches - 1
                    with zgraph.no_sync(model) if waits else contextlib.nullcontext():
                        loss = called(torch.randn(3, 6)).square().mean()
                    loss.backward()
                    found.append(loss.detach())
                found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                found += [shard.clone() for shard in shards]
        return found

    def judged(self, backend: str = "loopback") -> tuple[list[Tensor], HappensBefore]:
        """The same, while everything that could go wrong does."""
        with pytest.MonkeyPatch.context() as patch, poisoned():
            judge = judging(patch)
            return self(Wire(backend=backend, watcher=judge)), judge

    def at_once(self, **changes: Any) -> list[Tensor]:
        """The same, where nothing is late."""
        return replace(self, **changes)(Wire(when="started", poisons=False))


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected) > 10
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert not other.isnan().any() and torch.equal(one, other), number


LOCO = LoCo(hops=1)


# Each costs two or three seconds: it compiles a model once or twice.
@pytest.mark.parametrize(
    "run",
    [
        Run(zero_stage=0),
        Run(zero_stage=1, micro_batches=2, gathers="flat"),
        Run(zero_stage=2, micro_batches=2, gathers="coalesced"),
        Run(zero_stage=3, gathers="coalesced"),
        Run(zero_stage=3, micro_batches=2, rank=3, gathers="flat"),
        Run(zero_stage=3, gathers="sequential"),
        Run(zero_stage=3, replicas=2),
    ],
    ids=["0", "1-window-coalesced", "2-window-grouped", "3-grouped", "3-window-rank3", "3-sequential", "3-hybrid"],
)
@pytest.mark.parametrize("backend", ["loopback", "nccl"])
def test_late_results_are_waited_for(run: Run, backend: str) -> None:
    """On "nccl" with its own reduce_scatter and one launch for a group of gathers."""
    found, judge = run.judged(backend)
    assert judge.races == []
    # Which rank sums an element of a replicated gradient is up to its bucket, and here each rank sends something else.
    sums_elsewhere = run.zero_stage == 0 or run.replicas > 1
    assert_equal(found, run.at_once() if sums_elsewhere else run.at_once(lowering=None))


@pytest.mark.parametrize(
    "run",
    [
        Run(zero_stage=3, compression=LOCO, gather_compression=NoFeedback(bits=8)),
        Run(zero_stage=1, micro_batches=2, compression=LOCO),
        Run(zero_stage=0, compression=LOCO),
        Run(zero_stage=3, compression=LoCo(), replicas=2),
    ],
    ids=["3-coded-gathers", "1-window", "0", "3-hybrid"],
)
def test_codes_that_are_late_are_waited_for(run: Run) -> None:
    """Kernels that work in place among them."""
    found, judge = run.judged()
    assert judge.races == []
    assert_equal(found, run.at_once())


# Each compiles islands: ten seconds where the cache is cold.
@pytest.mark.parametrize(
    "run",
    [
        Run(lowering="inductor", gathers="coalesced"),
        Run(lowering="inductor", zero_stage=1, micro_batches=2, compression=LOCO),
    ],
    ids=["3-grouped", "1-window-LoCo"],
)
def test_islands_wait_too(run: Run) -> None:
    found, judge = run.judged("nccl" if run.compression is None else "loopback")
    assert judge.races == [] and judge.islands > 0
    assert_equal(found, run.at_once())


# --- the judge: planted bugs ------------------------------------------------------------------------------------------


def with_bug(patch: pytest.MonkeyPatch, plant: Callable[[fx.Graph], None]) -> None:
    """Plant a bug into each final graph, behind the verifier's back."""

    def lower(gm: fx.GraphModule, *args: Any) -> Any:
        gm = fx.GraphModule(gm, gm.graph)
        plant(gm.graph)
        return lower_fx(gm, *args)

    patch.setattr("zgraph.driver.lower.lower_fx", lower)


def forget_a_wait(graph: fx.Graph) -> None:
    found = next(nodes.call_functions(graph, nodes.is_wait))
    found.replace_all_uses_with(nodes.start_of(found))
    graph.erase_node(found)


def wait_at_the_end(graph: fx.Graph) -> None:
    found = next(nodes.call_functions(graph, nodes.is_wait))
    found.replace_all_uses_with(nodes.start_of(found), delete_user_cb=lambda user: user is not found)
    graph.output_node().prepend(found)


def overwrite_what_is_sent(graph: fx.Graph) -> None:
    found = next(start for start in nodes.call_functions(graph, nodes.is_start) if nodes.is_all_to_all(start))
    with graph.inserting_after(found):
        graph.call_function(aten.zero_.default, (found.args[0],))


def in_backward_only(plant: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    def run(graph: fx.Graph) -> None:
        if any(nodes.is_all_to_all(node) for node in graph.nodes):
            plant(graph)

    return run


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (forget_a_wait, r"reads what all_gather \d+ fills before it was waited for"),
        (wait_at_the_end, r"reads what all_gather \d+ fills before it was waited for"),
        (overwrite_what_is_sent, r"aten.zero_ writes what all_to_all \d+ sends before it was waited for"),
    ],
)
def test_the_judge_sees_a_planted_bug(plant: Callable[[fx.Graph], None], said: str) -> None:
    """In backward. Its results are wrong as well, as the bug does its worst."""
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        with_bug(patch, in_backward_only(plant))
        found, judge = run.judged()
    assert any(re.search(said, race) for race in judge.races), judge.races
    expected = run.at_once(lowering=None)
    assert any(not torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def by_address(sent: list[Tensor]) -> list[Tensor]:
    """The same memory, and nothing that keeps it: a group that forgets to hold what it sends."""
    found: list[Tensor] = []
    for tensor in sent:
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        found.append(torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape))
    return found


def test_the_judge_sees_what_is_freed_while_it_is_sent() -> None:
    """And what arrives then is poison."""
    run = Run(micro_batches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.benchmarks.loopback.held", by_address)
        found, judge = run.judged()
    assert any("sends was freed before it was waited for" in race for race in judge.races), judge.races
    assert any(tensor.isnan().any() for tensor in found)


def test_freed_memory_is_poison_and_must_stay_so() -> None:
    def leave_behind() -> Tensor:
        (gone,) = by_address([torch.ones(5)])
        return gone

    with poisoned():
        assert torch.empty(3).isnan().all() and leave_behind().isnan().all()
    with pytest.raises(AssertionError, match="20 bytes were written after they had been freed"), poisoned():
        leave_behind().zero_()


def test_unawaited_collective_is_reported_at_program_end() -> None:
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    started = graph.call_function(all_gather_op(), (shard, WORLD, NAME))
    graph.output((started,))
    with pytest.MonkeyPatch.context() as patch:
        judge = judging(patch)
        with loopback(WORLD, Wire(watcher=judge)):
            lower_fx(fx.GraphModule({}, graph))([torch.ones(2)])
    assert judge.races == ["all_gather 0 of a program that has ended was not waited for"]
