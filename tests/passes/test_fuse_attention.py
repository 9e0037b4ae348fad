"""Attention written by hand becomes scaled_dot_product_attention: results as near, without its probabilities."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support.graphs import fake_world
from tests.support.hash_seeds import HashSeeds
from tests.support.judges.replicated import Case, Replicated, batches
from tests.support.memory.allocations import counted
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph import PassList, PreconditionError
from zgraph.analysis.liveness import step_curve
from zgraph.codegen.lower_fx import lower_fx
from zgraph.compiler.graph_pass import Direction, GraphPass, PassContext
from zgraph.compiler.partition import JointSplit
from zgraph.graph import nodes
from zgraph.passes import ChooseLifetimes, DedupeGathers, FuseAttention, presets
from zgraph.torch_compat.aot import aot_autograd

aten = torch.ops.aten
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default
FUSED_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Scored = Callable[[Tensor], Tensor]


def divided(scores: Tensor) -> Tensor:
    return scores / math.sqrt(8)


def multiplied(scores: Tensor) -> Tensor:
    return scores * 8**-0.5


def masked(scores: Tensor) -> Tensor:
    return scores / math.sqrt(8) + scores.new_full(scores.shape[-2:], -1e4).triu(1)


class Attention(nn.Module):
    """Two heads of eight; no operator of torch's that computes attention.

    Args:
        scored: what becomes of the scores before they are normalised.
        dropout: of the probabilities.
        returns_heads: without a projection: [batch, head, length, 8].
    """

    def __init__(self, scored: Scored = divided, *, dropout: float = 0.0, returns_heads: bool = False) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, 48)
        self.output = nn.Linear(16, 7)
        self.scored, self.dropout, self.returns_heads = scored, dropout, returns_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, 8).transpose(1, 2) for part in self.inputs(x).split(width, 2))
        shares = F.dropout(self.scored(q @ k.transpose(-2, -1)).softmax(-1), self.dropout, self.training)
        mixed = shares @ v
        return mixed if self.returns_heads else self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class Checkpointed(nn.Module):
    """Attention that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attention, torch.tanh(x), use_reentrant=False)


