"""zgraph in Hugging Face's Trainer, and in all trainers that derive from it, such as TRL's.

    from zgraph.integrations.transformers import sharded

    trainer = sharded(SFTTrainer, zero_stage=3)(model=model, args=args, train_dataset=data)

Arguments, callbacks, logs and checkpoints of the Trainer stay as they are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import Trainer

from zgraph.checkpoint import latest_checkpoint, save_checkpoint
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.integrations.refusals import refuse_other_ways
from zgraph.integrations.sharding import is_sharded, load_complete, unwrapped
from zgraph.sharding.state_dict import full_state_dict

T = TypeVar("T", bound=Trainer)
FOLDER = "zgraph"  # of zgraph's checkpoint inside checkpoint-N
SCHEDULER = "scheduler.pt"  # as the Trainer calls it
REFUSED = (  # arguments of the Trainer, and what to write
    ("save_on_each_node", "every rank writes its part to one folder; leave it out"),
    ("auto_find_batch_size", "a second try would need the model as it was before it was sharded; set the batch size"),
    ("torch_compile", "zgraph compiles the model itself; leave it out"),
)

TOGGLING = (
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "RLOOTrainer",
)  # trl 1.16: turn checkpointing off and on in steps


def sharded(cls: type[T], **plugin: Any) -> type[T]:
    """Return a subclass of a trainer that shards and compiles its model with zgraph.

    Each `checkpoint-N` has whole weights for `from_pretrained`, and zgraph's checkpoint of weights, optimizer and error
    feedback, from which any number of ranks resumes. `train(resume_from_checkpoint=True)` takes the newest complete
    folder.

    Args:
        cls: `transformers.Trainer` or a subclass of it.
        plugin: arguments of `zgraph.shard` but the module, `options` of the backend, and `compile`.

    Raises:
        TypeError: `zgraph.shard` has no such argument.
        ValueError: when a trainer is created whose arguments ask for another way to shard, compile or save.
    """
    body = {"zgraph_plugin": ZgraphPlugin(**plugin), "__module__": cls.__module__}
    return cast(Any, type(cls.__name__, (_Sharded, cls), body))


class _Sharded:
    """Methods that `sharded` puts before those of a trainer (transformers 5.23)."""

    zgraph_plugin: ZgraphPlugin
    args: Any
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    state: Any
    accelerator: Any

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer()._build_accelerator_args(**kwargs)
        for name, why in REFUSED:
            if getattr(self.args, name):
                raise ValueError(f"zgraph: TrainingArguments({name}=True): {why}.")
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if "8bit" in optimizer:
            raise ValueError(
                f"zgraph: TrainingArguments(optim={optimizer!r}): optimizers of 8 bits do not step sharded parameters; "
                'write optim="adamw_torch".'
            )
        toggling = [base.__name__ for base in type(self).__mro__ if base.__name__ in TOGGLING]
        if toggling and self.zgraph_plugin.compile and self.args.gradient_checkpointing:
            raise ValueError(
                f"zgraph: {toggling[-1]} turns activation checkpointing off and on in each step, after which all would "
                "be compiled again; write gradient_checkpointing=False in its arguments, or compile=False in sharded."
            )
        refuse_other_ways(found)
        self._accelerator_args = found
        return found

    def create_accelerator_and_postprocess(self) -> None:
        self._trainer().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(zgraph_plugin=self.zgraph_plugin, **self._accelerator_args)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:  # the Trainer's newest folder may be one that a killed run was writing
            complete = [one for one in Path(self.args.output_dir).glob("checkpoint-*") if _is_complete(one)]
            newest = max(complete, key=lambda folder: int(folder.name.rpartition("-")[2]), default=True)
            resume_from_checkpoint = newest if newest is True else str(newest)
        return self._trainer().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and is_sharded(self.model):
            state_dict = full_state_dict(self.model, keep=_adapters_only(self.model))
        self._trainer()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = os.path.join(output_dir, FOLDER)
        save_checkpoint(folder, self.model, unwrapped(self.optimizer), step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_complete(os.path.join(checkpoint, FOLDER), self.model, [unwrapped(self.optimizer)])
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))

    def _trainer(self) -> Any:
        """Return the methods of the trainer, which come after those of this class."""
        return super()


def _is_complete(folder: Path) -> bool:
    return (folder / "trainer_state.json").is_file() and latest_checkpoint(folder / FOLDER) is not None


def _adapters_only(model: nn.Module) -> Any:
    """Return which entries of a state dict PEFT saves, so that the frozen base is not gathered; None: all."""
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    if not adapters:
        return None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    marks = tuple(f".{adapter}." for adapter in adapters)
    return lambda name: name in trained or any(mark in f"{name}." for mark in marks)
