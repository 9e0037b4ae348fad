"""Golden texts of the passes: a small graph before and after each, in tests/passes/golden/PASS.txt.

    python -m tests.support.golden        # writes them anew; read the difference before you commit it

A case of a pass is one entry of CASES. Its file shows the graph it gets, the graph it leaves, and its notes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zgraph
from tests.support.costs import cost_of
from tests.support.graphs import Traced, apply, fake_world, traced
from zgraph.analysis.hardware import Link
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext, Phase
from zgraph.compiler.pass_list import PassList
from zgraph.compression.method_text import to_text
from zgraph.graph import meta
from zgraph.graph.edits import copy_of
from zgraph.graph.text import graph_text
from zgraph.passes import (
    BucketCollectives,
    ChooseLifetimes,
    CompressGradients,
    DedupeGathers,
    FuseAttention,
    FuseUpdates,
    HoistStarts,
    InterleaveMicroBatches,
    LoCo,
    LowerGathers,
    LowerReductions,
    LowRank,
    NoFeedback,
    OffloadActivations,
    OrthogonalizeOnOwners,
    QuantizeGathers,
    ReadCodes,
    RecomputeActivations,
    ScheduleCopies,
    ScheduleOverlap,
    SignMomentum,
    SinkWaits,
    SplitUpdates,
    StreamStates,
    UpdateAsReduced,
)
from zgraph.torch_compat.aot import aot_autograd

FOLDER = Path(__file__).resolve().parents[1] / "passes" / "golden"

SLOW_COPIES = replace(
    zgraph.Hardware.preset("cpu"),
    host_to_device=Link(latency_us=150.0, bytes_per_us=20.0),
    device_to_host=Link(latency_us=150.0, bytes_per_us=20.0),
)


def one() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False))


def uneven() -> nn.Module:
    """Three rows over two ranks: the second shard is padded."""
    return nn.Sequential(nn.Linear(4, 3, bias=False))


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def three() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])


class Shared(nn.Module):
    """Reads its one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass on one graph of a model that is sharded over two ranks.

    Attributes:
        about: what the graph is, and what becomes of it.
        before: passes of phase "graph" that have run.
        zero_stage: of all parameters.
        costed: whether the pass plans by `tests.support.costs.cost_of`.
    """

    about: str
    graph_pass: GraphPass
    build: Callable[[], nn.Module] = two
    direction: Direction = "forward"
    before: tuple[GraphPass, ...] = ()
    zero_stage: int = 3
    costed: bool = False

    def texts(self) -> tuple[str, str]:
        """The graph before, and the graph after with the notes of the pass."""
        with fake_world(2):
            found = traced(self.build, self.before, zero_stage=self.zero_stage)
            if self.direction == "joint":
                found.graphs["joint"] = found.captured
            if self.costed:
                found.know(cost_of=cost_of)
            return _around(self.graph_pass, found, self.direction)


@dataclass(frozen=True, kw_only=True)
class Unsharded:
    """One pass on the inference graph of a function, with operators taken apart as for Inductor.

    Attributes:
        about: what the graph is, and what becomes of it.
    """

    about: str
    graph_pass: GraphPass
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    def texts(self) -> tuple[str, str]:
        """The graph before, and the graph after with the notes of the pass."""
        kept: list[fx.GraphModule] = []

        def keep(gm: fx.GraphModule, _: Any = None) -> Any:
            kept.append(copy_of(gm))
            return gm.forward

        torch.compiler.reset()
        backend = aot_autograd(
            compile_forward=keep, compile_backward=keep, compile_inference=keep, partition=None, decompose=True
        )
        torch.compile(self.function, backend=backend)(*self.inputs)
        (captured,) = kept
        found = Traced(captured, {"inference": captured}, PassContext(direction="inference", decomposed=True))
        return _around(self.graph_pass, found, "inference")


@dataclass(frozen=True, kw_only=True)
class OfStep:
    """One pass on the whole training step of a model that is sharded over two ranks.

    Attributes:
        about: what the graph is, and what becomes of it.
        before: passes that have run.
        build: the model; three layers.
        clips: whether gradients are clipped before the update.
        foreach: whether the update is one call for all parameters.
        fused: whether it is a kernel of torch's for all of them.
        at_rest: where parameters and optimizer state rest.
        target: what passes plan for, if they do.
        calls: of the step; the last graph is shown.
        micro_batches: forwards and backwards before the update.
        zero_stage: the stage.
        muon, adamw: whether Muon or a fused AdamW takes the place of SGD.
    """

    about: str
    graph_pass: GraphPass
    before: tuple[GraphPass, ...]
    build: Callable[[], nn.Module] = three
    clips: bool = False
    foreach: bool = True
    fused: bool = False
    at_rest: zgraph.Offload | None = None
    target: zgraph.Target | None = None
    calls: int = 1
    micro_batches: int = 1
    zero_stage: int = 3
    muon: bool = False
    adamw: bool = False

    def texts(self) -> tuple[str, str]:
        """The graph before, and the graph after."""
        with fake_world(2):
            model = zgraph.shard(self.build(), zero_stage=self.zero_stage, offload=self.at_rest)
            many = {"fused": True} if self.fused else {"foreach": self.foreach}
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **many)
            if self.muon:
                optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
            if self.adamw:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

            def step(x: Tensor) -> None:
                for _ in range(self.micro_batches):
                    model(x).sum().backward()
                if self.clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
                optimizer.step()
                optimizer.zero_grad()

            texts: list[str] = []
            shown = Shown(texts=texts) if self.graph_pass.phase == "graph" else ShownJoint(texts=texts)
            pipeline = PassList([*self.before, shown, self.graph_pass, shown], target=self.target)
            whole = zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})(step)
            for _ in range(self.calls):
                whole(torch.zeros(2, 4))
        before, after = texts[-2:]
        return before, "unchanged\n" if before == after else after


@dataclass(frozen=True, kw_only=True)
class Shown(GraphPass):
    """Changes nothing; keeps the graph's text."""

    texts: list[str]

    name: ClassVar[str] = "shown"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        self.texts.append(_text(gm.graph))
        return False


