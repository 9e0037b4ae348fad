"""The Trainer on two ranks: equal to one process with twice the batch, and resumed to the bit."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, Trainer

import zgraph
from tests.support.budget import long
from tests.support.front_ends import CONTEXT, VOCABULARY, furthest, launched, llama
from tests.support.ranks import Ranks, worlds
from tests.support.trainers import FX, STEPS, texts, trainer
from zgraph.passes import LoCo, presets


def logged(found: Trainer) -> list[float]:
    """Losses, norms and evaluations in the order of steps."""
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in found.state.log_history for key in keys if key in entry]


BEST = {  # which is the first: texts are random, so that learning them makes others less likely
    **{"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False},
    **{"eval_steps": 1, "save_steps": 1},
}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # plugin, arguments, config
CASES: dict[str, Case] = {
    "stage 0": ({"zero_stage": 0}, {}, {}),
    "stage 2, smoothed labels": ({"zero_stage": 2}, {"label_smoothing_factor": 0.1}, {}),
    "stage 3, tied, padded": (
        {"zero_stage": 3},
        {"max_steps": 8, "eval_steps": 8, "shortest": 3},
        {"tie_word_embeddings": True, "num_hidden_layers": 1},
    ),
    "stage 1, eager, checkpointed": ({"zero_stage": 1, "compile": False}, {"gradient_checkpointing": True}, {}),
    "stage 3, best model": ({"zero_stage": 3, "compile": False}, BEST, {}),
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
    if name == "stage 3, best model":
        assert len(expected) < 3 * STEPS  # stopped early
    assert furthest(weights(tmp_path / "sharded/final"), weights(tmp_path / "plain/final")) < 1e-3
    x = torch.arange(CONTEXT)[None]
    outputs = [LlamaForCausalLM.from_pretrained(tmp_path / one / "final")(x).logits for one in ("plain", "sharded")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


Session = tuple[list[float], list[list[int]]]


def session(folder: str, plugin: dict[str, Any] | None, prompts: tuple[int, ...]) -> Session:
    """Logs of an evaluation, of two calls of `train` with one's own optimizer, and texts; weights in several files."""
    with launched():
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        found = trainer(folder, plugin, model, (optimizer, schedule), save_strategy="no")
        logs = [found.evaluate()["eval_loss"]]
        for _ in range(2):
            found.train()
            logs += [*logged(found), found.evaluate()["eval_loss"]]
        options = {"max_shard_size": "5KB", "is_main_process": found.args.should_save}
        model.save_pretrained(f"{folder}/several", state_dict=found.accelerator.get_state_dict(model), **options)
        texts: list[list[int]] = []
        for length in prompts:
            x = torch.arange(length)[None]
            limits: dict[str, Any] = {"max_new_tokens": 2 * length, "pad_token_id": 0, "eos_token_id": VOCABULARY}
            made = model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, **limits)
            texts += made.tolist()  # pyright: ignore[reportAttributeAccessIssue]
        return logs, texts


def session_of_rank(folder: str) -> Session:
    return session(folder, {"zero_stage": 3, "compile": False}, (2 + dist.get_rank(),))


def test_trained_twice_with_ones_own_optimizer_and_asked_for_texts(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks generate texts of different lengths."""
    expected, texts = session(str(tmp_path / "plain"), None, (2, 3))
    found = ranks.run(session_of_rank, str(tmp_path / "sharded"))
    for logs, _ in found:
        assert logs == pytest.approx(expected, abs=1e-5)
    assert [text for _, texts in found for text in texts] == texts
    files = [tmp_path / one / "several" for one in ("sharded", "plain")]
    assert len(list(files[0].glob("*.safetensors"))) > 1
    states = [LlamaForCausalLM.from_pretrained(one).state_dict() for one in files]
    assert furthest(*states) < 1e-3


def noisy(folder: str, plugin: dict[str, Any] | None) -> list[float]:
    with launched():
        found = trainer(folder, plugin, neftune_noise_alpha=5.0)
        found.train()
        return logged(found)


@pytest.mark.parametrize("compile", [False, *long(True)])
def test_noise_of_embeddings_is_that_of_ddp(ranks: Ranks, compile: bool, tmp_path: Path) -> None:
    """Each rank draws its own noise, so that one process cannot be compared."""
    expected = ranks.run(noisy, str(tmp_path / "ddp"), None)
    found = ranks.run(noisy, str(tmp_path / "sharded"), {"compile": compile})
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert furthest(*(weights(tmp_path / one / "checkpoint-4") for one in ("sharded", "ddp"))) < 1e-3


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
        found = trainer(folder, plugin, model, **{**BEST, "greater_is_better": True})
        found.train()
        found.save_model(f"{folder}/best")
        return logged(found)


def test_adapters_alone_step_and_are_saved(ranks: Ranks, tmp_path: Path) -> None:
    expected = adapted(str(tmp_path / "plain"), None)
    for found in ranks.run(adapted, str(tmp_path / "sharded"), {"zero_stage": 3}):
        assert found == pytest.approx(expected, abs=1e-5)
    for folder in ("checkpoint-2", "best"):
        files = [load_file(tmp_path / one / folder / "adapter_model.safetensors") for one in ("sharded", "plain")]
        assert furthest(*files) < 1e-3
    best = load_file(tmp_path / "sharded/checkpoint-1/adapter_model.safetensors")
    assert furthest(load_file(tmp_path / "sharded/best/adapter_model.safetensors"), best) == 0
    x = torch.arange(CONTEXT)[None]
    outputs = [PeftModel.from_pretrained(llama(), tmp_path / one / "best")(x).logits for one in ("sharded", "plain")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch_compile": ({"torch_compile": True}, "torch_compile=True.*: zgraph compiles the model itself; leave it out"),
    "save_on_each_node": ({"save_on_each_node": True}, "save_on_each_node=True.*: every rank writes its part to one"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*; set the batch size"),
    "8 bits": ({"optim": "adamw_bnb_8bit"}, "sharded .* write optimizer_cls_and_kwargs=.*AdamW8bit.*, or optim="),
    "fsdp": ({"fsdp": "full_shard"}, "would shard the model in another way; leave it out"),
}


def refusal(name: str, folder: str) -> None:
    arguments, text = REFUSED[name]
    with launched(), pytest.raises(ValueError, match=text):
        trainer(folder, {}, **arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_other_ways_are_refused(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(refusal, name, str(tmp_path))


def test_private_names_of_transformers_are_there() -> None:
    assert "synced_gpus" in inspect.signature(LlamaForCausalLM.generate).parameters
    names = ("_build_accelerator_args", "_save", "_save_rng_state")
    for name in (*names, "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
        assert callable(getattr(Trainer, name))


@pytest.mark.parametrize("lowering", long("inductor"))
def test_inductor_trains_to_the_same_losses(ranks: Ranks, lowering: str, tmp_path: Path) -> None:
    expected, _ = run(str(tmp_path / "plain"), "stage 0", None)
    plugin = {"zero_stage": 3, "options": {"lowering": lowering}}
    for found, _ in ranks.run(run, str(tmp_path / "sharded"), "stage 0", plugin):
        assert found == pytest.approx(expected, abs=1e-5)
