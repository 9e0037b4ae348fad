"""Activation checkpointing inside a compiled model: what backward draws and computes again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import zgraph
from tests import models
from tests.ranks import Ranks
from tests.replicated import Case, Replicated, assert_equal, batches, token_batch, whole
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


def train(zero_stage: int, lowering: str, dropout: float) -> list[str]:
    """Two steps against the replicated model; what `CountOperators` has noted."""
    torch.manual_seed(5)
    case = Case(build=lambda: Blocks(dropout), batch=token_batch)
    model = case.build()
    plain = case.build()
    plain.load_state_dict(model.state_dict())
    plain.checkpointed = False
    reference = Replicated(case, plain, zero_stage)
    sharded: Any = zgraph.shard(model, zero_stage=zero_stage)
    report = zgraph.Report()
    pipeline = zgraph.Pipeline([*zgraph.passes.presets.default(), CountOperators()], replay_all=True)
    called: Any = torch.compile(
        sharded,
        backend="zgraph",
        options={"lowering": lowering, "pipeline": pipeline, "report": report},  # pyright: ignore[reportArgumentType]
    )
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
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
            sharded.zero_grad()
    assert [graph.peak is not None for graph in report.graphs] == [True, True]
    return [note.partition("count_operators on ")[2] for note in report.notes if "count_operators" in note]


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_attention_without_dropout_is_computed_again_as_it_is(two_ranks: Ranks, zero_stage: int, lowering: str) -> None:
    expected = [f"forward: {ATTENTION} 2", f"backward: {ATTENTION} 2"]
    assert two_ranks.run(train, zero_stage, lowering, 0.0) == [expected, expected]


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("lowering", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_draws_the_same_mask_again(two_ranks: Ranks, zero_stage: int, lowering: str) -> None:
    expected = [f"{direction}: {ATTENTION} 2, wrapped native_dropout 4" for direction in ("forward", "backward")]
    assert two_ranks.run(train, zero_stage, lowering, 0.5) == [expected, expected]