@dataclass(frozen=True, kw_only=True)
class ShownJoint(Shown):
    """The same, among passes of phase "joint"."""

    phase: ClassVar[Phase] = "joint"


def _around(graph_pass: GraphPass, found: Traced, direction: Direction) -> tuple[str, str]:
    gm = found.graphs[direction]
    before = _text(gm.graph)
    apply(graph_pass, found, direction)
    notes = [f"note: {text}\n" for _, _, text in found.ctx.notes]
    after = _text(gm.graph)
    return before, ("unchanged\n" if after == before else after) + "".join(notes)


def _text(graph: fx.Graph) -> str:
    """A line for each node, with what the partitioner is told of it."""
    lines = graph_text(graph).splitlines()
    marks = [
        " [recompute]" if meta.is_tagged_recompute(node) else " [save]" if meta.is_tagged_saved(node) else ""
        for node in graph.nodes
    ]
    return "".join(f"{line}{mark}\n" for line, mark in zip(lines, marks, strict=True))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1) / 2, -1) @ v


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / 2) @ v


FOUR_BITS = to_text(NoFeedback(bits=4, group=64))


def table_of(codes: Tensor) -> Tensor:
    """Four rows of 64, decoded."""
    return torch.ops.zgraph.dequantize_shards(codes, FOUR_BITS, 256, 0, 1, torch.float32).view(4, 64)


def tied(ids: Tensor, codes: Tensor) -> Tensor:
    return F.embedding(ids, table_of(codes)) @ table_of(codes).t()


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))


def gated() -> nn.Module:
    return Between(lambda x: F.silu(x) * x)


def rectified() -> nn.Module:
    return Between(F.relu)


HEADS = tuple(torch.zeros(1, 2, 3, 4) for _ in range(3))
LOWERED = (LowerGathers(), LowerReductions())
IN_ONE_BUCKET = (*LOWERED, BucketCollectives(bucket_bytes=1 << 20))
BUCKETED = (*LOWERED, BucketCollectives(bucket_bytes=64))