class Mixed(nn.Module):
    """Products and exponentials that are not attention."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ x.transpose(-2, -1)).exp() / 9) @ x


# --- graphs -----------------------------------------------------------------------------------------------------------


@dataclass
class Decomposed:
    """Compiles a module as the lowering "inductor" does, and runs its graphs node by node, without a C++ compiler.

    Attributes:
        pipeline: whose joint passes run; every node is replayed after them.
        graphs: by direction, as they are run.
        changed: what each pass said of itself.
        notes: of the passes.
    """

    pipeline: PassList = field(default_factory=lambda: PassList([FuseAttention()], replay_all=True))
    graphs: dict[Direction, fx.GraphModule] = field(default_factory=dict[Direction, fx.GraphModule])
    changed: list[bool] = field(default_factory=list[bool])
    notes: list[Any] = field(default_factory=list[Any])
    decomposed: bool = True
    user_outputs: int = 0

    def compile(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        torch.compiler.reset()
        backend = aot_autograd(
            compile_forward=lambda gm, _: self._run("forward", gm),
            compile_backward=lambda gm, _: self._run("backward", gm),
            compile_inference=lambda gm, _: self._run("inference", self._passed("inference", gm)),
            partition=self._partition,
            decompose=True,
        )
        return torch.compile(module, backend=backend)

    def _partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.user_outputs = kwargs["num_fwd_outputs"]
        return JointSplit(inputs, kwargs).of(self._passed("joint", joint))

    def _passed(self, direction: Direction, gm: fx.GraphModule) -> fx.GraphModule:
        ctx = PassContext(decomposed=self.decomposed)
        ran = self.pipeline.run("joint", ctx, {direction: gm}, lambda *_: None)
        self.changed += [run.changed for run in ran]
        self.notes += ctx.notes
        return gm

    def _run(self, direction: Direction, gm: fx.GraphModule) -> Any:
        self.graphs[direction] = gm
        return lower_fx(gm)

    def calls(self, direction: Direction, target: Any) -> int:
        return len(list(nodes.call_functions(self.graphs[direction].graph, lambda node: node.target is target)))


def results(
    call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """The output, and the gradients of all parameters and of the input."""
    x = x.detach().requires_grad_()
    with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        output = call(x)
    return [output, *torch.autograd.grad(output.float().square().sum(), [*module.parameters(), x])]


def inputs(dtype: torch.dtype = torch.float32, batch: int = 3, length: int = 6) -> Tensor:
    return torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (found - expected).float().norm() <= bound * expected.float().norm()


@pytest.mark.parametrize(("scored", "batch"), [(divided, 1), (divided, 3), (masked, 1), (masked, 3), (multiplied, 1)])
def test_it_is_fused_both_ways_and_computes_the_same(scored: Scored, batch: int) -> None:
    torch.manual_seed(0)
    module, tracer, x = Attention(scored), Decomposed(), inputs(batch=batch)
    for found, expected in zip(results(tracer.compile(module), module, x), results(module, module, x), strict=True):
        assert_near(found, expected, 1e-5)
    assert tracer.changed == [True]
    assert tracer.calls("forward", FUSED) == tracer.calls("backward", FUSED_BACKWARD) == 1
    assert not tracer.calls("forward", aten.exp.default) + tracer.calls("backward", aten.bmm.default)


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_narrow_numbers_stay_as_near_as_they_were(precision: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    module, tracer, x = Attention().to(dtype), Decomposed(), inputs(dtype)
    autocast = torch.bfloat16 if precision == "autocast" else None
    compiled, expected = tracer.compile(module), results(module, module, x, autocast)
    for one, other in zip(results(compiled, module, x, autocast), expected, strict=True):
        assert_near(one, other, 3e-2)
    assert tracer.calls("forward", FUSED) == tracer.calls("backward", FUSED_BACKWARD) == 1


@pytest.mark.parametrize("returns_heads", [False, True])
def test_outputs_keep_the_strides_they_were_traced_with(returns_heads: bool) -> None:
    """The fused operator puts heads behind positions; whoever gets its result as it is gets a copy."""
    torch.manual_seed(0)
    module, tracer, x = Attention(returns_heads=returns_heads), Decomposed(), inputs()
    found, expected = tracer.compile(module)(x), module(x)
    assert_near(found, expected, 1e-5)
    assert tracer.calls("forward", FUSED) == 1
    assert tracer.calls("forward", aten.clone.default) == returns_heads  # the projection reads what the operator wrote


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_is_fused_where_nothing_trains(dropout: float) -> None:
    """Dropout that is off is none."""
    torch.manual_seed(0)
    module, tracer, x = Attention(masked, dropout=dropout).eval(), Decomposed(), inputs()
    with torch.no_grad():
        assert_near(tracer.compile(module)(x), module(x), 1e-5)
    assert tracer.calls("inference", FUSED) == 1


def test_probabilities_are_neither_saved_nor_held() -> None:
    """Length 64 in heads of 8: eight times the bytes of a head."""
    torch.manual_seed(0)
    module, x, length = Attention(), inputs(length=64), 64
    scores = 3 * 2 * length * length
    peaks: list[int] = []
    for pipeline in (PassList([]), PassList([FuseAttention()], replay_all=True)):
        tracer = Decomposed(pipeline)
        results(tracer.compile(module), module, x)
        forward, backward = tracer.graphs["forward"].graph, tracer.graphs["backward"].graph
        saved = [out for out in nodes.returned_by(forward) if isinstance(out, fx.Node)]
        assert any(out.meta["val"].numel() == scores for out in saved) == (not pipeline.passes)
        peaks.append(step_curve(forward, backward, user_outputs=tracer.user_outputs).peak_bytes)
    assert peaks[1] <= peaks[0] - 4 * scores


def test_a_checkpointed_block_computes_it_again() -> None:
    torch.manual_seed(0)
    module, tracer, x = Checkpointed(), Decomposed(), inputs()
    for found, expected in zip(results(tracer.compile(module), module, x), results(module, module, x), strict=True):
        assert_near(found, expected, 1e-5)
    assert tracer.calls("forward", FUSED) == tracer.calls("backward", FUSED) == 1
    assert tracer.calls("backward", FUSED_BACKWARD) == 1


def test_a_batch_of_another_size_is_fused_too() -> None:
    torch.manual_seed(0)
    module, tracer = Attention(), Decomposed()
    compiled = tracer.compile(module)
    for batch in (2, 3, 5):
        x = inputs(batch=batch)
        for found, expected in zip(results(compiled, module, x), results(module, module, x), strict=True):
            assert_near(found, expected, 1e-5)
    assert tracer.changed == [True, True]  # one graph for the first size, one for all others


@pytest.mark.parametrize(
    ("build", "decomposed", "note"),
    [
        (lambda: Attention(dropout=0.5), True, "0 fused"),
        (Mixed, True, "0 fused"),
        (lambda: nn.Linear(16, 7), True, "no attention is written by hand"),
        (Attention, False, "results are to be those of eager torch bit for bit"),
    ],
)
def test_near_misses_are_left_alone(build: Callable[[], nn.Module], decomposed: bool, note: str) -> None:
    """Dropout that trains, other products, none, and a lowering that promises eager torch's bits."""
    module, tracer = build(), Decomposed(decomposed=decomposed)
    tracer.compile(module)(inputs().requires_grad_())
    assert tracer.changed == [False]  # and the pipeline has proved it
    assert tracer.notes == [("fuse_attention", "joint", note)]


