"""Runs of front ends that are killed by SIGKILL again and again, and each time resumed; see test_front_end_kills.py.

    python -m tests.support.runs.killed_front_ends FOLDER --by trainer --kills 20 --seed 1

As `tests.support.runs.killed`, but each rank is a script of Accelerate or of the Trainer, with dropout. By Accelerate,
each save has a folder of its own, or all have the same one ("one_folder"); a script takes the newest that is not
refused. The Trainer is told `resume_from_checkpoint=True`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zgraph
from tests.support.front_ends import TOKENS, launched, loss_of, tied, tokens
from tests.support.runs.killed import RANKS, SAVE_EVERY, digest, kill_again_and_again
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.integrations.transformers import sharded

MOST_STEPS = 10**6


@contextlib.contextmanager
def started(rank: int, folder: Path, attempt: int) -> Iterator[TextIO]:
    """A rank in its group, as torchrun starts it, and the file of its notes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{attempt}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    with launched(), (folder / f"rank{rank}.txt").open("a", buffering=1) as notes:
        yield notes
    dist.destroy_process_group()


class Progress:
    """The number of the last step, in Accelerate's checkpoint, and the times of saves."""

    def __init__(self, notes: TextIO) -> None:
        self.step = 0
        self.notes, self.started, self.saving = notes, time.monotonic(), 0.0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def begin_to_save(self, step: int) -> None:
        self.notes.write(f"saving {step}\n")
        self.saving = time.monotonic()

    def end_save(self, step: int) -> None:
        now = time.monotonic()
        self.notes.write(f"saved {step} {now - self.saving} {now - self.started}\n")


def by_accelerate(rank: int, folder: Path, attempt: int, last: int, *, one_folder: bool = False, **_: Any) -> None:
    with started(rank, folder, attempt) as notes:
        accelerator = Accelerator(cpu=True, zgraph_plugin=ZgraphPlugin(compile=False))
        model: Any = tied(dropout=0.3)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(rank)
        progress = Progress(notes)
        accelerator.register_for_checkpointing(progress)
        saved = sorted(folder.glob("saved_*"), key=lambda one: int(one.name.rpartition("_")[2]), reverse=True)
        for newest in saved:
            try:
                accelerator.load_state(str(newest))
                break
            except zgraph.CheckpointError as error:
                assert "has no complete checkpoint of Tied" in str(error)
                notes.write(f"refused {newest.name}\n")
        notes.write(f"start {progress.step}\n")
        while progress.step < last:
            progress.step += 1
            x, y = tokens(4, seed=RANKS * progress.step + rank).tensors
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            notes.write(f"step {progress.step} {loss.item().hex()}\n")
            if progress.step % SAVE_EVERY == 0:
                progress.begin_to_save(progress.step)
                accelerator.save_state(str(folder / f"saved_{0 if one_folder else progress.step}"))
                progress.end_save(progress.step)
        notes.write(f"left {digest(model, optimizer.optimizer)}\n")


def in_one_folder(*args: Any, **options: Any) -> None:
    by_accelerate(*args, **options, one_folder=True)


class Noted(Trainer):
    """Notes the loss of each step."""

    notes: TextIO

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.notes.write(f"step {self.state.global_step + 1} {loss.item().hex()}\n")
        return loss


class Saves(TrainerCallback):
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.notes.write(f"start {state.global_step}\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            self.progress.begin_to_save(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.end_save(state.global_step)


def by_trainer(rank: int, folder: Path, attempt: int, last: int, **_: Any) -> None:
    logging.disable(logging.WARNING)
    with started(rank, folder, attempt) as notes:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, attention_dropout=0.3, **sizes))
        rows = [{"input_ids": row, "labels": row} for row in tokens(64).tensors[0]]
        arguments: dict[str, Any] = {"max_steps": min(last, MOST_STEPS), "save_steps": SAVE_EVERY, "use_cpu": True}
        arguments |= {"lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True, "logging_steps": 1000}
        args = TrainingArguments(str(folder), per_device_train_batch_size=2, save_total_limit=3, **arguments)
        trainer: Any = sharded(Noted, compile=False)(
            model, args, train_dataset=rows, callbacks=[Saves(Progress(notes))]
        )
        trainer.notes = notes
        try:
            trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        except zgraph.CheckpointError as error:
            assert "no checkpoint of which is complete" in str(error)
            notes.write("refused all\n")
            trainer.train()
        notes.write(f"left {digest(trainer.model, trainer.optimizer.optimizer)}\n")


FRONT_ENDS: dict[str, Callable[..., None]] = {
    "accelerate": by_accelerate,
    "one_folder": in_one_folder,
    "trainer": by_trainer,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill and resume a run of a front end.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by", choices=FRONT_ENDS, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = kill_again_and_again(options.folder, options.kills, options.seed, False, FRONT_ENDS[options.by])
    print(json.dumps(found))