CASES: tuple[Case | OfStep | Unsharded, ...] = (
    Case(
        about="a weight that is read twice: one gather, one reduction",
        graph_pass=DedupeGathers(),
        build=Shared,
        direction="joint",
    ),
    Case(about="two weights, each read once", graph_pass=DedupeGathers(), direction="joint"),
    Case(about="stage 3: backward gathers again", graph_pass=ChooseLifetimes(), direction="joint"),
    Case(about="stage 2: what was gathered is saved", graph_pass=ChooseLifetimes(), direction="joint", zero_stage=2),
    Case(about="four rows over two ranks", graph_pass=LowerGathers(), build=one),
    Case(about="three rows over two ranks: padding is cut off", graph_pass=LowerGathers(), build=uneven),
    Case(about="stage 3: each rank receives its rows", graph_pass=LowerReductions(), build=one, direction="backward"),
    Case(
        about="stage 0: and then they are gathered",
        graph_pass=LowerReductions(),
        build=one,
        direction="backward",
        zero_stage=0,
    ),
    Case(
        about="two gathers become one",
        graph_pass=BucketCollectives(bucket_bytes=1 << 20),
        before=LOWERED,
    ),
    Case(
        about="two reductions become one",
        graph_pass=BucketCollectives(bucket_bytes=1 << 20),
        direction="backward",
        before=LOWERED,
    ),
    Case(
        about="codes of four bits, with error feedback",
        graph_pass=CompressGradients(method=LoCo(group=32), min_numel=1),
        build=one,
        direction="backward",
    ),
    Case(
        about="factors of rank 1",
        graph_pass=CompressGradients(method=LowRank(rank=1), min_numel=1),
        build=one,
        direction="backward",
        zero_stage=0,
    ),
    Case(
        about="codes of eight bits travel",
        graph_pass=QuantizeGathers(method=NoFeedback(bits=8, group=32), min_numel=1),
        build=one,
    ),
    Case(
        about="a matrix that is too small",
        graph_pass=QuantizeGathers(method=NoFeedback(bits=8, group=32)),
        build=one,
    ),
    Case(about="waits stand before their readers already", graph_pass=SinkWaits(), before=LOWERED),
    Case(
        about="reductions end late, one in flight",
        graph_pass=SinkWaits(reductions_in_flight=1),
        build=three,
        direction="backward",
        before=LOWERED,
    ),
    Case(
        about="gathers start one ahead",
        graph_pass=HoistStarts(prefetch=1),
        build=three,
        before=(*LOWERED, SinkWaits()),
    ),
    Case(
        about="and so in backward",
        graph_pass=HoistStarts(prefetch=1),
        build=three,
        direction="backward",
        before=(*LOWERED, SinkWaits(reductions_in_flight=1)),
    ),
    Case(about="gathers hide under products", graph_pass=ScheduleOverlap(), before=LOWERED, costed=True),
    Case(
        about="reductions hide under products",
        graph_pass=ScheduleOverlap(),
        direction="backward",
        before=LOWERED,
        costed=True,
    ),
    OfStep(
        about="a gated layer: backward computes a factor again",
        graph_pass=RecomputeActivations(least_bytes=0),
        before=(DedupeGathers(),),
        build=gated,
    ),
    OfStep(
        about="what a matrix product reads is kept",
        graph_pass=RecomputeActivations(least_bytes=0),
        before=(DedupeGathers(),),
        build=rectified,
    ),
    OfStep(
        about="two micro-batches share the gathers of three weights, and one reduction of each gradient",
        graph_pass=InterleaveMicroBatches(),
        before=(DedupeGathers(),),
        micro_batches=2,
    ),
    OfStep(
        about="there is one micro-batch",
        graph_pass=InterleaveMicroBatches(),
        before=(DedupeGathers(),),
    ),
    OfStep(
        about="signs of momenta, whose mean updates the weight by AdamW with a frozen second moment",
        graph_pass=CompressGradients(method=SignMomentum(warmup=1, group=8), min_numel=1),
        before=(DedupeGathers(), LowerGathers()),
        build=one,
        clips=True,
        adamw=True,
    ),
    OfStep(about="one call updates three weights", graph_pass=SplitUpdates(), before=LOWERED),
    OfStep(about="one reduction, one update", graph_pass=SplitUpdates(), before=IN_ONE_BUCKET),
    OfStep(
        about="each update goes behind its reduction",
        graph_pass=UpdateAsReduced(),
        before=(*LOWERED, SplitUpdates(), SinkWaits(reductions_in_flight=1)),
    ),
    OfStep(
        about="all gradients are clipped by their norm: norms are taken early",
        graph_pass=UpdateAsReduced(),
        before=(*LOWERED, SplitUpdates(), SinkWaits(reductions_in_flight=1)),
        clips=True,
    ),
    OfStep(
        about="three weights, whose gradients arrive together, are updated by one call",
        graph_pass=FuseUpdates(),
        before=(*IN_ONE_BUCKET, SplitUpdates()),
        foreach=False,
    ),
    OfStep(
        about="gradients arrive one by one: each weight is updated when its own is there",
        graph_pass=FuseUpdates(),
        before=(*LOWERED, SplitUpdates()),
        foreach=False,
    ),
    OfStep(
        about="two weights rest on the host: each gather and each update reads a copy, which is written back",
        graph_pass=StreamStates(updates="streamed"),
        before=(*LOWERED, SplitUpdates(), SinkWaits(reductions_in_flight=1), HoistStarts(), UpdateAsReduced()),
        build=two,
        at_rest=zgraph.Offload(params="host"),
    ),
    OfStep(
        about="everything rests on the device",
        graph_pass=StreamStates(),
        before=(*LOWERED, SplitUpdates()),
        build=one,
    ),
    OfStep(
        about="copies of three weights start earlier than one use ahead, for their link is slow",
        graph_pass=ScheduleCopies(),
        before=(*LOWERED, SplitUpdates(), ScheduleOverlap(), StreamStates(updates="streamed")),
        at_rest=zgraph.Offload(params="host"),
        target=zgraph.Target(hardware=SLOW_COPIES),
    ),
    OfStep(
        about="everything rests on the device",
        graph_pass=ScheduleCopies(),
        before=(*LOWERED, SplitUpdates(), ScheduleOverlap(), StreamStates()),
        build=one,
        target=zgraph.Target(hardware=SLOW_COPIES),
    ),
    OfStep(
        about="each of two ranks gets the rows of one matrix, and computes it",
        graph_pass=OrthogonalizeOnOwners(bucket_bytes=2),
        before=LOWERED,
        build=two,
        muon=True,
    ),
    OfStep(
        about="stage 0: owners return whole matrices",
        graph_pass=OrthogonalizeOnOwners(bucket_bytes=2),
        before=LOWERED,
        build=two,
        zero_stage=0,
        muon=True,
    ),
    Case(
        about="what forward saves leaves for the host where it is made",
        graph_pass=OffloadActivations(least_bytes=1),
        build=three,
    ),
    OfStep(
        about="backward reads what has come back",
        graph_pass=OffloadActivations(least_bytes=1),
        before=(DedupeGathers(), ChooseLifetimes()),
    ),
    OfStep(
        about="activations are too small to be worth a copy",
        graph_pass=OffloadActivations(),
        before=(DedupeGathers(), ChooseLifetimes()),
    ),
    Unsharded(about="attention by hand", graph_pass=FuseAttention(), function=by_hand, inputs=HEADS),
    Unsharded(about="no attention: no softmax", graph_pass=FuseAttention(), function=without_softmax, inputs=HEADS),
    Unsharded(
        about="a table that is looked up and multiplied",
        graph_pass=ReadCodes(),
        function=tied,
        inputs=(torch.tensor([0, 2]), torch.zeros(144, dtype=torch.uint8)),
    ),
    Unsharded(
        about="a product without a transpose, after a cast",
        graph_pass=ReadCodes(),
        function=lambda x, codes: x.bfloat16() @ table_of(codes).bfloat16(),
        inputs=(torch.ones(2, 4), torch.zeros(144, dtype=torch.uint8)),
    ),
    Unsharded(
        about="a product that doubles the bias needs decoded weights",
        graph_pass=ReadCodes(),
        function=lambda x, codes: torch.addmm(torch.ones(4), x, table_of(codes).t(), beta=2),
        inputs=(torch.ones(2, 64), torch.zeros(144, dtype=torch.uint8)),
    ),
)


def golden_text(name: str) -> str:
    """All cases of the pass of this name, as its file is to read."""
    parts: list[str] = []
    for case in CASES:
        if case.graph_pass.name == name:
            before, after = case.texts()
            parts.append(f"== {case.about}\n-- before\n{before}-- after\n{after}")
    return "\n".join(parts)


def difference(name: str) -> str:
    """What the cases of a pass have become, as a diff against its file; "" where they are the same."""
    path = FOLDER / f"{name}.txt"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = golden_text(name).splitlines(keepends=True)
    return "".join(difflib.unified_diff(lines, found, f"golden/{name}.txt", "now"))


PASSES = tuple(dict.fromkeys(case.graph_pass.name for case in CASES))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in PASSES:
        (FOLDER / f"{name}.txt").write_text(golden_text(name))


if __name__ == "__main__":
    main()
