"""Parameters at rest on the host or on disk stream through forward and backward, and through inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zgraph
from examples.benchmarks.loopback import Wire, loopback
from tests.support.ranks import Ranks, worlds
from tests.support.whole_tensors import whole

LAYERS, WIDTH = 3, 10


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def results(zero_stage: int, offload: zgraph.Offload | None, lowering: str) -> tuple[list[Tensor], list[str]]:
    """An output of inference, one of training, and the gradients; with the notes of the pass."""
    torch.compiler.reset()
    sharded = zgraph.shard(model(), zero_stage=zero_stage, offload=offload, param_dtype=torch.bfloat16)
    report = zgraph.Report()
    compiled: Any = torch.compile(sharded, backend="zgraph", options={"lowering": lowering, "report": report})
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        found = [compiled(x)]
    y = compiled(x)
    y.float().square().sum().backward()
    found += [y.detach(), *(whole(parameter.grad) for parameter in sharded.parameters())]
    return found, [note for note in report.notes if note.startswith("stream_states")]


def compare(zero_stage: int, offload: zgraph.Offload, lowering: str = "fx") -> list[str]:
    expected, _ = results(zero_stage, None, lowering)
    found, notes = results(zero_stage, offload, lowering)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    return notes


@worlds(2)
@pytest.mark.parametrize(("zero_stage", "tier"), [(3, "host"), (0, "disk"), (0, "host"), (3, "disk")])
def test_parameters_stream_through_all_graphs(ranks: Ranks, zero_stage: int, tier: Any, tmp_path: Path) -> None:
    offload = zgraph.Offload(params=tier, path=tmp_path if tier == "disk" else None)
    for notes in ranks.run(compare, zero_stage, offload):
        directions = [note.split(" ")[2].rstrip(":") for note in notes if "are brought to the device" in note]
        assert directions == ["inference", "forward", "backward"]


@worlds(2)
def test_parameters_stream_between_islands(ranks: Ranks, tmp_path: Path) -> None:
    assert all(ranks.run(compare, 3, zgraph.Offload(params="disk", path=tmp_path), "inductor"))


def test_a_language_model_generates_from_disk(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def language() -> Any:
        torch.manual_seed(0)
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 64}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()

    prompt = torch.randint(0, 64, (1, 5))
    expected = language().generate(prompt, max_new_tokens=6, do_sample=False)
    report = zgraph.Report()
    with loopback(1, Wire()):
        served = zgraph.shard(language(), offload=zgraph.Offload(params="disk", path=tmp_path))
        assert torch.equal(served.generate(prompt, max_new_tokens=6, do_sample=False), expected)
        options = {"lowering": "fx", "report": report}
        served.forward = torch.compile(served.forward, backend="zgraph", options=options, dynamic=True)
        assert torch.equal(served.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert any("are brought to the device" in note for note in report.notes)