def test_with_the_fx_lowering_it_does_nothing_and_says_so() -> None:
    torch.manual_seed(0)
    module, report = Attention(), zgraph.Report()
    pipeline = PassList([FuseAttention(), *presets.default()])
    options = {"lowering": "fx", "passes": pipeline, "report": report}
    compiled = torch.compile(module, backend="zgraph", options=options)
    for found, expected in zip(results(compiled, module, inputs()), results(module, module, inputs()), strict=True):
        assert torch.equal(found, expected)
    assert "fuse_attention on joint: results are to be those of eager torch bit for bit" in report.notes


def test_a_second_run_changes_nothing() -> None:
    tracer = Decomposed(PassList([FuseAttention(), FuseAttention()], replay_all=True))
    results(tracer.compile(module := Attention()), module, inputs())
    assert tracer.changed == [True, False]


@pytest.mark.parametrize("passes", [presets.default(), presets.planned()], ids=["default", "planned"])
def test_it_is_in_no_preset(passes: list[GraphPass]) -> None:
    """In bf16 it makes a step slower on CPU: whoever wants it puts it first."""
    target = zgraph.Target(hardware=zgraph.Hardware.preset("h100"))
    assert FuseAttention() not in passes
    assert PassList([FuseAttention(), *passes], target=target).passes[0] == FuseAttention()


def test_it_comes_before_lifetimes_are_chosen() -> None:
    with pytest.raises(PreconditionError, match="fuse_attention cannot run after choose_lifetimes"):
        PassList([DedupeGathers(), ChooseLifetimes(), FuseAttention()])


PROGRAM = """
import torch
from tests.passes.test_fuse_attention import Attention, Decomposed, inputs, results
from zgraph.graph.text import graph_text

torch.manual_seed(0)
tracer, module = Decomposed(), Attention()
results(tracer.compile(module), module, inputs())
print(*(graph_text(gm.graph) for gm in tracer.graphs.values()))
"""


