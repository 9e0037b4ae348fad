"""TRL's trainers on two ranks: equal to one process with twice the batch, and resumed to the bit.

TRL sets `forward` on the instance of its models, and multiplies by `lm_head.weight` outside of the head ("fused head");
with smoothed labels SFT computes its loss from the logits instead.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.support.front_ends import furthest, launched
from tests.support.ranks import Ranks
from zgraph.integrations.transformers import sharded

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
WORDS = ("<pad>", "<eos>", "<unk>", *LETTERS)
PAIRS = ("prompt", "chosen", "rejected")
STEPS = 4
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # trainer, arguments' class, arguments
    "SFT": (SFTTrainer, SFTConfig, {}),
    "SFT, smoothed labels": (SFTTrainer, SFTConfig, {"label_smoothing_factor": 0.1}),
    "DPO": (DPOTrainer, DPOConfig, {"disable_dropout": False}),
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rows(columns: tuple[str, ...], seed: int = 0) -> Dataset:
    """Texts of 4 to 11 letters, so that ranks see batches of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text() -> str:
        length = int(torch.randint(4, 12, (1,), generator=generator))
        return " ".join(LETTERS[int(i)] for i in torch.randint(0, len(LETTERS), (length,), generator=generator))

    return Dataset.from_list([{column: text() for column in columns} for _ in range(32)])


def save_base(folder: Path) -> str:
    """A model as one downloads it, from which DPO loads its reference, too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "eos_token_id": 1}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), num_key_value_heads=1, max_position_embeddings=64, **sizes, **special)
    ).save_pretrained(folder / "base")
    return str(folder / "base")


def trained(
    base: str,
    folder: str,
    method: str,
    lora: bool,
    plugin: dict[str, Any] | None,
    dropout: float = 0.0,
    resume: Any = None,
) -> list[float]:
    """Logs of a trainer whose global batch is of 8 rows in two micro-batches; without plugin, TRL's trainer itself."""
    trainer, config, options = METHODS[method]
    if method == "DPO" and plugin and plugin["compile"]:
        options = {**options, "gradient_checkpointing": False, "pad_to_multiple_of": 32}
    world = dist.get_world_size() if dist.is_initialized() else 1
    with launched():
        os.environ["CI"] = "1"  # TRL reports no use then
        args = config(
            folder,
            **{"max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
            **{"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 2, "seed": 3},
            **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1},
            **{"bf16": False, "use_cpu": True, "report_to": [], "disable_tqdm": True, **options},
        )
        columns = PAIRS if method == "DPO" else ("text",)
        found = (trainer if plugin is None else sharded(trainer, **plugin))(
            model=LlamaForCausalLM.from_pretrained(base, attention_dropout=dropout),
            args=args,
            train_dataset=rows(columns),
            eval_dataset=rows(columns, seed=1),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
        )
        found.train(resume_from_checkpoint=resume)
        keys = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "rewards/margins", "eval_rewards/margins")
        return [entry[key] for entry in found.state.log_history for key in keys if key in entry]


def weights(folder: Path, lora: bool) -> dict[str, Tensor]:
    return load_file(folder / f"checkpoint-{STEPS}" / ("adapter_model.safetensors" if lora else "model.safetensors"))


@pytest.mark.parametrize(
    ("method", "lora", "zero_stage", "compile"),
    [
        ("SFT", False, 3, True),
        ("SFT", True, 2, False),
        ("SFT, smoothed labels", False, 2, False),
        ("SFT, smoothed labels", True, 3, True),
        ("DPO", False, 3, False),
        ("DPO", True, 2, True),
    ],
)
def test_logs_and_weights_equal_one_process(
    ranks: Ranks, method: str, lora: bool, zero_stage: int, compile: bool, tmp_path: Path
) -> None:
    """Each pair of values is in a row."""
    base = save_base(tmp_path)
    expected = trained(base, str(tmp_path / "plain"), method, lora, None)
    plugin = {"zero_stage": zero_stage, "compile": compile, "options": {"lowering": "fx"}}
    for found in ranks.run(trained, base, str(tmp_path / "sharded"), method, lora, plugin):
        assert found == pytest.approx(expected, abs=1e-5)
    assert furthest(*(weights(tmp_path / one, lora) for one in ("sharded", "plain"))) < 1e-3
    folder = tmp_path / "sharded/checkpoint-4"
    if lora:
        PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    else:
        LlamaForCausalLM.from_pretrained(folder)


def test_checkpointing_that_is_turned_off_and_on_is_not_compiled(tmp_path: Path) -> None:
    with launched(), pytest.raises(ValueError, match=r"DPOTrainer turns .* write gradient_checkpointing=False in its"):
        args = DPOConfig(str(tmp_path), bf16=False, use_cpu=True)
        sharded(DPOTrainer)(save_base(tmp_path), args=args, train_dataset=rows(PAIRS), processing_class=tokenizer())


@pytest.mark.parametrize(("method", "lora"), [("SFT", False), ("DPO", True)])
def test_a_run_resumes_to_the_bit(ranks: Ranks, method: str, lora: bool, tmp_path: Path) -> None:
    case = save_base(tmp_path), str(tmp_path), method, lora, {"compile": False}, 0.2
    expected, kept = ranks.run(trained, *case), weights(tmp_path, lora)
    shutil.rmtree(tmp_path / "checkpoint-4" / "zgraph")  # as if killed while saving: the rest is there, and is newer
    assert ranks.run(trained, *case, True) == expected
    assert furthest(weights(tmp_path, lora), kept) == 0
