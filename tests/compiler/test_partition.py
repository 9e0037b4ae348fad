"""Activation checkpointing and compiled code: what backward draws and computes again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests.support import models
from tests.support.budget import long
from tests.support.combinations import off
from tests.support.compressing import feedback_of
from tests.support.judges.replicated import Case, Replicated, assert_equal, batches, compare, token_batch
from tests.support.ranks import Ranks
from tests.support.whole_tensors import whole
from zgraph.analysis.hardware import Hardware
from zgraph.graph import meta, nodes
from zgraph.torch_compat.aot import rng_state_operators
from zgraph.torch_compat.operators import OpOverload

WIDTH = 12


class Blocks(nn.Module):
    """Two blocks of attention and an MLP, each computed again in backward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(models.Block(WIDTH, 2, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, models.VOCABULARY)
        self.checkpointed = True

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


@dataclass(frozen=True, kw_only=True)
class CountOperators(zgraph.GraphPass):
    """Notes how often each operator that draws, or is tagged so, stands in the graph."""

    name: ClassVar[str] = "count_operators"
    phase: ClassVar = "graph"

    def run(self, gm: fx.GraphModule, ctx: zgraph.PassContext) -> bool:
        found = Counter(name for node in nodes.call_functions(gm.graph, lambda _: True) if (name := random_name(node)))
        ctx.note(self, ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
        assert all(meta.value(node) is not None for node in gm.graph.nodes if node.op == "call_function")
        return False


def random_name(node: fx.Node) -> str:
    """Of attention, dropout and their like; those that draw with a state of their own are "wrapped"."""
    save, run = rng_state_operators()
    if node.target is save or node.target is run:
        wrapped = next(argument for argument in node.args if isinstance(argument, OpOverload))
        return f"wrapped {wrapped.overloadpacket.__name__}"
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return node.target.overloadpacket.__name__
    return ""


def train(zero_stage: int, lowering: str, dropout: float, timed: bool = False) -> tuple[list[str], list[Tensor]]:
    """Two steps against the replicated model: what `CountOperators` has noted, and all gradients.

    Args:
        timed: the passes plan by kernels that they run while compiling, instead of by rules.
    """
    torch.manual_seed(5)
    case = Case(build=lambda: Blocks(dropout), batch=token_batch)
    model = case.build()
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    plain.checkpointed = False
    reference = Replicated(case, plain, zero_stage)
    sharded: Any = zgraph.shard(model, zero_stage=zero_stage)
    report = zgraph.Report()
    presets = zgraph.passes.presets
    passes = presets.planned() if timed else presets.default()
    target = zgraph.Target(hardware=Hardware.preset("cpu"), time_kernels=True) if timed else None
    pipeline = zgraph.PassList([*passes, CountOperators()], target=target, replay_all=True)
    gradients: list[Tensor] = []
    called: Any = torch.compile(
        sharded,
        backend="zgraph",
        options={"lowering": lowering, "passes": pipeline, "report": report},  # pyright: ignore[reportArgumentType]
    )
    for step in range(2):
        (output,), expected = reference.step(step)
        inputs, target = batches(case, step)[torch.distributed.get_rank()]
        torch.manual_seed(77 + step)
        found = called(inputs)
        case.loss(found, target).backward()
        torch.testing.assert_close(found.detach(), output)
        for name, parameter in sharded.named_parameters():
            if lowering == "fx":
                assert_equal(f"gradient of {name}", whole(parameter.grad), expected[name])
            torch.testing.assert_close(whole(parameter.grad), expected[name])
            gradients.append(whole(parameter.grad))
        sharded.zero_grad()
    assert [graph.peak is not None for graph in report.graphs] == [True, True]
    notes = [note.partition("count_operators on ")[2] for note in report.notes if "count_operators" in note]
    return notes, gradients


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Inductor's C++ compiler takes seconds for each kernel: it meets each stage with dropout or without.
WITHOUT_DROPOUT = [(3, "fx"), *long((0, "inductor"), (0, "fx"), (3, "inductor"))]  # dropout has Inductor
WITH_DROPOUT = [(3, "fx"), (3, "inductor"), *long((0, "fx"), (0, "inductor"))]


@pytest.mark.parametrize(("zero_stage", "lowering"), WITHOUT_DROPOUT)  # in stage 0 nothing is gathered again
def test_attention_without_dropout_is_computed_again_as_it_is(ranks: Ranks, zero_stage: int, lowering: str) -> None:
    for notes, _ in ranks.run(train, zero_stage, lowering, 0.0):
        assert notes == [f"forward: {ATTENTION} 2", f"backward: {ATTENTION} 2"]


def drawn_again() -> list[str]:
    return [f"{direction}: {ATTENTION} 2, wrapped native_dropout 4" for direction in ("forward", "backward")]


@pytest.mark.parametrize(("zero_stage", "lowering"), WITH_DROPOUT)
def test_dropout_draws_the_same_mask_again(ranks: Ranks, zero_stage: int, lowering: str) -> None:
    assert [notes for notes, _ in ranks.run(train, zero_stage, lowering, 0.5)] == [drawn_again()] * 2


# Runs every kernel while compiling. Kernels are timed alike in all stages.
@pytest.mark.parametrize(("zero_stage", "lowering"), [(0, "fx"), *long((3, "inductor"), (3, "fx"), (0, "inductor"))])
def test_timing_kernels_leaves_the_masks_alone(ranks: Ranks, zero_stage: int, lowering: str) -> None:
    by_rules, timed = (ranks.run(train, zero_stage, lowering, 0.5, planned) for planned in (False, True))
    assert [notes for notes, _ in timed] == [drawn_again()] * 2
    for (_, expected), (_, found) in zip(by_rules, timed, strict=True):
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            # Islands of another order are other programs to Inductor.
            torch.testing.assert_close(one, other, **({"rtol": 0, "atol": 0} if lowering == "fx" else {}))


def train_compressed(zero_stage: int, dropout: float) -> list[str]:
    """Two steps by Inductor in bf16 with compressed gradients, against the replicated model; what was compressed."""
    torch.manual_seed(5)
    case = Case(build=lambda: Blocks(dropout), batch=token_batch, options={"param_dtype": torch.bfloat16})
    model = case.build()
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    plain.checkpointed = False
    reference = Replicated(case, plain, zero_stage)
    sharded: Any = zgraph.shard(model, zero_stage=zero_stage, **case.options)
    report = zgraph.Report()
    compress = zgraph.passes.CompressGradients(method=zgraph.passes.LoCo(), min_numel=WIDTH * WIDTH)
    passes = [
        compress if isinstance(one, zgraph.passes.CompressGradients) else one
        for one in zgraph.passes.presets.default(compression=zgraph.passes.LoCo())
    ]
    options: Any = {"passes": zgraph.PassList(passes), "report": report}
    called: Any = torch.compile(sharded, backend="zgraph", options=options)
    for step in range(2):
        (output,), expected = reference.step(step)
        inputs, target = batches(case, step)[torch.distributed.get_rank()]
        torch.manual_seed(77 + step)
        found = called(inputs)
        case.loss(found, target).backward()
        assert off(found.detach(), output) < 3e-2
        every = {name: whole(parameter.grad) for name, parameter in sharded.named_parameters()}
        for name, value in every.items():
            assert off(value, expected[name], floor=1e-2) < 0.2, name
        sharded.zero_grad()
    assert len(report.graphs) == 2, "the checkpointed blocks are compiled with what is around them"
    return sorted(feedback_of(sharded))


# Inductor's C++ compiler takes seconds for each kernel; blocks that stage 3 gathers again are the harder ones.
@pytest.mark.parametrize("zero_stage", [3, *long(0)])
def test_bf16_blocks_are_recomputed_and_their_gradients_compressed(ranks: Ranks, zero_stage: int) -> None:
    for names in ranks.run(train_compressed, zero_stage, 0.5):
        assert {f"blocks.{number}.up.weight" for number in (0, 1)} <= set(names)


class Twins(nn.Module):
    """Blocks that are compiled one by one, and called by an uncompiled forward that checkpoints them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.first, self.second = (nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, self.up(x), use_reentrant=False)
        return checkpoint(self.second, x, use_reentrant=False)


@pytest.mark.parametrize("zero_stage", [1, 0, 2])
def test_compiled_blocks_that_backward_repeats_stay_in_their_window(ranks: Ranks, zero_stage: int) -> None:
    """A repeated block took itself for a forward of its own, and closed the window: gradients that waited were lost."""
    assert ranks.run(compare, Case(build=Twins, micro_batches=2, steps=2), zero_stage, "part") == [12, 12]
