"""Compiled backwards in halves: the bits of whole ones, reductions with the weights, and what runs whole instead."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.fx.experimental.proxy_tensor import make_fx

import zgraph
from tests.support.graphs import Drawing, names_of
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph import passes as P
from zgraph.graph.split_graph import split_graph
from zgraph.runtime.groups import OF_REDUCTIONS
from zgraph.sharding.pipeline.weight_backwards import WeightBackwards, way_through
from zgraph.torch_compat.collectives import grouped_gather_op, wait_op

WIDTH, MICRO_BATCHES, STEPS = 8, 4, 2
SPLIT = "InterleavedZeroBubble"


class Chunk(nn.Module):
    """Residual; "broken" is two compiled functions, and "outside" has a layer between them that is not compiled."""

    def __init__(self, number: int, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.unread = nn.Linear(WIDTH, WIDTH)  # its gradient is None
        self.middle = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(x)))
        if self.kind == "broken":
            torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        call: Any = torch.compiler.disable(called) if self.kind == "outside" else called
        return x + self.down(call(self.middle, inner))


def called(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@dataclass(frozen=True)
class Row:
    """Two ranks that hold two stages each, or one stage each with two data-parallel ranks."""

    zero_stage: int
    lowering: Literal["fx", "inductor"] = "fx"
    dp: int = 1
    kind: Literal["", "broken", "outside", "ran", "mixed"] = ""
    autocast: bool = False
    compression: Any = None
    warmup_steps: int = 0

    @property
    def options(self) -> dict[str, Any]:
        if self.compression is None:
            return {"lowering": self.lowering}
        small = P.CompressGradients(method=self.compression, min_numel=16, warmup_steps=self.warmup_steps)
        passes = P.presets.default(compression=self.compression)
        passes = [small if isinstance(one, P.CompressGradients) else one for one in passes]
        return {"lowering": self.lowering, "passes": zgraph.PassList(passes)}


class Run:
    """This rank's stages under a schedule."""

    def __init__(self, row: Row, schedule: str) -> None:
        ranks = dist.get_world_size() // row.dp
        self.mesh = init_device_mesh("cpu", (ranks, row.dp), mesh_dim_names=("pp", "dp"))
        rank, count = self.mesh.get_local_rank("pp"), 2 * ranks
        make: Any = get_schedule_class(schedule)
        self.numbers = [rank, count - 1 - rank] if schedule.startswith("ZBV") else [rank, rank + ranks]
        self.chunks = [Chunk(number, row.kind) for number in self.numbers]
        self.last, self.row = count - 1, row
        self.stages = [self.stage(number, chunk) for number, chunk in zip(self.numbers, self.chunks, strict=True)]
        self.schedule = make(self.stages, MICRO_BATCHES, loss_fn=lambda output, y: F.mse_loss(output.float(), y))
        parameters = [one for chunk in self.chunks for one in chunk.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def stage(self, number: int, chunk: Chunk) -> Any:
        is_mixed = self.row.kind == "mixed"
        chunk.up.requires_grad_(not is_mixed)
        ignored = [chunk.norm] if is_mixed else []
        zgraph.shard(chunk, self.mesh["dp"], zero_stage=self.row.zero_stage, ignored=ignored)
        compiled: Any = torch.compile(chunk, backend="zgraph", options=self.row.options)
        if self.row.kind == "ran":  # whose backward nobody has foreseen to split
            compiled(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            chunk.zero_grad()
        group = self.mesh.get_group("pp")
        return zgraph.PipelineStage(compiled, number, self.last + 1, torch.device("cpu"), group=group)

    def step(self, index: int) -> dict[str, Tensor]:
        """Gradients of a step, and parameters behind it."""
        dp_rank = self.mesh.get_local_rank("dp")
        x, y = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(10 * index + dp_rank))
        more: dict[str, Any] = {"target": y} if self.last in self.numbers else {}
        with torch.autocast("cpu", torch.bfloat16) if self.row.autocast else contextlib.nullcontext():
            self.schedule.step(*((x,) if 0 in self.numbers else ()), **more)
        found = {
            f"{number}.{name}.grad": whole(one.grad)
            for number, chunk in zip(self.numbers, self.chunks, strict=True)
            for name, one in chunk.named_parameters()
            if one.grad is not None
        }
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found | {
            f"{number}.{name}": whole(one.detach()).clone()
            for number, chunk in zip(self.numbers, self.chunks, strict=True)
            for name, one in chunk.named_parameters()
        }


def trained(row: Row, schedule: str) -> tuple[list[dict[str, Tensor]], list[str]]:
    """What each step yields on this rank, and what it does in the last one, in order."""
    run = Run(row, schedule)
    steps = [run.step(index) for index in range(STEPS - 1)]
    done: list[str] = []
    send, add = dist.ProcessGroup.send, WeightBackwards.add
    backward, weights = zgraph.PipelineStage.backward_one_chunk, zgraph.PipelineStage.backward_weight_one_chunk

    def sends(group: dist.ProcessGroup, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        if group.group_name.endswith(OF_REDUCTIONS):
            done.append("reduce")
        return send(group, tensors, dst, tag)

    def begins(stage: Any, chunk: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        done.append("backward" if full_backward else "inputs of the first" if stage.is_first else "inputs")
        backward(stage, chunk, *args, full_backward=full_backward, **kwargs)

    def leaves(left: WeightBackwards, *args: Any) -> None:
        done.append("leave")
        add(left, *args)

    def ends(stage: Any, chunk: int, **kwargs: Any) -> None:
        done.append("weights")
        weights(stage, chunk, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "send", sends)
        patch.setattr(zgraph.PipelineStage, "backward_one_chunk", begins)
        patch.setattr(zgraph.PipelineStage, "backward_weight_one_chunk", ends)
        patch.setattr(WeightBackwards, "add", leaves)
        steps.append(run.step(STEPS - 1))
    return steps, done


def on_all(ranks: Ranks, row: Row, schedule: str) -> tuple[list[dict[str, Tensor]], list[list[str]]]:
    """The same of all ranks; those of one stage agree."""
    found = ranks.run(trained, row, schedule)
    steps = [dict(item for rank, _ in found for item in rank[index].items()) for index in range(STEPS)]
    return steps, [done for _, done in found]


def assert_same_bits(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), f"{name} in step {step}"


def assert_bits_of_whole_backwards(ranks: Ranks, row: Row, schedule: str) -> list[list[str]]:
    found, done = on_all(ranks, row, schedule)
    wanted, _ = on_all(ranks, row, "Interleaved1F1B")
    assert_same_bits(found, wanted)
    return done


# Two compiles of two stages each, with one lowering after the other: half a minute on a busy machine.
@pytest.mark.parametrize(
    ("row", "schedule"),
    [
        (Row(2, dp=2), SPLIT),
        (Row(0, "inductor"), SPLIT),
        (Row(3, "inductor", dp=2), SPLIT),
        (Row(1, kind="broken", autocast=True), SPLIT),
        (Row(0, dp=2, compression=P.LoCo()), SPLIT),
        (Row(3, dp=2, compression=P.LoCo(), warmup_steps=1), SPLIT),
        (Row(3), "ZBVZeroBubble"),
        (Row(1, dp=2, kind="mixed"), SPLIT),
    ],
    ids=str,
)
def test_halves_have_the_bits_of_whole_backwards(ranks: Ranks, row: Row, schedule: str) -> None:
    for done in assert_bits_of_whole_backwards(ranks, row, schedule):
        frames = 2 if row.kind == "broken" else 1
        assert done.count("leave") == frames * done.count("inputs") > 0
        before = [one for one, two in pairwise(done) if two == "reduce"]
        assert set(before) <= {"weights", "reduce"}
        assert before or row.dp == 1 or row.zero_stage == 0  # which has no group for reductions alone


@pytest.mark.parametrize("kind", ["ran", "outside"])
def test_unsplittable_backward_runs_whole(ranks: Ranks, kind: Any) -> None:
    """Gradients that come out of no compiled function, and what was compiled before anybody wanted halves."""
    for done in assert_bits_of_whole_backwards(ranks, Row(3, dp=2, kind=kind), SPLIT):
        assert "leave" not in done and {one for one, two in pairwise(done) if two == "reduce"} >= {"inputs"}


# --- the parts ------------------------------------------------------------------------------------------------------


def graph_of(function: Any, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function)(*inputs)


def test_a_graph_is_split_by_what_outputs_need() -> None:
    def backward(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        inner = grad * torch.cos(x)
        return [inner @ weight.t(), x.t() @ inner, torch.sin(weight)]

    x, weight, grad = torch.randn(3, 4), torch.randn(4, 4), torch.randn(3, 4)
    gm = graph_of(backward, x, weight, grad)
    halves = split_graph(gm, [1, 2])
    assert halves is not None
    assert (halves.early, halves.late, halves.outputs) == ((0,), (1, 2), 3)
    assert (halves.first_inputs, halves.second_inputs) == ((0, 1, 2), (0, 1))
    wanted = backward(x, weight, grad)
    early, inner = halves.first(x, weight, grad)
    assert torch.equal(early, wanted[0])
    for value, other in zip(halves.second(x, weight, inner), wanted[1:], strict=True):
        assert torch.equal(value, other)
    counts = [
        len(part.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
        for part in (halves.first, halves.second)
    ]
    assert counts == [1, 1]


def test_collective_is_awaited_in_the_half_that_starts_it() -> None:
    """Both results of one launch, of which the second is read in the other half alone."""
    drawing = Drawing()
    shards = [drawing.input(name, 2) for name in ("early", "late")]
    start = drawing.call(grouped_gather_op(), shards, 2, drawing.group_name)
    waits = [drawing.call(wait_op(), drawing.call(operator.getitem, start, place)) for place in range(2)]
    gm = drawing.done(*(drawing.call(torch.ops.aten.neg.default, wait) for wait in waits))
    halves = split_graph(gm, [1])
    assert halves is not None
    assert len(halves.first.graph.find_nodes(op="call_function", target=wait_op())) == 2
    assert names_of(halves.second.graph) == ["neg_default_1"]


def test_graph_with_writes_across_halves_stays_whole() -> None:
    def backward(x: Tensor, weight: Tensor) -> list[Tensor]:
        early = x * 2
        late = weight + x
        x.add_(1)
        return [early, late, weight * x]

    assert split_graph(graph_of(backward, torch.randn(2), torch.randn(2)), [1, 2]) is None


def test_a_way_leads_through_compiled_functions_alone() -> None:
    """Without them it is torch's own affair; and what parameters get elsewhere would be lost."""
    x, weight = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    assert way_through([x * weight], [x]) is None
    compiled: Any = torch.compile(lambda x, weight: x * weight, backend="aot_eager")
    way = way_through([compiled(x, weight)], [x])
    assert way is not None and len(way.readers) == 1 and not WeightBackwards(way).is_complete
    assert way_through([compiled(x, weight) * 2], [x]) is not None
    assert way_through([compiled(x, weight) * weight], [x]) is None
    assert way_through([compiled(x, weight), weight * 2], [x]) is None
    assert way_through([compiled(weight, weight)], [x]) is None
