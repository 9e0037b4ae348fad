"""zgraph in Hugging Face's Trainer, and in all trainers that derive from it, such as TRL's.

    from zgraph.integrations.transformers import sharded

    trainer = sharded(SFTTrainer, zero_stage=3)(model=model, args=args, train_dataset=data)

Arguments, callbacks, logs and checkpoints of the Trainer stay as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import Trainer

from zgraph.checkpoint import latest_checkpoint, save_checkpoint
from zgraph.errors import CheckpointError, ZgraphError
from zgraph.integrations.accelerate import Accelerator, ZgraphPlugin
from zgraph.integrations.refusals import refuse_arguments, refuse_other_ways
from zgraph.integrations.sharding import discard, is_sharded, load_complete, unwrapped
from zgraph.integrations.trainer_metrics import Measured
from zgraph.sharding.context.hugging_face import register_attention
from zgraph.sharding.scope import scopes_of
from zgraph.sharding.state_dict import full_state_dict

T = TypeVar("T", bound=Trainer)
FOLDER = "zgraph"  # of zgraph's checkpoint inside checkpoint-N
SCHEDULER = "scheduler.pt"  # as the Trainer calls it


def sharded(cls: type[T], *, metrics: bool = False, **plugin: Any) -> type[T]:
    """Return a subclass of a trainer that shards and compiles its model with zgraph.

    Each `checkpoint-N` has whole weights for `from_pretrained`, and zgraph's checkpoint of weights, optimizer and error
    feedback, from which any number of ranks resumes. `train(resume_from_checkpoint=True)` takes the newest complete
    folder.

    Args:
        cls: `transformers.Trainer` or a subclass of it.
        metrics: whether logs of training have the values of `zgraph.Metrics` for the last completed step. Evaluation
            and saving do not count. Tokens per second need `include_num_input_tokens_seen` in the TrainingArguments.
        plugin: arguments of `zgraph.shard` but the module, `options` of the backend, and `compile`.

    Raises:
        TypeError: `zgraph.shard` has no such argument.
        ValueError: when a trainer is created whose arguments ask for another way to shard, compile or save.
    """
    register_attention()
    body = {"zgraph_plugin": ZgraphPlugin(**plugin), "__module__": cls.__module__}
    bases = (Measured,) if metrics else ()
    return cast(Any, type(cls.__name__, (*bases, _Sharded, cls), body))


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
        refuse_arguments(type(self), self.args, is_compiled=self.zgraph_plugin.compile)
        refuse_other_ways(found)
        self._accelerator_args = found
        return found

    def create_accelerator_and_postprocess(self) -> None:
        self._trainer().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(zgraph_plugin=self.zgraph_plugin, **self._accelerator_args)

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:  # the Trainer's newest folder may be one that a killed run was writing
            found = list(Path(self.args.output_dir).glob("checkpoint-*"))
            complete = [folder for folder in found if _is_complete(folder)]
            if found and not complete:
                raise CheckpointError(
                    f"zgraph: {self.args.output_dir} has {len(found)} folders checkpoint-*, no checkpoint of which is "
                    "complete: the runs that saved them were not sharded by zgraph, or were killed while saving; "
                    "write train() to begin anew."
                )
            if complete:
                resume_from_checkpoint = str(max(complete, key=lambda folder: int(folder.name.rpartition("-")[2])))
        return self._trainer().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        has_context = any(scope.context is not None for scope in scopes_of(self.model))
        if has_context and any("shift_labels" in batch for batch in batch_samples):
            raise ZgraphError(
                "zgraph: the Trainer counts the targets of batches that zgraph.context_batch has cut already, and "
                "would count those of each rank only. Cut them later: def _prepare_inputs(self, inputs): return "
                "zgraph.context_batch(self.model, super()._prepare_inputs(inputs))."
            )
        return self._trainer()._get_num_items_in_batch(batch_samples, device)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and is_sharded(self.model):
            state_dict = full_state_dict(self.model, keep=_adapters_only(self.model))
        self._trainer()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        discard([folder for folder in [Path(output_dir, FOLDER)] if folder.exists()])
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the rest of a checkpoint: zgraph's own comes last, so that a folder that has it is complete."""
        self._trainer()._save_rng_state(output_dir)
        folder = os.path.join(output_dir, FOLDER)
        save_checkpoint(folder, self.model, unwrapped(self.optimizer), step=self.state.global_step)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_complete(os.path.join(checkpoint, FOLDER), self.model, [unwrapped(self.optimizer)])
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))

    def _trainer(self) -> Any:
        """Return the methods of the trainer, which come after those of this class."""
        return super()


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):  # not there, or half written
        return False
    return latest_checkpoint(folder / FOLDER) is not None


def _adapters_only(model: nn.Module) -> Any:
    """Return which entries of a state dict PEFT saves, so that the frozen base is not gathered; None: all."""
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    if not adapters:
        return None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    marks = tuple(f".{adapter}." for adapter in adapters)
    return lambda name: name in trained or any(mark in f"{name}." for mark in marks)
