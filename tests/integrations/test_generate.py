"""Hugging Face's `generate`: one graph for prompts and one for further tokens, which are those of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zgraph
from tests.support.budget import long
from tests.support.ranks import Ranks, worlds

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=96, max_position_embeddings=512, pad_token_id=0, eos_token_id=95,
)  # fmt: skip
PROMPTS = torch.arange(1, 11).view(2, 5)
TOKENS, LONG = 20, 256


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def texts(model: Any, prompts: Tensor = PROMPTS, tokens: int = TOKENS, **cache: Any) -> Tensor:
    """Generate tokens for each prompt; no text ends early."""
    mask = torch.ones_like(prompts)
    return model.generate(
        prompts, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **cache
    )


def compiled(model: Any, report: zgraph.Report, **options: Any) -> Any:
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="zgraph", options={"report": report, **options})
    return model


def serve(folder: str, cache: dict[str, Any], lowering: str) -> None:
    offload = zgraph.Offload(params="disk", path=folder, param_bits=4)
    model, report = zgraph.shard(llama().eval(), offload=offload), zgraph.Report()
    tokens = LONG if cache and lowering == "fx" else TOKENS
    expected = texts(model, tokens=tokens)  # uncompiled: decodes whole weights
    model = compiled(model, report, lowering=lowering)
    assert torch.equal(texts(model, tokens=tokens, **cache), expected)
    frames = [graph.frame for graph in report.graphs]
    # One for prompts, one for tokens; a cache that grows has one more for the first token, before sizes are dynamic.
    assert len(frames) == len(set(frames)) == (2 if cache else 3)
    if tokens == TOKENS:
        assert torch.equal(texts(model, **cache), expected)
        assert len(report.graphs) == len(frames)
    assert torch.equal(texts(model, PROMPTS[:1], **cache), expected[:1, : PROMPTS.shape[1] + TOKENS])
    assert any("read_codes" in note and "operators read codes" in note for note in report.notes)


STATIC: dict[str, Any] = {"cache_implementation": "static"}


@worlds(1, 2)
@pytest.mark.parametrize(
    ("cache", "lowering"), [(STATIC, "fx"), ({}, "inductor"), *long(({}, "fx"), (STATIC, "inductor"))]
)
def test_tokens_from_codes_need_two_graphs(ranks: Ranks, cache: dict[str, Any], lowering: str, tmp_path: Path) -> None:
    """Takes seconds: Dynamo traces Llama twice, and the first case makes 256 tokens."""
    ranks.run(serve, str(tmp_path), cache, lowering)


def train_and_generate(zero_stage: int) -> None:
    """Tokens between two steps of training are those of the whole model, and change no gradient."""
    plain = llama()
    model, report = zgraph.shard(llama(), zero_stage=zero_stage), zgraph.Report()
    model = compiled(model, report, lowering="fx")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(2):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            one(PROMPTS, labels=PROMPTS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(texts(model, cache_implementation="static"), texts(copy.deepcopy(plain)))
    for name, value in zgraph.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name])


@worlds(2)
@pytest.mark.parametrize("zero_stage", [3, *long(0)])
def test_tokens_between_steps_of_training(ranks: Ranks, zero_stage: int) -> None:
    """Takes seconds: Dynamo traces Llama for training, for the prompts and for tokens."""
    ranks.run(train_and_generate, zero_stage)
