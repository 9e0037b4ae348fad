"""What scripts with Accelerate do besides training and resuming, on two ranks against one process."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import zgraph
from tests.support.front_ends import CONTEXT, VOCABULARY, furthest, launched, llama, loss_of, tied, tokens
from tests.support.ranks import Ranks
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin

BATCH = 4
COMPILED, EAGER = {"options": {"lowering": "fx"}}, {"compile": False}


def made(plugin: dict[str, Any] = EAGER, **arguments: Any) -> Accelerator:
    return Accelerator(cpu=True, zgraph_plugin=ZgraphPlugin(zero_stage=3, **plugin), **arguments)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def mine(seed: int = 1) -> tuple[Tensor, ...]:
    """Inputs and targets of this rank, of a batch of eight rows."""
    start = BATCH * dist.get_rank()
    return tokens(8, seed)[start : start + BATCH]


def equal(accelerator: Accelerator, model: nn.Module, expected: nn.Module, tolerance: float = 1e-3) -> None:
    """Whole weights are those of a model that is not sharded."""
    found = accelerator.get_state_dict(model)
    assert accelerator.is_main_process is bool(found)
    assert not found or furthest(found, expected.state_dict()) <= tolerance


# --- models of Hugging Face -------------------------------------------------------------------------------------------


def texts(rows: int = 32) -> list[Tensor]:
    """Rows of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (3 + 5 * row % (CONTEXT - 3),), generator=generator) for row in range(rows)]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


def batches_of_texts() -> DataLoader[Any]:
    return DataLoader(texts(), batch_size=BATCH, collate_fn=padded)  # pyright: ignore[reportArgumentType]


def trained_alone(model: nn.Module, batches: DataLoader[Any]) -> list[float]:
    """Losses of one process, on the batches of both ranks: even ones are the first's, odd ones the second's."""
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    given: Iterator[Any] = iter(batches)
    losses: list[float] = []
    for one, other in zip(given, given, strict=True):
        assert one["input_ids"].shape != other["input_ids"].shape
        loss = (model(**one).loss + model(**other).loss) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(accelerator: Accelerator, model: Any, batches: DataLoader[Any]) -> tuple[Any, list[float]]:
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    model, optimizer, given = accelerator.prepare(model, optimizer, batches)
    losses: list[float] = []
    for batch in given:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return model, losses


def padded_batches_of_tied_embeddings(folder: Path) -> None:
    """Trained, then saved in both ways, and loaded by plain `from_pretrained`."""
    alone = llama(tie_word_embeddings=True)
    expected = trained_alone(alone, batches_of_texts())
    accelerator = made(COMPILED)
    model, losses = train(accelerator, llama(tie_word_embeddings=True), batches_of_texts())
    assert losses == pytest.approx(expected, abs=1e-5)
    equal(accelerator, model, alone)
    assert isinstance(accelerator.unwrap_model(model), LlamaForCausalLM)
    accelerator.save_model(model, folder / "pieces", max_shard_size="5KB")
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder / "one", is_main_process=accelerator.is_main_process, state_dict=whole
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.copy(folder / "one/config.json", folder / "pieces")
    accelerator.wait_for_everyone()
    assert len(list(folder.glob("pieces/*.safetensors"))) > 1
    x = torch.arange(CONTEXT)[None]
    for one in ("one", "pieces"):
        assert not any("_orig_mod" in key for file in folder.glob(f"{one}/*.safetensors") for key in load_file(file))
        found = LlamaForCausalLM.from_pretrained(folder / one)
        assert found.config.architectures == ["LlamaForCausalLM"]
        torch.testing.assert_close(found(x).logits, alone(x).logits, rtol=0, atol=1e-4)


def generation_of_different_lengths(folder: Path) -> None:
    accelerator = made()
    model, _ = train(accelerator, llama(), batches_of_texts())
    alone = llama()
    trained_alone(alone, batches_of_texts())
    prompt = torch.arange(3 + accelerator.process_index)[None]
    options = {"max_new_tokens": 2 + 3 * accelerator.process_index, "do_sample": False, "pad_token_id": 0}
    for one in (accelerator.unwrap_model(model), copy.deepcopy(model)):
        assert torch.equal(one.generate(prompt, **options), alone.generate(prompt, **options))
    with pytest.raises(zgraph.AgreementError, match="ranks 0 and 1 do not do the same"):
        model.generate(prompt, **options, synced_gpus=False)
        accelerator.get_state_dict(model)


