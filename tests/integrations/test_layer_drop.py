"""LayerDrop on unmodified models of Hugging Face, in a loop and in the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

import zgraph
from tests.support.budget import long
from tests.support.dropped_blocks import compiled, mean, weights
from tests.support.front_ends import CONTEXT, VOCABULARY, furthest, launched, llama
from tests.support.ranks import Ranks, worlds
from tests.support.trainers import STEPS, trainer
from tests.support.whole_tensors import whole

LAYERS = 4


def tell(model: LlamaForCausalLM, forwards: list[Any], drop: zgraph.LayerDrop) -> None:
    """Give each layer of the plain twin a forward that knows whether it is kept, and by what it is scaled."""
    probabilities = drop.probabilities(drop.step)
    for layer, own, is_kept, probability in zip(model.model.layers, forwards, drop.kept, probabilities, strict=True):

        def forward(
            hidden: Tensor, *args: Any, own: Any = own, is_kept: bool = is_kept, p: float = probability, **kwargs: Any
        ) -> Tensor:
            if not is_kept:
                return hidden
            return (
                own(hidden, *args, **kwargs)
                if p == 1
                else hidden.lerp(own(hidden.view_as(hidden), *args, **kwargs), 1 / p)
            )

        layer.forward = forward


def trained(stage: int, mode: str) -> tuple[int, list[str], int]:
    """Graphs; gradients and weights that are not those of the twin; layers dropped."""
    config = {"num_hidden_layers": LAYERS, "use_cache": mode != "blocks"}
    model, twin = (llama(**config).train() for _ in range(2))
    zgraph.shard(model, zero_stage=stage)
    drop = zgraph.LayerDrop(model.model.layers, theta=0.4, gamma=1.0)
    forwards = [layer.forward for layer in twin.model.layers]
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin))
    called: Any = compiled(model.model if mode == "blocks" else model, mode)
    called, wrong, dropped = model if mode == "blocks" else called, list[str](), 0
    draws = torch.Generator().manual_seed(3)
    for _ in range(4):
        tokens = [torch.randint(VOCABULARY, (2, CONTEXT), generator=draws) for _ in range(dist.get_world_size())]
        dropped += LAYERS - sum(drop.kept)
        tell(twin, forwards, drop)
        own = tokens[dist.get_rank()]
        called(input_ids=own, labels=own).loss.backward()
        parameters = [*twin.parameters()]
        losses = [twin(input_ids=one, labels=one).loss for one in tokens]
        grads = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
        for parameter, parts in zip(parameters, zip(*grads, strict=True), strict=True):
            parameter.grad = mean(parts)
        for (name, parameter), plain in zip(model.named_parameters(), parameters, strict=True):
            if plain.grad is None or parameter.grad is None:
                wrong += [] if parameter.grad is plain.grad else [name]
            elif not torch.equal(whole(parameter.grad), plain.grad):
                wrong.append(name)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        pairs = zip(weights(model).items(), parameters, strict=True)
        wrong += [name for (name, weight), plain in pairs if not torch.equal(weight, plain.detach())]
    return (0 if mode == "eager" else len(zgraph.summary(model).graphs)), wrong, dropped


@worlds(2)
@pytest.mark.parametrize(
    ("stage", "mode", "graphs"), [(3, "whole", 14), (1, "blocks", 2), *long((0, "eager", 0), (2, "whole", 14))]
)
def test_an_unmodified_llama_is_its_twin(ranks: Ranks, stage: int, mode: str, graphs: int) -> None:
    """Forward and backward of embedding, norm, head and each layer, which has its place in the cache as a constant.

    Without the cache layers share graphs; compiled as a whole, the Llama then makes another mask than in eager mode.
    """
    for found, wrong, dropped in ranks.run(trained, stage, mode):
        assert (found, wrong) == (graphs, [])
        assert dropped > 2


def by_trainer(folder: str, plugin: dict[str, Any] | None) -> tuple[list[float], int, dict[str, Tensor]]:
    with launched():
        model = llama(num_hidden_layers=LAYERS, use_cache=False)
        drop = zgraph.LayerDrop(model.model.layers, theta=0.4, gamma=1.0)
        found = trainer(folder, plugin, model, save_strategy="no")
        found.train()
        keys = ("loss", "eval_loss")
        logs = [entry[key] for entry in found.state.log_history for key in keys if key in entry]
        return logs, drop.step, weights(model)


@pytest.mark.parametrize("compile", [True, False])
def test_the_trainer_drops_layers_by_one_line_before_it(ranks: Ranks, compile: bool, tmp_path: Path) -> None:
    """Micro-batches of a step share a mask, evaluations run all layers: the losses are those of one process."""
    expected, _, plain = by_trainer(str(tmp_path / "plain"), None)
    plugin = {"zero_stage": 3, "compile": compile}
    for logs, step, sharded in ranks.run(by_trainer, str(tmp_path / "sharded"), plugin):
        assert logs == pytest.approx(expected, abs=1e-5)
        assert step == STEPS
        assert furthest(sharded, plain) < 1e-3
