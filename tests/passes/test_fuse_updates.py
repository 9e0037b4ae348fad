"""Updates of small parameters share calls; tests/step/test_step_optimizers.py and its neighbours compare results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn, optim

import zgraph
from tests.support.graphs import fake_world
from tests.support.hash_seeds import HashSeeds
from zgraph.compiler.graph_pass import GraphPass, PassContext
from zgraph.graph.text import graph_text
from zgraph.passes import FuseUpdates, presets
from zgraph.torch_compat.operators import OpOverload

WIDTH, LAYERS = 4, 3


@dataclass(frozen=True, kw_only=True)
class Calls(GraphPass):
    """Changes nothing; counts calls, and keeps the graph's text and the notes."""

    counts: list[Counter[str]]
    texts: list[str]

    name: ClassVar[str] = "calls"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        called = (node.target for node in gm.graph.nodes)
        self.counts.append(Counter(one.overloadpacket.__name__ for one in called if isinstance(one, OpOverload)))
        self.texts.append(graph_text(gm.graph))
        return False


def step_of(
    make: Callable[[Iterable[Tensor]], optim.Optimizer], fuse: Iterable[GraphPass], *, clips: bool = False
) -> Calls:
    """What became of the second step of a chain of small layers on two ranks."""
    seen = Calls(counts=[], texts=[])
    passes = [one for one in presets.default() if not isinstance(one, FuseUpdates)]
    place = next(number for number, one in enumerate(passes) if one.name == "split_updates") + 1
    with fake_world(2):
        model = zgraph.shard(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]), zero_stage=3)
        optimizer = make(model.parameters())

        def step(x: Tensor) -> None:
            model(x).sum().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        pipeline = zgraph.PassList([*passes[:place], *fuse, seen, *passes[place:]], replay_all=True)
        captured = zgraph.training_step(model, optimizer, options={"lowering": "fx", "passes": pipeline})(step)
        for _ in range(2):
            captured(torch.zeros(2, WIDTH))
    return seen


def adamw(parameters: Any) -> optim.Optimizer:
    """As anybody writes it: on a CPU neither fused nor foreach."""
    return optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_makes_one_call_for_each_operation(clips: bool) -> None:
    """All gradients arrive in one bucket; clipping scales them by one call as well."""
    alone, together = (step_of(adamw, fuse, clips=clips).counts[-1] for fuse in ([], [FuseUpdates()]))
    for name in ("lerp_", "addcmul_", "sqrt", "addcdiv_"):
        assert alone[name] == 2 * LAYERS
        assert (together[name], together[f"_foreach_{name}"]) == (0, 1)
    assert alone.total() - together.total() == 9 * (2 * LAYERS - 1)


def test_large_parameters_keep_their_calls() -> None:
    """Weights of 2 x 4 rows and biases of 2: only these are small enough."""
    counts = step_of(adamw, [FuseUpdates(most_numel=2)]).counts[-1]
    assert (counts["lerp_"], counts["_foreach_lerp_"]) == (LAYERS, 1)


def test_a_second_run_changes_nothing() -> None:
    once, twice = step_of(adamw, [FuseUpdates()]), step_of(adamw, [FuseUpdates(), FuseUpdates()])
    assert once.texts == twice.texts


def test_calls_that_depend_on_one_another_stay_apart() -> None:
    """A momentum is scaled before it is added to, and the weight changes last."""
    text = step_of(lambda given: optim.SGD(given, lr=0.1, momentum=0.9), [FuseUpdates()]).texts[-1]
    scaled, added, stepped = (text.index(name) for name in ("_foreach_mul_", "_foreach_add_", "_foreach_add_.List"))
    assert scaled < added <= stepped
    assert text.count("_foreach_add_") == 2


def test_a_size_that_no_tensor_has_is_refused() -> None:
    with pytest.raises(ValueError, match="fuse_updates: most_numel=0"):
        FuseUpdates(most_numel=0)


def test_hash_seeds_do_not_change_the_graph(hash_seeds: HashSeeds, tmp_path: Path) -> None:
    program = "from tests.passes.test_fuse_updates import *; print(step_of(adamw, [FuseUpdates()]).texts[-1])"
    first, second = hash_seeds.printed(program, tmp_path)
    assert "_foreach_lerp_" in first
    assert first == second