def adapters(folder: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(llama(), config)

    alone = adapted()
    expected = trained_alone(alone, batches_of_texts())
    accelerator = made()
    model, losses = train(accelerator, adapted(), batches_of_texts())
    assert losses == pytest.approx(expected, abs=1e-5)
    assert all((one.grad is None) for name, one in model.named_parameters() if "lora_" not in name)
    equal(accelerator, model, alone)
    kept = zgraph.full_state_dict(model, keep=lambda name: "lora_" in name)
    for name, weights in (("kept", kept), ("whole", accelerator.get_state_dict(model))):
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(folder / name, state_dict=weights)
            saved = load_file(folder / name / "adapter_model.safetensors")
            assert saved and all("lora_" in key for key in saved)
            found: Any = PeftModel.from_pretrained(llama(), str(folder / name))
            x = torch.arange(CONTEXT)[None]
            torch.testing.assert_close(found(x).logits, alone(x).logits, rtol=0, atol=1e-4)


# --- loops ------------------------------------------------------------------------------------------------------------


def an_odd_number_of_batches(folder: Path) -> None:
    """Two optimizers of one model; the last window of each epoch has one micro-batch."""
    rows, steps = 5 * BATCH * 2, 2

    def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [adamw(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]

    alone = tied()
    optimizers = halves(alone)
    accelerator = made(COMPILED, gradient_accumulation_steps=2)
    model = tied()
    model, *ours, batches = accelerator.prepare(model, *halves(model), DataLoader(tokens(rows), batch_size=BATCH))
    for _ in range(2):
        found: list[float] = []
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                for optimizer in ours:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(float(accelerator.reduce(loss.detach(), "mean")))
        expected: list[float] = []
        for number in range(5):
            x, y = tokens(rows)[2 * BATCH * number : 2 * BATCH * (number + 1)]
            loss = loss_of(alone(x), y)
            (loss / 2).backward()
            expected.append(loss.item())
            if number % steps == steps - 1 or number == 4:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert found == pytest.approx(expected, abs=1e-5)
    equal(accelerator, model, alone)


def split_batches(folder: Path) -> None:
    """Values of gradients clipped, and memory freed for a second model."""
    accelerator = made(dataloader_config=DataLoaderConfiguration(split_batches=True))
    for _ in range(2):
        alone, model = tied(), tied()
        one, two = adamw(alone.parameters()), adamw(model.parameters())
        model, two, batches = accelerator.prepare(model, two, DataLoader(tokens(24), batch_size=2 * BATCH))
        for (x, y), (all_x, all_y) in zip(batches, DataLoader(tokens(24), batch_size=2 * BATCH), strict=True):
            assert len(x) == BATCH
            accelerator.backward(loss_of(model(x), y))
            loss_of(alone(all_x), all_y).backward()
            accelerator.clip_grad_value_(model.parameters(), 0.01)
            nn.utils.clip_grad_value_(alone.parameters(), 0.01)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        equal(accelerator, model, alone)
        model, two, batches = accelerator.free_memory(model, two, batches)
        assert model is two is batches is None


class Count:
    """A number that is registered for checkpoints."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def numbered_checkpoints(folder: Path) -> None:
    """Two of three folders are kept; a run goes on in the middle of an epoch, from the newest.

    Without dropout: a data loader draws a number when it starts anew, under plain Accelerate as well.
    """
    ends: list[Any] = []
    for resume in (False, True):
        with launched():
            naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
            seeded = DataLoaderConfiguration(use_seedable_sampler=True)
            accelerator = made(project_config=naming, mixed_precision="bf16", dataloader_config=seeded)
            model, count = tied(), Count()
            parts = accelerator.prepare(
                model, adamw(model.parameters()), DataLoader(tokens(32), batch_size=BATCH, shuffle=True)
            )
            model, optimizer, batches = parts
            accelerator.register_for_checkpointing(count)
            if resume:
                accelerator.load_state()
                assert count.steps == 3
                batches = accelerator.skip_first_batches(batches, count.steps)
            losses: list[float] = []
            for x, y in batches:
                with accelerator.autocast():
                    loss = loss_of(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                count.steps += 1
                if not resume and count.steps <= 3:
                    accelerator.save_state()
            ends.append((losses[-1], accelerator.get_state_dict(model)))
    assert sorted(one.name for one in (folder / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    (loss, weights), (resumed, found) = ends
    assert loss == resumed
    assert not found or furthest(found, weights) == 0


def a_folder_that_is_saved_again(folder: Path) -> None:
    """It has the last save alone, also if that is of an earlier step; hooks get models and whole weights."""
    seen: list[Any] = []
    weights: list[dict[str, Tensor]] = []
    for batches in (3, 1):
        with launched():
            accelerator = made()
            model = tied()
            model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
            accelerator.register_save_state_pre_hook(lambda *given: seen.append(given))
            for _ in range(batches):
                with accelerator.accumulate(model):
                    x, y = mine()
                    accelerator.backward(loss_of(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.save_state(str(folder))
            weights.append(accelerator.get_state_dict(model))
    assert [[type(one) for one in models] for models, _, _ in seen] == [[type(model)]] * 2
    assert not weights[1] or (furthest(seen[1][1][0], weights[1]) == 0 and furthest(*weights) > 0)
    with launched():
        accelerator = made()
        model = accelerator.prepare(tied())
        accelerator.register_load_state_pre_hook(lambda models, where: seen.append((models, where)))
        accelerator.load_state(str(folder))
        assert seen[-1] == ([model], str(folder))
        found = accelerator.get_state_dict(model)
        assert not found or furthest(found, weights[1]) == 0


def an_overflow_on_one_rank(folder: Path) -> None:
    """All ranks skip the step, and the next one is taken: with the scaler that Accelerate makes on a GPU."""
    accelerator = made(COMPILED)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    model, alone = tied(), tied()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    assert isinstance(optimizer.scaler, zgraph.GradScaler)
    x, y = mine()
    poison = torch.tensor(float("inf") if accelerator.process_index == 1 else 1.0)
    accelerator.backward(loss_of(model(x), y) * poison)
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped and optimizer.scaler.get_scale() == 128.0
    equal(accelerator, model, alone, tolerance=0.0)
    optimizer.zero_grad()
    accelerator.backward(loss_of(model(x), y))
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped and optimizer.scaler.get_scale() == 256.0
    x, y = tokens(8).tensors
    loss_of(alone(x), y).backward()
    adamw(alone.parameters()).step()
    equal(accelerator, model, alone)


SCRIPTS: dict[str, Callable[[Path], None]] = {
    script.__name__: script
    for script in (
        *(padded_batches_of_tied_embeddings, generation_of_different_lengths, adapters, an_odd_number_of_batches),
        *(split_batches, numbered_checkpoints, a_folder_that_is_saved_again, an_overflow_on_one_rank),
    )
}


def run(name: str, folder: str) -> None:
    with launched():
        SCRIPTS[name](Path(folder))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_on_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(run, name, str(tmp_path))


def test_one_process_without_others_trains_as_accelerate_does() -> None:
    ends: list[tuple[list[float], dict[str, Tensor]]] = []
    for make in (lambda: accelerate.Accelerator(cpu=True), made):
        with launched():
            model, losses = train(make(), llama(), batches_of_texts())
            ends.append((losses, model.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert furthest(ends[0][1], ends[1][1]) == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def loads(rows: int, **how: Any) -> Any:
    """A data loader of batches of four, prepared without even_batches."""
    config = DataLoaderConfiguration(even_batches=False, split_batches=how.pop("split_batches", False))
    return made(dataloader_config=config).prepare(DataLoader(tokens(rows), batch_size=BATCH, **how))


def joins() -> None:
    accelerator = made()
    model = accelerator.prepare(tied())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "uneven": (lambda: loads(12), "even_batches=False gives ranks different numbers .*; leave even_batches out"),
    "uneven, split": (lambda: loads(8, split_batches=True), "even_batches=False gives ranks different numbers"),
    "join": (joins, "join_uneven_inputs is not available, since .*; leave it out, and even_batches=False as well"),
}


def refusals() -> None:
    for call, text in REFUSED.values():
        with launched(), pytest.raises(ValueError, match=text):
            call()
    for rows, how in ((16, {}), (12, {"drop_last": True})):
        with launched():
            assert len(list(loads(rows, **how))) == rows // BATCH // 2


def test_what_would_let_ranks_differ_is_refused(ranks: Ranks) -> None:
    ranks.run(refusals)