def test_the_graph_depends_on_no_hash(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    first, second = hash_seeds.printed(PROGRAM, tmp_path)
    assert first == second and "flash_attention" in first


# --- ranks ------------------------------------------------------------------------------------------------------------


def with_inductor(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    given: dict[str, Any] = {"lowering": "inductor", **options}
    return torch.compile(model, backend="zgraph", options=given)


def attention_batch(step: int, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 48, 16, generator=generator), torch.randn(2, 48, generator=generator)


def distance(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return ((whole(found) - expected).float().norm() / expected.float().norm()).item()


def compressing() -> list[GraphPass]:
    """LoCo for every matrix of a model that is smaller than what it leaves alone by default."""
    passes = presets.default(compression=zgraph.passes.LoCo())
    return [
        replace(each, min_numel=64) if isinstance(each, zgraph.passes.CompressGradients) else each for each in passes
    ]


PIPELINES: dict[str, Callable[[], PassList]] = {
    "default": lambda: PassList([FuseAttention(), *presets.default()]),
    "planned": lambda: PassList(
        [FuseAttention(), *presets.planned()], target=zgraph.Target(hardware=zgraph.Hardware.preset("cpu"))
    ),
    "loco": lambda: PassList([FuseAttention(), *compressing()]),
}


def against_eager(options: dict[str, Any], autocast: torch.dtype | None, pipeline: str) -> tuple[float, list[str]]:
    """The largest distance of an output or a gradient from the replicated model's, and what the pass had to say."""
    torch.manual_seed(5)
    case = Case(build=lambda: nn.Sequential(Attention(), nn.Tanh(), nn.Linear(7, 1)), batch=attention_batch)
    case.options, case.autocast = options, autocast
    model = case.build()
    reference = Replicated(case, copy.deepcopy(model), 3)
    model = zgraph.shard(model, zero_stage=3, **options)
    report = zgraph.Report()
    called = with_inductor(model, report=report, passes=PIPELINES[pipeline]())
    (expected_output,), expected = reference.step(0)
    x, target = batches(case, 0)[dist.get_rank()]
    output = case.call(called, x)
    case.loss(output, target).backward()
    off = [distance(output, expected_output)]
    off += [distance(parameter.grad, expected[name]) for name, parameter in model.named_parameters()]
    return max(off), [note for note in report.notes if "fuse_attention" in note]


@pytest.mark.parametrize(
    ("options", "autocast", "pipeline", "bound"),
    [
        ({}, None, "default", 1e-5),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, None, "default", 3e-2),
        pytest.param({}, torch.bfloat16, "default", 3e-2, marks=pytest.mark.long),  # as narrow as the row above
        ({}, None, "planned", 1e-5),
        # The error of 4 bits: steps of 2/15 of a block's largest, about 2.5 times its root mean square.
        ({}, None, "loco", 2.5 * 2 / 15 / 12**0.5 * 1.5),
    ],
)
def test_two_ranks_at_stage_3_are_near_the_replicated_model(
    ranks: Ranks, options: dict[str, Any], autocast: torch.dtype | None, pipeline: str, bound: float
) -> None:
    for off, notes in ranks.run(against_eager, options, autocast, pipeline):
        assert notes == ["fuse_attention on joint: 1 fused"]
        assert off <= bound


def real_peak(passes: list[zgraph.GraphPass]) -> int:
    """What the third step of a model on one rank of two reaches."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = zgraph.shard(Attention())
    called = with_inductor(model, passes=PassList(passes))
    x, peaks = inputs(length=128), list[int]()
    for _ in range(3):
        model.zero_grad()
        with counted() as count:
            called(x).square().mean().backward()
        peaks.append(count.rise_bytes)
    return peaks[-1]


def test_without_the_pass_a_step_holds_the_probabilities() -> None:
    with fake_world(2):
        off = real_peak(presets.default())
        on = real_peak([FuseAttention(), *presets.default()])
    assert on <= off - 4 * 3 * 2 * 128 * 128
