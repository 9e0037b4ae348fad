"""The Trainer on two ranks: equal to one process with twice the batch, and resumed to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import EarlyStoppingCallback, LlamaForCausalLM, Trainer, TrainingArguments

import zgraph
from tests.support.budget import long
from tests.support.front_ends import CONTEXT, VOCABULARY, furthest, launched, llama
from tests.support.ranks import Ranks, worlds
from zgraph.integrations.transformers import sharded
from zgraph.passes import LoCo, presets

STEPS = 4
FX = {"lowering": "fx"}


def texts(rows: int, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (rows, CONTEXT), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer(folder: str | Path, plugin: dict[str, Any] | None, model: Any = None, **arguments: Any) -> Trainer:
    """A Trainer whose global batch is of 8 rows in two micro-batches; without plugin, the Trainer itself."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    options: dict[str, Any] = {
        **{"max_steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
        **{"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "seed": 3},
        **{"use_cpu": True, "report_to": [], "disable_tqdm": True, **arguments},
    }
    batch = 4 // world
    args = TrainingArguments(str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=2, **options)
    cls = Trainer if plugin is None else sharded(Trainer, **{"options": FX, **plugin})
    callbacks = [EarlyStoppingCallback(5)] if "metric_for_best_model" in options else []
    return cls(model or llama(), args, train_dataset=texts(32, 1), eval_dataset=texts(12, 2), callbacks=callbacks)


def logged(found: Trainer) -> list[float]:
    """Losses, norms and evaluations in the order of steps."""
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in found.state.log_history for key in keys if key in entry]


Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # plugin, arguments, config
CASES: dict[str, Case] = {
    "stage 0": ({"zero_stage": 0}, {}, {}),
    "stage 2, smoothed labels": ({"zero_stage": 2}, {"label_smoothing_factor": 0.1}, {}),
    "stage 3, tied": ({"zero_stage": 3}, {}, {"tie_word_embeddings": True}),
    "stage 1, eager, checkpointed": ({"zero_stage": 1, "compile": False}, {"gradient_checkpointing": True}, {}),
    "stage 3, best model": (
        {"zero_stage": 3, "compile": False},
        {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
        {},
    ),
}


def run(folder: str, name: str, plugin: dict[str, Any] | None) -> tuple[list[float], tuple[int, ...]]:
    _, arguments, config = CASES[name]
    with launched():
        found = trainer(folder, plugin, llama(**config), **arguments)
        found.train()
        found.save_model(f"{folder}/final")
        return logged(found), found.predict(texts(13, 2)).predictions.shape  # pyright: ignore[reportArgumentType]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_logs_weights_and_predictions_equal_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    expected, shape = run(str(tmp_path / "plain"), name, None)
    for found, predicted in ranks.run(run, str(tmp_path / "sharded"), name, CASES[name][0]):
        assert found == pytest.approx(expected, abs=1e-5)
        assert predicted == shape
    assert furthest(weights(tmp_path / "sharded/final"), weights(tmp_path / "plain/final")) < 1e-3
    x = torch.arange(CONTEXT)[None]
    outputs = [LlamaForCausalLM.from_pretrained(tmp_path / one / "final")(x).logits for one in ("plain", "sharded")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


# --- resume -----------------------------------------------------------------------------------------------------------


def loco() -> dict[str, Any]:
    return {"options": {**FX, "passes": zgraph.PassList(presets.default(compression=LoCo()))}}


def trained(folder: str, compressed: bool, resume: Any) -> list[float]:
    with launched():
        model = llama(attention_dropout=0.2)
        found = trainer(folder, loco() if compressed else {"zero_stage": 3}, model)
        found.train(resume_from_checkpoint=resume)
        return logged(found)


def resumed(folder: Path, ranks: Ranks, compressed: bool) -> None:
    """A run that resumes saves the same weights at the end as the uninterrupted run."""
    expected, kept = ranks.run(trained, str(folder), compressed, False), weights(folder / "checkpoint-4")
    shutil.rmtree(folder / "checkpoint-4" / "zgraph")  # as if killed while saving: the rest is there, and is newer
    assert ranks.run(trained, str(folder), compressed, True) == expected
    assert furthest(weights(folder / "checkpoint-4"), kept) == 0


@pytest.mark.parametrize("compressed", [False, True])
def test_a_run_resumes_to_the_bit_from_the_newest_complete_folder(
    ranks: Ranks, compressed: bool, tmp_path: Path
) -> None:
    resumed(tmp_path, ranks, compressed)


class Alone:
    """Stands for ranks: this process, without a group."""

    def run(self, function: Any, *args: Any) -> list[Any]:
        return [function(*args)]


def test_one_process_without_others_resumes_to_the_bit(tmp_path: Path) -> None:
    resumed(tmp_path, Alone(), compressed=False)  # pyright: ignore[reportArgumentType]


@worlds(1, 3)
def test_another_number_of_ranks_resumes(ranks: Ranks, pool: Any, tmp_path: Path) -> None:
    """Weights, optimizer and schedule; rows come in other batches from then on."""
    expected = pool.of(2).run(trained, str(tmp_path), False, False)[0]
    found = ranks.run(trained, str(tmp_path), False, str(tmp_path / "checkpoint-2"))[0]
    assert found[:5] == expected[:5]  # of two steps and an evaluation, from the folder
    assert len(found) == len(expected)


def resumed_from_a_plain_trainer(folder: str) -> str:
    with launched():
        trainer(folder, None).train()
    dist.barrier()
    with launched(), pytest.raises(zgraph.CheckpointError) as caught:
        trainer(folder, {"zero_stage": 3}).train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return str(caught.value)


def test_a_folder_of_the_plain_trainer_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(resumed_from_a_plain_trainer, str(tmp_path)):
        assert "checkpoint-2/zgraph has no complete checkpoint of LlamaForCausalLM" in text


# --- adapters ---------------------------------------------------------------------------------------------------------


def adapted(folder: str, plugin: dict[str, Any] | None) -> list[float]:
    with launched():
        torch.manual_seed(0)
        model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        found = trainer(folder, plugin, model)
        found.train()
        return logged(found)


def test_adapters_alone_step_and_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    expected = adapted(str(tmp_path / "plain"), None)
    for found in ranks.run(adapted, str(tmp_path / "sharded"), {"zero_stage": 3}):
        assert found == pytest.approx(expected, abs=1e-5)
    files = [load_file(tmp_path / one / "checkpoint-4/adapter_model.safetensors") for one in ("sharded", "plain")]
    assert furthest(*files) < 1e-3
    PeftModel.from_pretrained(llama(), str(tmp_path / "sharded/checkpoint-4"))


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch_compile": ({"torch_compile": True}, "torch_compile=True.*: zgraph compiles the model itself; leave it out"),
    "save_on_each_node": ({"save_on_each_node": True}, "save_on_each_node=True.*: every rank writes its part to one"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*; set the batch size"),
    "8 bits": ({"optim": "adamw_bnb_8bit"}, 'optimizers of 8 bits do not step sharded .* write optim="adamw_torch"'),
    "fsdp": ({"fsdp": "full_shard"}, "would shard the model in another way; leave it out"),
}


def refusal(name: str, folder: str) -> None:
    arguments, text = REFUSED[name]
    with launched(), pytest.raises(ValueError, match=text):
        trainer(folder, {}, **arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_other_ways_are_refused(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(refusal, name, str(tmp_path))


def test_private_methods_of_the_trainer_are_there() -> None:
    names = ("_build_accelerator_args", "_save", "_save_rng_state")
    for name in (*names, "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
        assert callable(getattr(Trainer, name))


@pytest.mark.parametrize("lowering", long("inductor"))
def test_inductor_trains_to_the_same_losses(ranks: Ranks, lowering: str, tmp_path: Path) -> None:
    expected, _ = run(str(tmp_path / "plain"), "stage 0", None)
    plugin = {"zero_stage": 3, "options": {"lowering": lowering}}
    for found, _ in ranks.run(run, str(tmp_path / "sharded"), "stage 0", plugin):
        assert found == pytest.approx(expected, abs=1e-5)
