"""Hugging Face models, unmodified: what examples/zoo.py checks, once each; adapters and gradient checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zgraph
from examples.zoo import ZOO, averaged_gradients, check, train_reference, whole
from tests.support.budget import long
from tests.support.compiled import with_fx
from tests.support.ranks import Ranks

INDUCTOR = ("gpt2", "llama")
LONG = ("mixtral-grouped", "bert", "whisper", "vit", "clip")  # attention and norms that others have, in another order


def train(name: str) -> dict[str, Any]:
    """With one layer, where the zoo itself has two: most of the time goes into tracing."""
    return check(name, train_reference(name, 1), 3, "inductor" if name in INDUCTOR else "fx")


@pytest.mark.parametrize("name", [*(name for name in ZOO if name not in LONG), *long(*LONG)])
def test_a_model_of_the_zoo_equals_its_replica(ranks: Ranks, name: str) -> None:
    for row in ranks.run(train, name):
        assert row["good"], row
        assert row["gathers"] > 0


def differences(model: Any, reference: Any, called: Any, call_reference: Any = None) -> list[str]:
    """Names of parameters whose gradient is not the replicated model's, after one step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [ZOO["llama"].batch(torch.Generator().manual_seed(other)) for other in range(world)]
    _, expected = averaged_gradients(reference, batches, call_reference)
    called(**batches[rank]).loss.backward()
    return [
        name
        for name, parameter in model.named_parameters()
        if (parameter.grad is None) != (name not in expected)
        or (parameter.grad is not None and not torch.equal(whole(parameter.grad), expected[name]))
    ]


def train_adapters() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    torch.compiler.reset()
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(ZOO["llama"].build(1), config)
    reference = copy.deepcopy(model)
    zgraph.shard(model)
    found = differences(model, reference, with_fx(model))
    reduced = [
        name
        for graph in zgraph.summary(model).graphs
        for transfer in graph.transfers
        if "gather" not in transfer.kind
        for name in transfer.parameters
    ]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {"differences": found, "reduced": sorted(reduced), "trainable": sorted(trainable)}


def test_only_gradients_of_adapters_travel(ranks: Ranks) -> None:
    for found in ranks.run(train_adapters):
        assert found["differences"] == []
        assert found["reduced"] == found["trainable"] and "lora" in found["reduced"][0]


def train_checkpointed(reentrant: bool) -> list[str]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = ZOO["llama"].build(1).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    reference = copy.deepcopy(model)
    zgraph.shard(model)
    # Compiled around its checkpoints, as torch does it without zgraph too, the model sums in another order than eager.
    return differences(model, reference, with_fx(model), torch.compile(reference, backend="aot_eager"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(ranks: Ranks, reentrant: bool) -> None:
    assert ranks.run(train_checkpointed, reentrant) == [[], []]
